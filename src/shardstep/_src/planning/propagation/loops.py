"""Control flow is rewritten inside: bodies are scheduled like programs of their own.

A loop's carry has one layout for all iterations: the least one above where it enters and what the body returns,

    replicated  <  partial  <  split(d)  <  whole                      (varying stays varying)

so a gradient accumulator that starts as zeros stays partial through the loop and is reduced once behind it, and
optimizer state that enters split stays split. Two different splits have no common layout but the whole value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core import compat
from ...core.errors import ShardstepError
from ...core.layout import (
    REPLICATED,
    Array,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    block_shape,
    fits,
    is_batch,
    put,
)
from ...core.program import Atom, Equation, Program, Var
from ...core.schedule import NOTHING, Demand, Ruling, Schedule, Step
from .microbatches import DEALT, may_deal

if TYPE_CHECKING:
    from .forward import Forward
    from .preferences import Backward

_SCAN, _WHILE, _COND = (compat.primitive(name) for name in ("scan", "while", "cond"))


class PredicateVaries(ShardstepError):
    """A loop's end, or a branch with communication in it, would be decided differently by different replicas."""


def decide(forward: Forward, equation: Equation) -> Step:
    return {_SCAN: _decide_scan, _WHILE: _decide_while, _COND: _decide_cond}[equation.primitive](forward, equation)


def demand(backward: Backward, step: Step) -> None:
    """What the bodies want of the values that enter them, in terms of the equation's operands."""
    for k in range(len(backward.axes)):
        for atom, wanted in zip(step.equation.inputs, _entering(step, k), strict=True):
            backward.ask(atom, k, wanted)
        if step.equation.primitive is _SCAN and may_deal(backward, step, k):
            for atom in step.equation.inputs[sum(compat.scan_counts(step.equation.params)) :]:
                backward.demand_only(atom, k, Demand((DEALT,)))


def _ruling(forward: Forward, equation: Equation, operands: tuple[Layout, ...], results: Sequence[Layout]) -> Ruling:
    made = (v.array for v in equation.outputs)
    blocks = tuple(Array(block_shape(a.shape, r, forward.axes), a.dtype) for a, r in zip(made, results, strict=True))
    return Ruling(operands, tuple(results), equation.params, blocks)


def met_batch(step: Step) -> list[int]:
    """The operands that meet the examples inside a body."""
    first = first_operand(step)
    return (
        [first + i for i in step.bodies[-1].met_batch]
        if step.equation.primitive is not _COND
        else sorted({first + i for body in step.bodies for i in body.met_batch})
    )


def first_operand(step: Step) -> int:
    """Bodies take the operands from here on."""
    if step.equation.primitive is _SCAN:
        return 0
    return step.equation.params["cond_nconsts"] if step.equation.primitive is _WHILE else 1


def _entering(step: Step, k: int) -> list[Demand]:
    if step.equation.primitive is _COND:
        wanted = [NOTHING] * (len(step.equation.inputs) - 1)
        for body in step.bodies:
            wanted = [w | d[k] for w, d in zip(wanted, body.demands, strict=True)]
        return [Demand(full=True), *wanted]
    inside = [d[k] for d in step.bodies[-1].demands]
    if step.equation.primitive is _WHILE:
        return [Demand(full=True)] * step.equation.params["cond_nconsts"] + inside
    xs = sum(compat.scan_counts(step.equation.params))
    return inside[:xs] + [_shift_demand(d, 1) for d in inside[xs:]]


# -- loops --------------------------------------------------------------------------------------------------------


def _decide_scan(forward: Forward, equation: Equation) -> Step:
    (body,) = equation.bodies
    consts, carries = compat.scan_counts(equation.params)
    inputs = equation.inputs
    fixed = [Door.of(entry(forward, a)) for a in inputs[:consts]]
    xs = [_beside_time(forward, a) for a in inputs[consts + carries :]]
    sliced = [_shift(layout, -1) for layout in xs]
    wanted = [_outside(forward, v) for v in equation.outputs[:carries]]
    wanted += [tuple(_shift_demand(d, -1) for d in _outside(forward, v)) for v in equation.outputs[carries:]]
    init = inputs[consts : consts + carries]
    carry, inside = settle(forward, equation, body, fixed, init, sliced, wanted)
    results = [*carry, *(_shift(layout, 1) for layout in inside.outputs[carries:])]
    forward.fallbacks += inside.fallbacks
    operands = (*inside.inputs[:consts], *carry, *xs)
    times = (equation.params["length"],)
    return Step(equation, _ruling(forward, equation, operands, results), (inside,), times)


