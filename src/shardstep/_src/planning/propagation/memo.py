"""What the planner has met before.

Steps repeat themselves: every leaf goes through the same optimizer, every layer through the same block. So what is
known of a value (`Preferences`, `Forms`) is one object for all values of which the same is known, and an equation's
*situation* is its kind and these objects, compared by identity. What was found out in a situation once holds wherever
it arises again: a program of ten thousand leaves takes as many decisions as one of ten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ...core.layout import Array, Axis, Layout, Partial, Varying, origins
from ...core.program import Kinds
from ...core.schedule import Preference, Ruling, Schedule
from .in_loops import LITTLE_SENT, InLoops
from .price import Price

MemoKey = tuple[Any, ...]
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Preferences:
    """What the readers of a value want of it along each axis, and whether there are several readers."""

    by_axis: tuple[Preference, ...]
    several: bool


@dataclass(frozen=True, eq=False)
class Forms:
    """The layouts in which one value may be read without communication.

    `visible` are those that readers are shown (first the one they should see first); `materialized` are those that
    replicas have in memory. The two differ where a free slice is not made before somebody reads it.
    """

    visible: tuple[Layout, ...]
    materialized: tuple[Layout, ...]
    preferences: Preferences

    @property
    def primary(self) -> Layout:
        """The layout that readers see first. Once reduced, a value is never seen partial again."""
        return self.usable[0]

    @functools.cached_property
    def usable(self) -> tuple[Layout, ...]:
        if len(self.visible) == 1:
            return self.visible
        reduced = tuple(f for f in self.visible if not any(isinstance(p, Partial) for p in f))
        return reduced or self.visible

    def source(self, target: Layout, array: Array, axes: tuple[Axis, ...], price: Price) -> Layout:
        """The layout in memory from which `target` is cheapest."""
        if target in self.materialized:
            return target
        if len(self.materialized) == 1:
            return self.materialized[0]
        shared = [f for f in self.materialized if _varies(target) or not _varies(f)]
        return min(shared or self.materialized, key=lambda f: price.move(f, target, array, axes))


def _varies(layout: Layout) -> bool:
    return any(isinstance(p, Varying) for p in layout)


class Conversion(NamedTuple):
    """An operand is converted for its reader, and from then on held in another layout too."""

    operand: int
    source: Layout
    target: Layout
    forms: Forms  # that the operand has afterwards


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an equation does in a situation."""

    ruling: Ruling
    conversions: tuple[Conversion, ...]  # of its operands, before it runs
    results: tuple[Forms, ...]
    meets_batch: bool  # are its operands read together with examples?


class Table(Generic[Found]):
    """What was found out, by keys that hold placements.

    Placements are equal where they cut the same blocks. What is decided depends on where the blocks come from as well
    (`Split.batch`), so origins are part of every key here, and nobody who asks can forget them.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Found] = {}

    def get(self, key: MemoKey, find_out: Callable[[], Found]) -> Found:
        exactly = (key, origins(key))
        found = self._found.get(exactly)
        if found is None:
            found = self._found[exactly] = find_out()
        return found


class Memo:
    """What was found out before, by situation. For one set of axes, and one way to trade memory for messages in loops;
    what kind an equation is depends on neither.
    """

    def __init__(
        self,
        kinds: Kinds | None = None,
        price: Price | None = None,
        sums_at_once: bool = False,
        in_loops: InLoops = LITTLE_SENT,
    ) -> None:
        self.price = Price() if price is None else price
        self.sums_at_once = sums_at_once  # readers are never shown the terms of a sum of floats
        self.in_loops = in_loops
        self.kinds = Kinds() if kinds is None else kinds
        self.outcomes: dict[MemoKey, Outcome] = {}  # of the forward walk
        self.requests: dict[MemoKey, tuple[tuple[int, Preferences], ...]] = {}  # of the backward walk, by operand
        self._joined: dict[tuple[Preferences, Preferences], Preferences] = {}
        self.answers: Table[Any] = Table()  # of the rules, to the questions of the backward walk
        self.schedules: Table[Schedule] = Table()  # of bodies, too: each walk round a loop comes by again
        self._preferences: Table[Preferences] = Table()
        self._forms: Table[Forms] = Table()

    def preferences(self, preferences: tuple[Preference, ...], several: bool = False) -> Preferences:
        return self._preferences.get((preferences, several), lambda: Preferences(preferences, several))

    def both(self, first: Preferences, then: Preferences) -> Preferences:
        """What two readers want, the first has priority."""
        known = self._joined.get((first, then))
        if known is None:
            preferences = tuple(a | b for a, b in zip(first.by_axis, then.by_axis, strict=True))
            known = self._joined[first, then] = self.preferences(preferences, first.several or then.several)
        return known

    def forms(self, visible: Sequence[Layout], materialized: Sequence[Layout], preferences: Preferences) -> Forms:
        known = tuple(dict.fromkeys(visible)), tuple(materialized), preferences
        return self._forms.get(known, lambda: Forms(*known))

    def added(self, forms: Forms, layout: Layout) -> Forms:
        """Those of a value that is now held in another layout too."""
        # What all replicas share is not shown as one replica's own, only because a loop carries it as such.
        visible = forms.visible if _varies(layout) and not _varies(forms.primary) else (*forms.visible, layout)
        return self.forms(visible, (*forms.materialized, layout), forms.preferences)
