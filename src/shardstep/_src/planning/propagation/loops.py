"""Control flow is rewritten inside: bodies are scheduled like programs of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core import compat
from ...core.errors import ShardstepError
from ...core.layout import (
    REPLICATED,
    Array,
    Axis,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    block_shape,
    cut,
    fits,
    is_batch,
    put,
    whole,
)
from ...core.program import Atom, Equation, Program, Var
from ...core.schedule import NO_PREFERENCE, Preference, Ruling, Schedule, Step
from ...rules.parallel import COMMUNICATING
from .boundary import Boundary
from .carries import Loop, LoopInput, Walk

_SCAN, _WHILE, _COND = (compat.primitive(name) for name in ("scan", "while", "cond"))


class PredicateVaries(ShardstepError):
    """A loop's end, or a branch with communication in it, would be decided differently by different replicas."""


def decide(walk: Walk, equation: Equation) -> Step:
    return {_SCAN: _decide_scan, _WHILE: _decide_while, _COND: _decide_cond}[equation.primitive](walk, equation)


def _ruling(walk: Walk, equation: Equation, operands: tuple[Layout, ...], results: Sequence[Layout]) -> Ruling:
    made = (v.array for v in equation.outputs)
    blocks = tuple(Array(block_shape(a.shape, r, walk.axes), a.dtype) for a, r in zip(made, results, strict=True))
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


def scanned_over(equation: Equation) -> tuple[Atom, ...]:
    """The operands that a scan slices, one slice per iteration; none for other control flow."""
    if equation.primitive is not _SCAN:
        return ()
    return tuple(equation.inputs[sum(compat.scan_counts(equation.params)) :])


def entering(step: Step, k: int) -> list[Preference]:
    """What the bodies want of the equation's operands along axis k."""
    if step.equation.primitive is _COND:
        wanted = [NO_PREFERENCE] * (len(step.equation.inputs) - 1)
        for body in step.bodies:
            wanted = [w | d[k] for w, d in zip(wanted, body.preferences, strict=True)]
        return [Preference(full=True), *wanted]
    inside = [d[k] for d in step.bodies[-1].preferences]
    if step.equation.primitive is _WHILE:
        return [Preference(full=True)] * step.equation.params["cond_nconsts"] + inside
    xs = sum(compat.scan_counts(step.equation.params))
    return inside[:xs] + [_shift_preference(d, 1) for d in inside[xs:]]


# -- loops --------------------------------------------------------------------------------------------------------


def _decide_scan(walk: Walk, equation: Equation) -> Step:
    (body,) = equation.bodies
    consts, carries = compat.scan_counts(equation.params)
    inputs = equation.inputs
    fixed = [LoopInput.of(entry(walk, a)) for a in inputs[:consts]]
    xs = [_beside_time(walk, a) for a in inputs[consts + carries :]]
    sliced = [_shift(layout, -1) for layout in xs]
    wanted = [_outside(walk, v) for v in equation.outputs[:carries]]
    wanted += [tuple(_shift_preference(d, -1) for d in _outside(walk, v)) for v in equation.outputs[carries:]]
    init = inputs[consts : consts + carries]
    loop = Loop(walk, equation, body, tuple(fixed), tuple(init), tuple(sliced), tuple(wanted))
    carry, inside = loop.settle()
    results = [*carry, *(_shift(layout, 1) for layout in inside.outputs[carries:])]
    walk.fallbacks += inside.fallbacks
    operands = (*inside.inputs[:consts], *carry, *xs)
    times = (equation.params["length"],)
    return Step(equation, _ruling(walk, equation, operands, results), (inside,), times)


def _decide_while(walk: Walk, equation: Equation) -> Step:
    test, body = equation.bodies
    tests, fixed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    inputs = equation.inputs
    test_consts = [_reduced(walk, a) for a in inputs[:tests]]
    body_consts = [LoopInput.of(entry(walk, a)) for a in inputs[tests : tests + fixed]]
    wanted = [_outside(walk, v) for v in equation.outputs]
    loop = Loop(walk, equation, body, tuple(body_consts), tuple(inputs[tests + fixed :]), (), tuple(wanted))
    carry, predicate, inside = _until_done(loop, test, test_consts)
    walk.fallbacks += (*predicate.fallbacks, *inside.fallbacks)
    operands = (*test_consts, *inside.inputs[:fixed], *carry)
    return Step(equation, _ruling(walk, equation, operands, carry), (predicate, inside), (1, 1))