def _decide_while(forward: Forward, equation: Equation) -> Step:
    test, body = equation.bodies
    tests, fixed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    inputs = equation.inputs
    test_consts = [_reduced(forward, a) for a in inputs[:tests]]
    body_consts = [Door.of(entry(forward, a)) for a in inputs[tests : tests + fixed]]
    wanted = [_outside(forward, v) for v in equation.outputs]
    carry, inside = settle(forward, equation, body, body_consts, inputs[tests + fixed :], [], wanted)
    predicate = forward.body(test, [*test_consts, *carry], [None])
    if any(isinstance(p, Varying) for p in predicate.outputs[0]):
        raise PredicateVaries(
            f"the predicate of the while loop at {equation.line} depends on data of one replica, so replicas would"
            " leave the loop at different times. Reduce what it reads first, e.g. with lax.pmax(x, axis_name)."
        )
    predicate = forward.body(test, [*test_consts, *carry], [(REPLICATED,) * len(forward.axes)])
    forward.fallbacks += (*predicate.fallbacks, *inside.fallbacks)
    operands = (*test_consts, *inside.inputs[:fixed], *carry)
    return Step(equation, _ruling(forward, equation, operands, carry), (predicate, inside), (1, 1))


class Door(NamedTuple):
    """How a value that all iterations share enters a loop: the layout it has there, and the one readers see first."""

    layout: Layout
    seen: Layout

    @classmethod
    def of(cls, layout: Layout) -> Door:
        return cls(layout, layout)

    def opened(self, demands: Sequence[Demand]) -> Door:
        """What the body would gather in every iteration is gathered once, in front of the loop.

        Examples are then still seen split, so that whatever takes some of them shares those among the replicas.
        """
        hoisted = [not isinstance(p, Varying) and d.full for p, d in zip(self.layout, demands, strict=True)]
        layout = tuple(REPLICATED if h else p for h, p in zip(hoisted, self.layout, strict=True))
        seen = tuple(p if is_batch(p) or not h else REPLICATED for h, p in zip(hoisted, self.seen, strict=True))
        return Door(layout, seen)


def settle(
    forward: Forward,
    equation: Equation,
    body: Program,
    doors: Sequence[Door],
    init: Sequence[Atom],
    xs: Sequence[Layout],
    wanted: Sequence[tuple[Demand, ...]],
) -> tuple[list[Layout], Schedule]:
    """The carry layouts that the body keeps, and the body scheduled for them.

    The least ones; unless what they communicate in all iterations is more than having every carry whole would cost (an
    iteration over whole matrices, say).
    """
    least = _fixpoint(forward, equation, body, doors, init, xs, wanted, set())
    if not least[1].collectives:
        return least
    everything = {(i, k) for i in range(len(init)) for k in range(len(forward.axes))}
    whole = _fixpoint(forward, equation, body, doors, init, xs, wanted, everything)
    times = equation.params.get("length", 1)

    def moved(found: tuple[list[Layout], Schedule]) -> float:
        carry, inside = found
        entering = (forward.price(a, layout) for a, layout in zip(init, carry, strict=True))
        return sum(entering) + times * sum(c.total for c in inside.collectives)

    return whole if moved(whole) < moved(least) else least


def _fixpoint(
    forward: Forward,
    equation: Equation,
    body: Program,
    doors: Sequence[Door],
    init: Sequence[Atom],
    xs: Sequence[Layout],
    wanted: Sequence[tuple[Demand, ...]],
    kept: set[tuple[int, int]],
) -> tuple[list[Layout], Schedule]:
    """The least carry layouts that the body keeps, with those in `kept` (carry, axis) staying whole.

    What the readers behind the loop want of a carry must not move data inside it: there it would move every iteration.
    """
    carry = [
        tuple(REPLICATED if (i, k) in kept and not isinstance(p, Varying) else p for k, p in enumerate(forward.home(a)))
        for i, a in enumerate(init)
    ]
    free = [None] * len(body.outputs)
    inner = [(NOTHING,) * len(forward.axes)] * len(carry) + list(wanted[len(carry) :])

    def schedule(outputs: Sequence[Layout | None]) -> Schedule:
        inputs = [*(d.layout for d in doors), *carry, *xs]
        return forward.body(body, inputs, outputs, inner, seen=[d.seen for d in doors])

    # each round raises at least one placement, and a placement can be raised three times
    for _ in range(3 * (len(carry) + 1) * len(forward.axes) + 2):
        inside = schedule(free)
        raised = [_raise(forward, i, init, carry, inside, len(doors), wanted, kept) for i in range(len(carry))]
        opened = [d.opened(demands) for d, demands in zip(doors, inside.demands, strict=False)]
        if raised == carry and opened == list(doors):
            return carry, schedule([*carry, *free[len(carry) :]])
        carry, doors = raised, opened
    raise AssertionError(f"internal error: the carry layouts of {equation.primitive} at {equation.line} did not settle")


