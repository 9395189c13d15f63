"""What a loop stacks only for the stack to be added to something is added row by row, inside the loop.

    _, ys = scan(f, ...)                        loop:  acc[i] += y
    total = acc + ys                     ->     total = acc

Gradient accumulation over scanned layers ends like this in every microbatch: the backward pass stacks the gradients of
all layers, and the stack is added to the accumulator. Added in the loop, in place, no stack of gradients exists beside
the accumulator, and neither is it written and read once more.

A pass over a finished schedule: nothing is sent otherwise than before, and every sum has the same two terms.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..core import compat
from ..core.layout import Array, Layout, Split, block_shape, whole
from ..core.program import Atom, Equation, Literal, Program, Var
from ..core.schedule import NO_PREFERENCE, Bundle, Ruling, Schedule, Step
from ..rules.added_rows import ADDED, add_to_row

_SCAN, _ADD = compat.primitive("scan"), compat.primitive("add")
_SUMS = compat.primitives("add add_jaxvals")
_ON_THE_WAY = compat.primitives("convert_element_type mul div neg")  # of a row as of the stack
_NUMBER = Array((), np.dtype(np.int32))


class _Sum(NamedTuple):
    """A stack that a loop makes, and the sum that is all it is read for."""

    output: int  # of the loop
    way: tuple[int, ...]  # the steps between the loop and the sum
    add: int  # the step
    other: Var  # what it is added to
    total: Var
    layout: Layout  # of all of them


def added_in_loops(schedule: Schedule, carried: Sequence[Var] = ()) -> Schedule:
    """The same schedule. `carried`: the inputs that a loop carries, of which this is the body: they may be written
    over.
    """
    steps = [_inside(step) for step in schedule.steps]
    gone: set[int] = set()
    found = False
    for i, step in enumerate(steps):
        if step.equation.primitive is not _SCAN:
            continue
        sums = list(_Readers(schedule, steps, gone).sums(i, carried))
        if sums:
            found = True
            gone.update(k for s in sums for k in (*s.way, s.add))
            steps[i] = _adding(step, steps, sums, schedule)
    if not found and all(map(operator.is_, steps, schedule.steps)):
        return schedule
    return _without(replace(schedule, steps=tuple(steps)), gone)


def _inside(step: Step) -> Step:
    """With the bodies of a loop or branch done."""
    if step.equation.primitive is not _SCAN:
        bodies = tuple(map(added_in_loops, step.bodies))
    else:
        consts, carries = compat.scan_counts(step.equation.params)
        (body,) = step.bodies
        bodies = (added_in_loops(body, body.program.inputs[consts : consts + carries]),)
    if all(a is b for a, b in zip(bodies, step.bodies, strict=True)):
        return step
    return step._replace(equation=replace(step.equation, bodies=tuple(b.program for b in bodies)), bodies=bodies)


def _without(schedule: Schedule, gone: set[int]) -> Schedule:
    """The schedule without these steps; what is sent before one of them is sent before the next."""
    steps: list[Step] = []
    transfers: list[tuple[Bundle, ...]] = []
    waiting: tuple[Bundle, ...] = ()
    for k, (step, bundles) in enumerate(zip(schedule.steps, schedule.transfers, strict=False)):
        if k in gone:
            waiting += bundles
            continue
        steps.append(step)
        transfers.append(waiting + bundles)
        waiting = ()
    transfers.append(waiting + schedule.transfers[-1])
    program = replace(schedule.program, equations=tuple(step.equation for step in steps))
    return replace(schedule, program=program, steps=tuple(steps), transfers=tuple(transfers))


# -- finding ----------------------------------------------------------------------------------------------------------


@dataclass
class _Readers:
    """Who reads what, and where."""

    schedule: Schedule
    steps: Sequence[Step]
    gone: set[int]

    def __post_init__(self) -> None:
        program = self.schedule.program
        self.readers: dict[Atom, list[int]] = {}
        self.made: dict[Atom, int] = {}
        self.moved: dict[Atom, list[int]] = {}  # the places at which a value changes its layout
        self.returned = set(program.outputs)
        for k, step in enumerate(self.steps):
            if k not in self.gone:
                for atom in step.equation.inputs:
                    self.readers.setdefault(atom, []).append(k)
                self.made.update(dict.fromkeys(step.equation.outputs, k))
        for place, bundles in enumerate(self.schedule.transfers):
            for bundle in bundles:
                for t in bundle:
                    self.moved.setdefault(t.var, []).append(place)

    def sums(self, i: int, carried: Sequence[Var]) -> Iterator[_Sum]:
        """The stacks of loop i that may be added inside."""
        step = self.steps[i]
        _, carries = compat.scan_counts(step.equation.params)
        (body,) = step.bodies
        taken: set[Atom] = set()
        for r in range(carries, len(step.equation.outputs)):
            found = self.sum_of(i, r)
            if found is None or found.other in taken or not self.may_be_written(found, i, carried):
                continue
            if _row(found.layout) == body.outputs[r] and isinstance(body.program.outputs[r], Var):
                taken.add(found.other)
                yield found

    def sum_of(self, i: int, r: int) -> _Sum | None:
        """Follow a stack to the sum that it is made for."""
        step = self.steps[i]
        stack, layout = step.equation.outputs[r], step.results[r]
        if any(isinstance(p, Split) and p.dim == 0 for p in layout):
            return None
        way: list[int] = []
        while True:
            k = self.only_reader(stack)
            if k is None or self.steps[k].bodies:
                return None
            equation, ruling = self.steps[k].equation, self.steps[k].ruling
            others = [(a, f) for a, f in zip(equation.inputs, ruling.operands, strict=True) if a is not stack]
            held = [f for a, f in zip(equation.inputs, ruling.operands, strict=True) if a is stack]
            result = equation.outputs[0]
            if held != [layout] or ruling.results != (layout,) or result.array.shape != stack.array.shape:
                return None
            if equation.primitive in _SUMS and len(others) == 1:
                (other, placed), array = others[0], result.array
                if isinstance(other, Literal) or placed != layout or other.array != array:
                    return None
                return _Sum(r, tuple(way), k, other, result, layout)
            if equation.primitive not in _ON_THE_WAY or not all(_is_number(a) for a, _ in others):
                return None
            way.append(k)
            stack = result

    def only_reader(self, stack: Var) -> int | None:
        readers = self.readers.get(stack, [])
        return None if len(readers) != 1 or stack in self.moved or stack in self.returned else readers[0]

    def may_be_written(self, found: _Sum, i: int, carried: Sequence[Var]) -> bool:
        """Is what the stack is added to there before the loop, and does nobody read it any more?"""
        other = found.other
        ours = other in self.made or other in carried
        early = self.made.get(other, -1) < i and all(place <= i for place in self.moved.get(other, ()))
        read = (k < i or k == found.add for k in self.readers[other])
        return ours and early and all(read) and other not in self.returned


def _is_number(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not atom.array.shape


def _row(layout: Layout) -> Layout:
    """The layout of a row of a stack."""
    return tuple(p.on(p.dim - 1, p.outer) if isinstance(p, Split) else p for p in layout)


# -- rewriting --------------------------------------------------------------------------------------------------------


def _adding(step: Step, steps: Sequence[Step], sums: Sequence[_Sum], schedule: Schedule) -> Step:
    """The loop, which now carries what it adds to, and the number of the row."""
    equation, ruling = step.equation, step.ruling
    consts, carries = compat.scan_counts(equation.params)
    everywhere, at = whole(schedule.axes), consts + carries
    length, reverse = equation.params["length"], equation.params["reverse"]
    first = Literal(np.int32(length - 1 if reverse else 0), _NUMBER)
    given = [(first, everywhere, _NUMBER), *((s.other, s.layout, s.total.array) for s in sums)]
    added = {s.output for s in sums}
    kept = [r for r in range(carries, len(equation.outputs)) if r not in added]
    body = _Body(step.bodies[0], at, carries, -1 if reverse else 1).adding(sums, kept, steps)

    def entering(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...]:
        return (*old[:at], *new, *old[at:])

    def leaving(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...]:
        return (*old[:carries], *new, *(old[r] for r in kept))

    changed = replace(
        equation,
        params=compat.with_scan_counts(equation.params, consts, carries + len(given)),
        inputs=entering(equation.inputs, [atom for atom, _, _ in given]),
        outputs=leaving(equation.outputs, [Var(_NUMBER), *(s.total for s in sums)]),
        bodies=(body.program,),
    )
    layouts = [layout for _, layout, _ in given]
    blocks = [_block(array, layout, schedule) for _, layout, array in given]
    decided = replace(
        ruling,
        operands=entering(ruling.operands, layouts),
        results=leaving(ruling.results, layouts),
        params=changed.params,
        blocks=leaving(ruling.blocks, blocks),
    )
    return step._replace(equation=changed, ruling=decided, bodies=(body,))


def _block(array: Array, layout: Layout, schedule: Schedule) -> Array:
    return Array(block_shape(array.shape, layout, schedule.axes), array.dtype)


@dataclass(frozen=True)
class _Body:
    """The body of the loop as it was."""

    schedule: Schedule
    at: int  # where what is carried ends, among the inputs
    carries: int
    onwards: int  # from one row to the next

    def adding(self, sums: Sequence[_Sum], kept: Sequence[int], outside: Sequence[Step]) -> Schedule:
        old, program = self.schedule, self.schedule.program
        everywhere = whole(old.axes)
        place, after = Var(_NUMBER), Var(_NUMBER)
        stacks = [Var(s.total.array) for s in sums]
        totals = [Var(s.total.array) for s in sums]
        steps: list[Step] = []
        for s, stack, total in zip(sums, stacks, totals, strict=True):
            steps += self._added(s, (stack, total, place), outside)
        one = Literal(np.int32(self.onwards), _NUMBER)
        counted = Ruling((everywhere, everywhere), (everywhere,), {}, (_NUMBER,))
        steps.append(Step(Equation(_ADD, {}, (place, one), (after,), steps[-1].equation.sources), counted))

        carried = [everywhere, *(s.layout for s in sums)]

        def entering(given: tuple[Any, ...], new: Sequence[Any]) -> tuple[Any, ...]:
            return (*given[: self.at], *new, *given[self.at :])

        def leaving(made: tuple[Any, ...], new: Sequence[Any]) -> tuple[Any, ...]:
            return (*made[: self.carries], *new, *(made[r] for r in kept))

        unasked = [(NO_PREFERENCE,) * len(old.axes)] * len(carried)
        return replace(
            old,
            program=Program(
                entering(program.inputs, [place, *stacks]),
                leaving(program.outputs, [after, *totals]),
                (*program.equations, *(step.equation for step in steps)),
                program.constants,
            ),
            inputs=entering(old.inputs, carried),
            outputs=leaving(old.outputs, carried),
            steps=(*old.steps, *steps),
            transfers=(*old.transfers, *[()] * len(steps)),
            preferences=entering(old.preferences, unasked),
            met_batch=frozenset(i if i < self.at else i + len(carried) for i in old.met_batch),
        )

    def _added(self, s: _Sum, values: tuple[Var, Var, Var], outside: Sequence[Step]) -> Iterator[Step]:
        """What was done to the stack on its way to the sum is done to the row; then it is added."""
        stack, total, place = values
        row = self.schedule.program.outputs[s.output]
        layout = _row(s.layout)
        for k in s.way:
            equation = outside[k].equation
            made = Var(Array(row.array.shape, equation.outputs[0].array.dtype))
            inputs = tuple(a if isinstance(a, Literal) else row for a in equation.inputs)
            held = tuple(
                f if isinstance(a, Literal) else layout
                for a, f in zip(equation.inputs, outside[k].operands, strict=True)
            )
            ruling = replace(outside[k].ruling, operands=held, results=(layout,), blocks=(self._local(made, layout),))
            yield Step(replace(equation, inputs=inputs, outputs=(made,)), ruling)
            row = made
        everywhere = whole(self.schedule.axes)
        ruling = Ruling((s.layout, layout, everywhere), (s.layout,), {}, (self._local(row, layout),), emit=add_to_row)
        sources = outside[s.add].equation.sources
        yield Step(Equation(ADDED, {}, (stack, row, place), (total,), sources), ruling)

    def _local(self, var: Atom, layout: Layout) -> Array:
        return _block(var.array, layout, self.schedule)
