"""What a loop carries has one layout for all iterations: the least one above where it enters and what the body returns,

    replicated  <  partial  <  split(d)  <  whole                      (varying stays varying)

so a gradient accumulator that starts as zeros stays partial through the loop and is reduced once after it, and
optimizer state that enters split stays split. Two different splits have no common layout but the whole value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...core.layout import (
    PARTIAL,
    REPLICATED,
    Axis,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    fits,
    is_batch,
    put,
)
from ...core.program import Atom, Equation, Program
from ...core.schedule import NO_PREFERENCE, Fallback, Preference, Schedule
from .boundary import Boundary
from .in_loops import InLoops, only_sliced
from .microbatches import adds_up


class Walk(Protocol):
    """The walk over the program that holds the loop or branch: what deciding one asks of it."""

    axes: tuple[Axis, ...]
    fallbacks: list[Fallback]

    @property
    def gathers_once(self) -> bool: ...

    @property
    def in_loops(self) -> InLoops: ...

    def primary(self, atom: Atom) -> Layout: ...

    def preference(self, atom: Atom, k: int) -> Preference: ...

    def due(self, atom: Atom, k: int) -> bool: ...

    def price(self, atom: Atom, target: Layout) -> float: ...

    def seconds(self, body: Schedule) -> float: ...

    def body(self, program: Program, boundary: Boundary) -> Schedule: ...


class LoopInput(NamedTuple):
    """How a value that all iterations share enters a loop: the layout it has there, and the one readers see first."""

    layout: Layout
    seen: Layout

    @classmethod
    def of(cls, layout: Layout) -> LoopInput:
        return cls(layout, layout)

    def hoisted(self, preferences: Sequence[Preference]) -> LoopInput:
        """What the body would gather in every iteration is gathered once, before the loop.

        Examples are then still seen split, so that whatever takes some of them shares those among the replicas.
        """
        gathered = [not isinstance(p, Varying) and d.full for p, d in zip(self.layout, preferences, strict=True)]
        layout = tuple(REPLICATED if g else p for g, p in zip(gathered, self.layout, strict=True))
        seen = tuple(p if is_batch(p) or not g else REPLICATED for g, p in zip(gathered, self.seen, strict=True))
        return LoopInput(layout, seen)


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop whose carry layouts are to be found, in the walk over the program around it."""

    walk: Walk
    equation: Equation
    body: Program
    fixed: tuple[LoopInput, ...]  # what all iterations share
    init: tuple[Atom, ...]  # the carries as they enter
    xs: tuple[Layout, ...]  # what is scanned over, as one iteration sees it
    preferences: tuple[tuple[Preference, ...], ...]  # of the readers of the results, after the loop
    entering: tuple[Layout, ...] = ()  # the layouts in which the carries enter, where that is not as they are

    def settle(self) -> tuple[list[Layout], Schedule]:
        """The carry layouts that the body keeps, and the body scheduled for them.

        The least ones; unless what they communicate in all iterations takes longer than to have every carry whole (an
        iteration over whole matrices, say), with the work that all replicas then repeat where that is priced.
        """
        least = self._fixpoint(set())
        if not least[1].collectives or self.sums:  # sums are split in order to hold less, whatever that sends
            return least
        all_whole = self.whole()
        times = self.equation.params.get("length", 1)

        def seconds(found: tuple[list[Layout], Schedule]) -> float:
            carry, inside = found
            entering = (self.walk.price(a, layout) for a, layout in zip(self.init, carry, strict=True))
            return sum(entering) + times * self.walk.seconds(inside)

        return all_whole if seconds(all_whole) < _SHORTER * seconds(least) else least

    def whole(self) -> tuple[list[Layout], Schedule]:
        """The same with every carry whole."""
        return self._fixpoint({(i, k) for i in range(len(self.init)) for k in range(len(self.walk.axes))})

    def _fixpoint(self, kept: set[tuple[int, int]]) -> tuple[list[Layout], Schedule]:
        """The least carry layouts that the body keeps, with those in `kept` (carry, axis) staying whole.

        What the readers after the loop want of a carry must not move data inside it: there it would move every
        iteration.
        """
        axes, fixed, sums = self.walk.axes, self.fixed, self.sums
        carry = [
            tuple(REPLICATED if (i, k) in kept and not isinstance(p, Varying) else p for k, p in enumerate(layout))
            for i, layout in enumerate(self.entering or map(self.walk.primary, self.init))
        ]
        free = [None] * len(self.body.outputs)
        inner = ((NO_PREFERENCE,) * len(axes),) * len(carry) + self.preferences[len(carry) :]
        if sums and not kept:
            carry = [sums.get(i, layout) for i, layout in enumerate(carry)]
            inner = (*(_wanting(sums.get(i), axes) for i in range(len(carry))), *inner[len(carry) :])

        def schedule(outputs: Sequence[Layout | None]) -> Schedule:
            inputs = (*(x.layout for x in fixed), *carry, *self.xs)
            seen = tuple(x.seen for x in fixed)
            return self.walk.body(self.body, Boundary.of_body(inputs, outputs, inner, seen))

        # each round gathers one more input or raises at least one placement, and that can be raised three times
        for _ in range((3 * (len(carry) + 1) + len(fixed)) * len(axes) + 2):
            inside = schedule(free)
            hoisted = tuple(
                x if i in self.streamed else x.hoisted(preferences)
                for i, (x, preferences) in enumerate(zip(fixed, inside.preferences, strict=False))
            )
            if hoisted != fixed:  # a body that gathers what is then gathered once says nothing of what it will carry
                fixed = hoisted
                continue
            raised = [self._raise(i, carry[i], inside, kept) for i in range(len(carry))]
            if raised == carry:
                made = zip(self.body.outputs, inside.outputs, self.preferences, strict=True)
                leaving = [_scattered(*each, axes) for each in made]
                return carry, schedule([*carry, *leaving[len(carry) :]])
            carry = raised
        where = f"{self.equation.primitive} at {self.equation.line}"
        raise AssertionError(f"internal error: the carry layouts of {where} did not settle")

    @functools.cached_property
    def streamed(self) -> AbstractSet[int]:
        """What loops inside take slice by slice, and gather there."""
        consts = range(len(self.fixed)) if self.walk.in_loops.streams else ()
        return {i for i in consts if only_sliced(self.body, self.body.inputs[i])}

    @functools.cached_property
    def sums(self) -> Mapping[int, Layout]:
        """The large sums that are formed here and read split after the loop: of each iteration's terms every replica
        keeps its part, if that is to be so.
        """
        carries = range(len(self.init)) if self.walk.in_loops.scatters else ()
        found = {}
        for i in carries:
            array, held = self.init[i].array, self.walk.primary(self.init[i])
            target = tuple(
                w.splits[0] if isinstance(p, Replicated | Partial) and w.splits and not w.full else p
                for p, w in zip(held, self.preferences[i], strict=True)
            )
            large = array.nbytes >= _WORTH_A_MESSAGE and target != held and fits(array.shape, target, self.walk.axes)
            if large and adds_up(self.body, len(self.fixed) + i, i):
                found[i] = target
        return found

    def _raise(self, i: int, layout: Layout, inside: Schedule, kept: set[tuple[int, int]]) -> Layout:
        """Carry i, raised to where the body leaves it."""
        shape, axes = self.init[i].array.shape, self.walk.axes
        for k, (before, after) in enumerate(zip(layout, inside.outputs[i], strict=True)):
            # read whole inside the body and after the loop: splitting it in between would only add a gather
            read_whole = inside.preferences[len(self.fixed) + i][k].full and self.preferences[i][k].full
            joined = None if (i, k) in kept or (read_whole and isinstance(before, Replicated)) else join(before, after)
            if joined is not None and not fits(shape, put(layout, k, joined), axes):
                joined = None
            if joined is None and not isinstance(after, Varying):
                kept.add((i, k))
            layout = put(layout, k, after if isinstance(after, Varying) else REPLICATED if joined is None else joined)
        return layout


def _wanting(layout: Layout | None, axes: tuple[Axis, ...]) -> tuple[Preference, ...]:
    """What a loop wants of its body, for a sum to be carried in this layout."""
    if layout is None:
        return (NO_PREFERENCE,) * len(axes)
    return tuple(Preference((p,)) if isinstance(p, Split) else NO_PREFERENCE for p in layout)


_SHORTER = 1 - 1e-9  # what takes as long, sums of floats apart, is no reason to have anything whole
_WORTH_A_MESSAGE = 16 * 1024  # bytes


def _scattered(atom: Atom, layout: Layout, wanted: Sequence[Preference], axes: tuple[Axis, ...]) -> Layout | None:
    """How a slice of a stacked result leaves its iteration; None: as it comes.

    A sum that is read split after the loop is scattered in the iteration that makes it (a layer's gradient, say): that
    sends the same, and no replica ever holds the whole stack of unreduced sums.
    """
    if atom.array.nbytes < _WORTH_A_MESSAGE:
        return None
    target = tuple(
        w.splits[0] if p == PARTIAL and w.splits and not w.full else p for p, w in zip(layout, wanted, strict=True)
    )
    return target if target != layout and fits(atom.array.shape, target, axes) else None


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