def _until_done(loop: Loop, test: Program, consts: Sequence[Layout]) -> tuple[list[Layout], Schedule, Schedule]:
    """The carries of a while loop, its test, and its body.

    A test of each example (a `while_loop` under `vmap`) goes on until all of them are done. If nothing is communicated
    inside, each replica may stop when its own examples are done; whatever is carried is then split as they are.
    """
    walk, everything = loop.walk, whole(loop.walk.axes)

    def test_of(carry: Sequence[Layout], found: Layout | None) -> Schedule:
        return walk.body(test, Boundary.of_body([*consts, *carry], [found]))

    carry, inside = loop.settle()
    found = test_of(carry, None).outputs[0]
    if any(isinstance(p, Varying) for p in found):
        return _each_until_done(loop, test_of)
    if not test.outputs[0].array.shape:
        return carry, test_of(carry, everything), inside
    found = tuple(p if isinstance(p, Split) and p.outer == 1 else REPLICATED for p in found)
    entering = tuple(tuple(p if isinstance(p, Split) else REPLICATED for p in found) for _ in loop.init)
    if found != everything and all(
        fits(a.array.shape, layout, walk.axes) for a, layout in zip(loop.init, entering, strict=True)
    ):
        carry, inside = replace(loop, entering=entering).settle()
        predicate = test_of(carry, found)
        if carry == list(entering) and not inside.collectives and not predicate.collectives:
            return carry, predicate, inside
    carry, inside = loop.whole()
    return carry, test_of(carry, everything), inside


def _each_until_done(
    loop: Loop, test_of: Callable[[Sequence[Layout], Layout | None], Schedule]
) -> tuple[list[Layout], Schedule, Schedule]:
    """The same in a step per replica, with a test of the replica's own: they must not wait for each other inside."""
    own: Layout = (Varying(),) * len(loop.walk.axes)
    carry, inside = replace(loop, entering=(own,) * len(loop.init)).settle()
    predicate = test_of(carry, None)
    written = (e for body in loop.equation.bodies for e in body.walk() if e.primitive in COMMUNICATING)
    if sent := next((f"{e.primitive} at {e.line}" for e in written), ""):
        sent = f" ({sent})"
    elif not inside.collectives and not predicate.collectives:
        return carry, predicate, inside
    raise PredicateVaries(
        f"the predicate of the while loop at {loop.equation.line} depends on data of one replica, so replicas would"
        f" leave the loop at different times, and it communicates{sent}. Reduce what the predicate reads first, e.g."
        " with lax.pmax(x, axis_name)."
    )


# -- branches -----------------------------------------------------------------------------------------------------


def _decide_cond(walk: Walk, equation: Equation) -> Step:
    index, operands = equation.inputs[0], equation.inputs[1:]
    chosen = _reduced(walk, index)
    varies = any(isinstance(p, Varying) for p in chosen)
    entering = [_reduced(walk, a, gathered=True) if varies else entry(walk, a) for a in operands]
    wanted = [_outside(walk, v) for v in equation.outputs]
    free: list[Layout | None] = [None] * len(equation.outputs)
    natural = [walk.body(b, Boundary.of_body(entering, free, wanted)).outputs for b in equation.bodies]
    results: list[Layout | None] = [
        _fitting(_meet(layouts, varies, preferences), v.array.shape, walk.axes)
        for layouts, preferences, v in zip(zip(*natural, strict=True), wanted, equation.outputs, strict=True)
    ]
    bodies = tuple(walk.body(b, Boundary.of_body(entering, results, wanted)) for b in equation.bodies)
    for body in bodies:
        if varies and body.collectives:
            raise PredicateVaries(
                f"the condition at {equation.line} depends on data of one replica, but a branch communicates"
                f" ({body.collectives[0].kind} for {body.collectives[0].purpose}): replicas would wait for each other"
                " for ever. Reduce the condition first, e.g. with lax.pmax(x, axis_name)."
            )
    largest = max(bodies, key=lambda body: sum(c.total for c in body.collectives))
    walk.fallbacks += [f for body in bodies for f in body.fallbacks]
    times = tuple(int(body is largest) for body in bodies)  # one of them runs: the largest counts
    ruling = _ruling(walk, equation, (chosen, *entering), [r for r in results if r])
    return Step(equation, ruling, bodies, times)


