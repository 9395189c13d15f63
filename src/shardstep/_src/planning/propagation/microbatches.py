"""Gradient accumulation over `x.reshape(M, B // M, ...)`: may each replica make its microbatches of its own examples?

Which examples form a microbatch matters to BatchNorm, to a random draw per microbatch, to a loss reported for each of
them. It does not matter when the loop only adds up what every example contributes by itself:

    carry <- carry + sum_j h(x[m, j])        for all m        gives        carry + sum over all examples of h

Then microbatches may hold the examples in any order, and no example has to move between replicas. That the loop is of
this form is proven with the same rules that split it: if its body can be split with one example on each of B // M
replicas, without a collective and without knowing its place, then every example contributes by itself, and all in the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ...core import compat
from ...core.layout import PARTIAL, REPLICATED, Axis, Layout, Split, divides, is_batch
from ...core.program import Atom, Equation, Program, Var
from ...core.schedule import Schedule, Step
from .boundary import Boundary
from .memo import Forms

_RESHAPE = compat.primitive("reshape")
_SUMS = compat.primitives("add add_jaxvals")

PERMUTED = Split(1, batch=True, permuted=True)  # split on the examples, which microbatches hold in another order


Reschedule = Callable[[Program, tuple[Axis, ...], Boundary], Schedule]


class Readers(Protocol):
    """The readers walk over the program that holds the loop: what the proof asks of it."""

    axes: tuple[Axis, ...]
    forms: dict[Atom, Forms]
    reschedule: Reschedule

    @property
    def uses(self) -> Mapping[Atom, int]: ...

    @property
    def producers(self) -> Mapping[Atom, Equation]: ...


def may_permute(readers: Readers, step: Step, k: int) -> bool:
    """Is this scan a plain sum over the examples of microbatches that were cut out of the batch for it?"""
    consts, carries = compat.scan_counts(step.equation.params)
    xs = step.equation.inputs[consts + carries :]
    (body,) = step.bodies
    return (
        bool(xs)
        and len(body.program.outputs) == carries
        and all(_cut_from_batch(readers, x, k) for x in xs)
        and len({x.array.shape[:2] for x in xs}) == 1
        and not any(is_batch(layout[k]) for layout in body.inputs[: consts + carries])
        and all(adds_up(body.program, consts + i, i) for i in range(carries))
        and _example_by_example(readers, body, consts, carries, k)
    )


def cuts_microbatches(equation: Equation) -> bool:
    """Is this `(B, ...) -> (M, B // M, ...)`?"""
    if equation.primitive is not _RESHAPE or equation.params.get("dimensions") is not None:
        return False
    return cuts(equation.inputs[0].array.shape, equation.outputs[0].array.shape, 0)


def cuts(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> bool:
    """Is one shape the other with dimension `dim` cut in two?"""
    return (
        len(after) == len(before) + 1
        and before[:dim] == after[:dim]
        and before[dim + 1 :] == after[dim + 2 :]
        and before[dim] == after[dim] * after[dim + 1]
    )


def _cut_from_batch(readers: Readers, x: Atom, k: int) -> bool:
    producer = readers.producers.get(x) if isinstance(x, Var) else None
    if producer is None or not cuts_microbatches(producer) or readers.uses[x] != 1:
        return False
    held = readers.forms[producer.inputs[0]].primary[k]
    return held == Split(0) and is_batch(held) and divides(x.array.shape, PERMUTED, readers.axes[k].size)


def adds_up(body: Program, carried: int, result: int) -> bool:
    """Is the new carry the old one plus something that the old one has no part in (or the old one itself)?"""
    producers = {v: e for e in body.equations for v in e.outputs}
    reached: set[Atom] = {body.inputs[carried]}
    for equation in body.equations:
        if any(a in reached for a in equation.inputs):
            reached.update(equation.outputs)
    value = body.outputs[result]
    while value is not body.inputs[carried]:
        producer = producers.get(value) if isinstance(value, Var) else None
        if producer is None or producer.primitive not in _SUMS:
            return False
        terms = [a for a in producer.inputs if a in reached]
        if len(terms) != 1:
            return False
        value = terms[0]
    return sum(v in reached for v in body.outputs if v is not body.outputs[result]) == 0


def _example_by_example(readers: Readers, body: Schedule, consts: int, carries: int, k: int) -> bool:
    """Can the body be split with one example on each replica, without a collective and without knowing its place?"""
    examples = body.program.inputs[consts + carries].array.shape[0]
    axis = Axis(("example",), examples)
    inputs: list[Layout] = [(REPLICATED,)] * consts + [(PARTIAL,)] * carries
    inputs += [(Split(0, batch=True),)] * (len(body.program.inputs) - consts - carries)
    alone = readers.reschedule(body.program, (axis,), Boundary(tuple(inputs), ((PARTIAL,),) * carries))
    held = dict(zip(body.program.inputs, inputs, strict=True))
    held.update((v, (REPLICATED,)) for v, _ in body.program.constants)
    for step in alone.steps:
        if step.bodies or (step.ruling.emit is not None and not step.ruling.apart):
            return False
        for atom, layout in zip(step.equation.inputs, step.operands, strict=True):
            if isinstance(layout[0], Split) and isinstance(atom, Var) and held[atom] == (REPLICATED,):
                return False  # a block of a whole value: what an example meets depends on its place
        held.update(zip(step.equation.outputs, step.results, strict=True))
    return not alone.collectives and examples > 1
