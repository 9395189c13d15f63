"""Who does the expensive work of the update: everyone, one replica for each matrix, or all of them together?

Products and factorizations of whole matrices (Muon, Shampoo, SOAP, ...) cannot run on blocks of rows. Repeating them
sends nothing and costs N times the work. Where several leaves are treated alike, their stack can be split instead:
each replica owns some of the matrices (`capture/stacking.py` finds them). Where there are too few of them to go round,
products can be split inside (`propagation/inside.py`). These programs are planned; the fastest runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..capture.stacking import Stacking, stack
from ..capture.step import Captured
from ..capture.update_pieces import Barred, Found, find
from ..core import compat, passes
from ..core.layout import Split
from ..core.pieces import STACKED, Piece
from ..core.program import Equation, Program
from ..core.schedule import Schedule, Step
from ..machine.replicas import Replicas
from .costs import wire_time
from .flops import program_flops
from .formatting import duration
from .plan import Owned
from .propagation.price import Price, slowest, work, work_of
from .rows import rows_of

_COND, _DOT = compat.primitive("cond"), compat.primitive("dot_general")


def stacked(captured: Captured, unsharded: Schedule, replicas: Replicas) -> Captured:
    """The step with equal work stacked; the same object where there is none.

    `unsharded` says which equations run over the examples: those are shared among the replicas already.
    """
    if replicas.count == 1 or any(captured.kept):
        return captured
    peak = replicas.topology.chip.peak

    def worth(program: Program) -> float:
        return program_flops(program) / peak.of(program.outputs[0].array.dtype)

    program = stack(captured.program, Stacking(_barred(unsharded), replicas.count, worth, rows_of))
    if program is captured.program:
        return captured
    return replace(captured, program=passes.leave("stacking", program))


def price_inside(replicas: Replicas) -> Price:
    """What decisions cost where products of state may be split, see `propagation/inside.py`."""
    return Price.of(replicas.topology.rings, replicas.topology.chip.peak)


def waits(best: Schedule, repeated: Schedule, replicas: Replicas) -> bool:
    """Does the update's work take some time, and is it far from being shared evenly?"""
    mine, all_of_it = _products(best, replicas), _products(repeated, replicas)
    return mine > _SOME * seconds(best, replicas) and mine > _EVEN * all_of_it / replicas.count


_SOME, _EVEN = 0.1, 1.5
WORTH_MORE_BYTES = 0.7  # of the predicted seconds: what sends more than the replicated step must be much faster


def _barred(unsharded: Schedule) -> Barred:
    examples = _over_examples(unsharded)
    return lambda equation: equation in examples or _is_tied_down(equation)


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
    return name in ("dot_general", "scan", "while", "cond") and equation.is_differentiated


_STAY = ("random_", "rng_", "threefry", "sharding_constraint", "reshard", "device_put", "call_hi", "shard_map")


def seconds(schedule: Schedule, replicas: Replicas) -> float:
    """What tells plans apart: communication, and products that do not run over the examples."""
    return wire_time(schedule.collectives, replicas.axes, replicas.topology) + _products(schedule, replicas)


def saved(schedule: Schedule, baseline: Schedule, replicas: Replicas) -> float:
    """What it would cost if every replica did all of the update's work: bytes that could be sent in the same time."""
    if replicas.count == 1:
        return 0.0
    return max(_products(baseline, replicas) - _products(schedule, replicas), 0.0) * slowest(replicas.topology.rings)


def _products(schedule: Schedule, replicas: Replicas) -> float:
    return work(schedule, replicas.topology.chip.peak)


INSIDE, OWNED_OR_INSIDE = "split inside", "owned or split inside"


class Way(NamedTuple):
    """The step with the expensive work of its update done in one way."""

    name: str  # "repeated", "owned" or one of those above
    captured: Captured
    schedule: Schedule
    seconds: float


def owners(ways: Sequence[Way], taken: Way, unsharded: Schedule, replicas: Replicas) -> tuple[Owned, ...]:
    """Who does what, for the plan."""
    told = ", ".join(f"{duration(way.seconds)} {way.name}" for way in ways) + " (wire and products, predicted)"
    shares = _Shares(taken.schedule, unsharded, replicas)
    stacking = [way for way in ways if way.captured is not ways[0].captured]
    apart = find(ways[0].captured.program, _barred(unsharded)) if taken not in stacking else []
    found: dict[Owned, None] = {}
    for step in _stacks(stacking[-1].schedule) if stacking else ():
        piece: Piece = step.equation.params["piece"]
        slots = step.ruling.blocks[0].shape[0]
        has, line = [piece.count], step.equation.line
        share = 1.0
        if taken in stacking:
            has = [len(rows) for rows in piece.patterns(slots)] if slots < len(piece.slots) else has
            share = max(has) / piece.count
        elif single := next((f for f in apart if f.seed.line == line), None):
            share = shares.of(single)
            if piece.joined and shares.by_rows(single):  # as they rest
                has = [round(share * piece.count)]
        entry = _entry(piece.program, piece.joined, (piece.count, share), line)
        found[replace(entry, held=(min(has), max(has)), why=told)] = None
    for single in alone((stacking or ways)[-1].captured, unsharded):
        entry = _entry(Program(single.inputs, single.outputs, single.equations), False, (1, shares.of(single)), "")
        found[replace(entry, line=single.seed.line, why=told)] = None
    return tuple(found)


class _Shares:
    """Of the work that the pieces of an update take, what a replica does."""

    def __init__(self, taken: Schedule, unsharded: Schedule, replicas: Replicas):
        self.replicas = replicas
        self.taken, self.whole = ({s.equation: (s, x.axes) for s in x.steps} for x in (taken, unsharded))

    def of(self, piece: Found) -> float:
        mine, whole = (
            sum(work_of(*steps[e], self.replicas.topology.chip.peak) for e in piece.equations if e in steps)
            for steps in (self.taken, self.whole)
        )
        return min(mine / whole, 1.0) if whole else 1.0

    def by_rows(self, piece: Found) -> bool:
        """Do leaves that are stacks rest with those who own their rows?"""
        step, _ = self.taken[piece.seed]
        return any(isinstance(p, Split) and p.dim == 0 for layout in step.operands for p in layout)


def alone(captured: Captured, unsharded: Schedule) -> list[Found]:
    """The pieces of the update that are the only ones of their kind."""
    return find(captured.program, _barred(unsharded))


def _entry(program: Program, joined: bool, done: tuple[int, float], line: str) -> Owned:
    """Work on so many matrices, and the share of it that a replica does."""
    largest = max((v.array for v in program.inputs), key=lambda a: a.size)
    count, share = done
    before = count * program_flops(program)
    return Owned(
        shape=largest.shape[1:] if joined else largest.shape,
        dtype=str(largest.dtype),
        count=count,
        held=(count, count),
        flops_before=before,
        flops_after=share * before,
        line=line,
    )


def _stacks(schedule: Schedule) -> Iterator[Step]:
    for step in schedule.steps:
        if step.equation.primitive is STACKED:
            yield step
        for body in step.bodies:
            yield from _stacks(body)