def _meet(layouts: Sequence[Layout], varies: bool, preferences: Sequence[Preference]) -> Layout:
    """One layout for a result of several branches: the one that no branch has to communicate for, if there is one.

    But what is read whole afterwards, and comes whole out of some branch, is gathered in the branches that split it:
    an update that is skipped then sends nothing.
    """
    result: list[Placement] = []
    for placements, preference in zip(zip(*layouts, strict=True), preferences, strict=True):
        kinds = set(placements)
        read_whole = preference.full and not preference.splits and REPLICATED in kinds
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


def _fitting(layout: Layout, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> Layout:
    """The layout without the splits that do not nest: each branch may have cut along another axis."""
    for k in reversed(range(len(layout))):
        if not fits(shape, layout, axes) and isinstance(layout[k], Split):
            layout = put(layout, k, REPLICATED)
    return layout


# -- values that enter ---------------------------------------------------------------------------------------------


def entry(walk: Walk, atom: Atom) -> Layout:
    """The layout in which a value enters a body: as it is, or as its readers want it if that is free or due anyway."""
    layout = walk.primary(atom)
    for k, placement in enumerate(layout):
        preference = walk.preference(atom, k)
        wants = (
            preference.splits[0]
            if preference.splits and not (preference.full and isinstance(placement, Replicated))
            else None
        )
        if isinstance(placement, Replicated | Partial) and wants and isinstance(atom, Var):
            split = put(layout, k, wants)
            layout = split if fits(atom.array.shape, split, walk.axes) else layout
        elif (isinstance(placement, Partial) and preference.full) or walk.due(atom, k):
            layout = put(layout, k, REPLICATED)
    return layout


def _reduced(walk: Walk, atom: Atom, gathered: bool = False) -> Layout:
    """The value as every replica can read it: sums are formed; with `gathered`, blocks are gathered."""
    kinds = (Partial, Split) if gathered else (Partial,)
    return tuple(REPLICATED if isinstance(p, kinds) else p for p in walk.primary(atom))


def _beside_time(walk: Walk, atom: Atom) -> Layout:
    """A scanned value may be split on any dimension but the one that is scanned over."""
    layout = entry(walk, atom)
    for k, placement in enumerate(layout):
        if isinstance(placement, Split) and placement.dim == 0:
            beside = put(layout, k, replace(placement, dim=1, outer=1, extent=0))
            if len(walk.axes) == 1 and atom.array.ndim > 1 and atom.array.shape[1] > 1:  # with padding, if not evenly
                beside = (cut(atom.array.shape, 1, walk.axes[k].size, batch=True),)
            movable = is_batch(placement) and fits(atom.array.shape, beside, walk.axes)
            layout = beside if movable else put(layout, k, REPLICATED)
        elif isinstance(placement, Split) and not is_batch(placement) and walk.gathers_once:
            layout = put(layout, k, REPLICATED)
    return layout


def _shift(layout: Layout, by: int) -> Layout:
    return tuple(p.on(p.dim + by, p.outer) if isinstance(p, Split) else p for p in layout)


def _shift_preference(preference: Preference, by: int) -> Preference:
    splits = tuple(s.on(s.dim + by, s.outer) for s in preference.splits if s.dim + by >= 0)
    return replace(preference, splits=splits)


def _outside(walk: Walk, var: Var) -> tuple[Preference, ...]:
    """What is wanted of a result after the body. Whatever is due there is not due inside."""
    return tuple(replace(walk.preference(var, k), due=False) for k in range(len(walk.axes)))