def _raise(
    forward: Forward,
    i: int,
    init: Sequence[Atom],
    carry: Sequence[Layout],
    inside: Schedule,
    fixed: int,
    wanted: Sequence[tuple[Demand, ...]],
    kept: set[tuple[int, int]],
) -> Layout:
    """Carry i, raised to where the body leaves it."""
    layout = carry[i]
    for k in range(len(forward.axes)):
        before, after = carry[i][k], inside.outputs[i][k]
        # read whole inside the body and after the loop: splitting it in between would only add a gather
        read_whole = inside.demands[fixed + i][k].full and wanted[i][k].full
        joined = None if (i, k) in kept or (read_whole and isinstance(before, Replicated)) else join(before, after)
        if joined is not None and not fits(init[i].array.shape, put(layout, k, joined), forward.axes):
            joined = None
        if joined is None and not isinstance(after, Varying):
            kept.add((i, k))
        layout = put(layout, k, after if isinstance(after, Varying) else REPLICATED if joined is None else joined)
    return layout


def join(before: Placement, after: Placement) -> Placement | None:
    """The least placement above both, None where that is the whole value."""
    if before == after or isinstance(before, Varying):
        return before
    match before, after:
        case (Split(), Split()) | (Partial(), Partial()):
            return None
        case (Split(), _) | (Partial(), Replicated()):
            return before
        case _, Split(outer=outer) if outer > 1:
            return None
    return after


# -- branches -----------------------------------------------------------------------------------------------------


def _decide_cond(forward: Forward, equation: Equation) -> Step:
    index, operands = equation.inputs[0], equation.inputs[1:]
    chosen = _reduced(forward, index)
    varies = any(isinstance(p, Varying) for p in chosen)
    entering = [_reduced(forward, a, whole=True) if varies else entry(forward, a) for a in operands]
    wanted = [_outside(forward, v) for v in equation.outputs]
    free: list[Layout | None] = [None] * len(equation.outputs)
    natural = [forward.body(b, entering, free, wanted).outputs for b in equation.bodies]
    results: list[Layout | None] = [
        _meet(layouts, varies, demands) for layouts, demands in zip(zip(*natural, strict=True), wanted, strict=True)
    ]
    bodies = tuple(forward.body(b, entering, results, wanted) for b in equation.bodies)
    for body in bodies:
        if varies and body.collectives:
            raise PredicateVaries(
                f"the condition at {equation.line} depends on data of one replica, but a branch communicates"
                f" ({body.collectives[0].kind} for {body.collectives[0].purpose}): replicas would wait for each other"
                " for ever. Reduce the condition first, e.g. with lax.pmax(x, axis_name)."
            )
    largest = max(bodies, key=lambda body: sum(c.total for c in body.collectives))
    forward.fallbacks += [f for body in bodies for f in body.fallbacks]
    times = tuple(int(body is largest) for body in bodies)  # one of them runs: the largest counts
    ruling = _ruling(forward, equation, (chosen, *entering), [r for r in results if r])
    return Step(equation, ruling, bodies, times)


