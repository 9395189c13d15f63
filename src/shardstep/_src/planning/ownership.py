"""Who does the expensive work of the update: everyone, or one replica for each matrix?

Products and factorizations of whole matrices (Muon, Shampoo, SOAP, ...) cannot run on blocks of rows. Repeating them
sends nothing and costs N times the work. Where several leaves are treated alike, their stack can be split instead:
each replica owns some of the matrices (`capture/stacking.py` finds them). Both programs are planned; the faster runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..capture.stacking import Stacking, stack
from ..capture.step import Captured
from ..core import compat, passes
from ..core.layout import Array, block_shape
from ..core.pieces import STACKED, Piece
from ..core.program import Equation, Program
from ..core.schedule import Schedule, Step
from ..machine.replicas import Replicas
from .costs import wire_time
from .flops import flops, program_flops
from .formatting import duration
from .plan import Owned
from .rows import rows_of

_COND = compat.primitive("cond")


def stacked(captured: Captured, unsharded: Schedule, replicas: Replicas) -> Captured:
    """The step with equal work stacked; the same object where there is none.

    `unsharded` says which equations run over the examples: those are shared among the replicas already.
    """
    if replicas.count == 1 or any(captured.kept):
        return captured
    examples = _over_examples(unsharded)

    def barred(equation: Equation) -> bool:
        return equation in examples or _is_tied_down(equation)

    rate, peak = _rate(replicas), replicas.topology.chip.peak

    def worth(program: Program) -> float:
        return program_flops(program) / peak.of(program.outputs[0].array.dtype) * rate

    program = stack(captured.program, Stacking(barred, replicas.count, worth, rows_of))
    if program is captured.program:
        return captured
    return replace(captured, program=passes.leave("stacking", program))


def _rate(replicas: Replicas) -> float:
    """Bytes a second over the slowest links between replicas."""
    return min(ring.rate for ring in replicas.topology.rings if ring.size > 1)


def _over_examples(schedule: Schedule) -> set[Equation]:
    """The equations that run over the examples, and the loops and branches that hold some."""
    found: set[Equation] = set()
    for step in schedule.steps:
        inside = set().union(*map(_over_examples, step.bodies))
        if inside or step.ruling.over_examples:
            found.add(step.equation)
        found |= inside
    return found


def _is_tied_down(equation: Equation) -> bool:
    """Does this have to stay as it is: for its effects, its random numbers, its collectives, its derivative?"""
    if equation.effects or any(_is_tied_down(e) for body in equation.bodies for e in body.equations):
        return True
    name = str(equation.primitive)
    if name.startswith(_STAY) or "callback" in name:
        return True
    axes = (equation.params.get("axes"), equation.params.get("axis_name"))
    if any(isinstance(a, str) for named in axes for a in (named if isinstance(named, tuple) else (named,))):
        return True
    return name in ("dot_general", "scan", "while", "cond") and compat.is_differentiated(equation.sources)


_STAY = ("random_", "rng_", "threefry", "sharding_constraint", "reshard", "device_put", "call_hi", "shard_map")


def seconds(schedule: Schedule, replicas: Replicas) -> float:
    """What tells plans apart: communication, and products that do not run over the examples."""
    return wire_time(schedule.collectives, replicas.axes, replicas.topology) + _products(schedule, replicas)


def saved(schedule: Schedule, replicas: Replicas) -> float:
    """What it would cost if every replica did the work of all owners: bytes that could be sent in the same time."""
    total = 0.0
    for step in schedule.steps:
        total += _inside(step, [saved(body, replicas) for body in step.bodies])
        if step.equation.primitive is STACKED:
            piece = step.equation.params["piece"]
            total += piece.worth * (piece.count - piece.done(step.ruling.blocks[0].shape[0]))
    return total


def owners(schedule: Schedule, taken: bool, owned: float, repeated: float) -> tuple[Owned, ...]:
    """Who does what, for the plan: `taken` if this is the schedule that runs; the seconds of either way."""
    told = f"{duration(owned)} owned, {duration(repeated)} repeated (wire and products, predicted)"
    found: dict[Owned, None] = {}
    for step in _stacks(schedule):
        piece: Piece = step.equation.params["piece"]
        height, slots = step.equation.outputs[0].array.shape[0], step.ruling.blocks[0].shape[0]
        largest = max((v.array for v in piece.program.inputs), key=lambda a: a.size)
        each = program_flops(piece.program)
        has = [len(rows) for rows in piece.patterns(slots)] if taken and slots < height else [piece.count]
        entry = Owned(
            shape=largest.shape[1:] if piece.joined else largest.shape,
            dtype=str(largest.dtype),
            count=piece.count,
            held=(min(has), max(has)),
            flops_before=piece.count * each,
            flops_after=max(has) * each,
            line=step.equation.line,
            why=told,
        )
        found[entry] = None
    return tuple(found)


def _stacks(schedule: Schedule) -> Iterator[Step]:
    for step in schedule.steps:
        if step.equation.primitive is STACKED:
            yield step
        for body in step.bodies:
            yield from _stacks(body)


def _inside(step: Step, bodies: Sequence[float]) -> float:
    """Of a loop as often as it runs, of branches the most expensive."""
    if step.equation.primitive is _COND:
        return max(bodies)
    return sum(t * cost for cost, t in zip(bodies, step.times, strict=True))


def _products(schedule: Schedule, replicas: Replicas) -> float:
    total = 0.0
    for step in schedule.steps:
        inside = _inside(step, [_products(body, replicas) for body in step.bodies])
        if step.ruling.over_examples:
            total += inside
            continue
        arrays = [
            Array(block_shape(a.array.shape, layout, schedule.axes), a.array.dtype)
            for a, layout in zip(step.equation.inputs, step.operands, strict=True)
        ]
        done = flops(step.equation.primitive, step.ruling.params, arrays, step.ruling.blocks)
        total += inside + (done / replicas.topology.chip.peak.of(step.ruling.blocks[0].dtype) if done else 0.0)
    return total