def _meet(layouts: Sequence[Layout], varies: bool, demands: Sequence[Demand]) -> Layout:
    """One layout for a result of several branches: the one that no branch has to communicate for, if there is one.

    But what is read whole afterwards, and comes whole out of some branch, is gathered in the branches that split it:
    an update that is skipped then sends nothing.
    """
    result: list[Placement] = []
    for placements, demand in zip(zip(*layouts, strict=True), demands, strict=True):
        kinds = set(placements)
        read_whole = demand.full and not demand.splits and REPLICATED in kinds
        if varies or any(isinstance(p, Varying) for p in kinds):
            result.append(Varying())
        elif read_whole:
            result.append(REPLICATED)
        elif any(isinstance(p, Split) for p in kinds):
            found = [p for p in placements if isinstance(p, Split)]
            result.append(found[0] if len(set(found)) == 1 and found[0].outer == 1 else REPLICATED)
        elif len({p for p in kinds if isinstance(p, Partial)}) == 1:
            result.append(next(p for p in kinds if isinstance(p, Partial)))
        else:
            result.append(REPLICATED)
    return tuple(result)


# -- values at the door -------------------------------------------------------------------------------------------


def entry(forward: Forward, atom: Atom) -> Layout:
    """The layout in which a value enters a body: as it is, or as its readers want it if that is free or due anyway."""
    layout = forward.home(atom)
    for k, placement in enumerate(layout):
        demand = forward.demand(atom, k)
        wants = demand.splits[0] if demand.splits and not (demand.full and isinstance(placement, Replicated)) else None
        if isinstance(placement, Replicated | Partial) and wants and isinstance(atom, Var):
            split = put(layout, k, wants)
            layout = split if fits(atom.array.shape, split, forward.axes) else layout
        elif (isinstance(placement, Partial) and demand.full) or forward.due(atom, k):
            layout = put(layout, k, REPLICATED)
    return layout


def _reduced(forward: Forward, atom: Atom, whole: bool = False) -> Layout:
    """The value as every replica can read it: sums are formed; with `whole`, blocks are gathered too."""
    gathered = (Partial, Split) if whole else (Partial,)
    return tuple(REPLICATED if isinstance(p, gathered) else p for p in forward.home(atom))


def _beside_time(forward: Forward, atom: Atom) -> Layout:
    """A scanned value may be split on any dimension but the one that is scanned over."""
    layout = entry(forward, atom)
    for k, placement in enumerate(layout):
        if isinstance(placement, Split) and placement.dim == 0:
            beside = put(layout, k, replace(placement, dim=1, outer=1, extent=0))
            movable = is_batch(placement) and fits(atom.array.shape, beside, forward.axes)
            layout = beside if movable else put(layout, k, REPLICATED)
    return layout


def _shift(layout: Layout, by: int) -> Layout:
    return tuple(p.on(p.dim + by, p.outer) if isinstance(p, Split) else p for p in layout)


def _shift_demand(demand: Demand, by: int) -> Demand:
    splits = tuple(s.on(s.dim + by, s.outer) for s in demand.splits if s.dim + by >= 0)
    return replace(demand, splits=splits)


def _outside(forward: Forward, var: Var) -> tuple[Demand, ...]:
    """What is wanted of a result behind the body. Whatever is due there is not due inside."""
    return tuple(replace(forward.demand(var, k), due=False) for k in range(len(forward.axes)))


def emit(step: Step, arrays: Sequence[Any], run: Any) -> list[Any]:
    """Run control flow on local blocks: `run(schedule, arrays)` runs a body."""
    from jax import lax

    params = step.equation.params
    match step.equation.primitive:
        case primitive if primitive is _SCAN:
            (body,) = step.bodies
            consts, carries = compat.scan_counts(params)
            fixed, init, xs = arrays[:consts], arrays[consts : consts + carries], arrays[consts + carries :]

            def iterate(carry: Any, x: Any) -> tuple[Any, Any]:
                out = run(body, [*fixed, *carry, *x])
                return out[:carries], out[carries:]

            carry, ys = lax.scan(
                iterate,
                list(init),
                list(xs),
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            return [*carry, *ys]
        case primitive if primitive is _WHILE:
            test, body = step.bodies
            tests, fixed_count = params["cond_nconsts"], params["body_nconsts"]
            test_consts, fixed = arrays[:tests], arrays[tests : tests + fixed_count]
            return lax.while_loop(
                lambda carry: run(test, [*test_consts, *carry])[0],
                lambda carry: run(body, [*fixed, *carry]),
                list(arrays[tests + fixed_count :]),
            )
        case _:
            branches = [lambda *xs, body=body: run(body, list(xs)) for body in step.bodies]
            index = arrays[0]
            if index.dtype == bool:
                index = index.astype("int32")
            return lax.switch(index, branches, *arrays[1:])
