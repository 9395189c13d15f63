"""What the planner has met before.

Steps repeat themselves: every leaf goes through the same optimizer, every layer through the same block. So what is
known of a value (`Wanted`, `Forms`) is one object for all values of which the same is known, and an equation's
*situation* is its kind and these objects, compared by identity. What was found out in a situation once holds wherever
it arises again: a program of ten thousand leaves takes as many decisions as one of ten.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.layout import Array, Axis, Layout, Partial, Placement, Split
from ...core.moves import layout_cost
from ...core.schedule import Demand, Ruling, Schedule

Situation = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Wanted:
    """What the readers of a value want of it along each axis, and whether there are several readers."""

    demands: tuple[Demand, ...]
    several: bool


@dataclass(frozen=True, eq=False)
class Forms:
    """The layouts in which one value may be read without communication.

    `held` are those that readers are shown (first the one they should see first); `present` are those that replicas
    have in memory. The two differ where a free slice is not made before somebody reads it.
    """

    held: tuple[Layout, ...]
    present: tuple[Layout, ...]
    wanted: Wanted

    @property
    def home(self) -> Layout:
        """The layout that readers see first. Once reduced, a value is never seen partial again."""
        return self.living[0]

    @functools.cached_property
    def living(self) -> tuple[Layout, ...]:
        if len(self.held) == 1:
            return self.held
        reduced = tuple(f for f in self.held if not any(isinstance(p, Partial) for p in f))
        return reduced or self.held

    def source(self, target: Layout, array: Array, axes: tuple[Axis, ...]) -> Layout:
        """The layout in memory from which `target` is cheapest."""
        if target in self.present:
            return target
        if len(self.present) == 1:
            return self.present[0]
        return min(self.present, key=lambda f: layout_cost(f, target, array, axes))


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
    conversions: tuple[Conversion, ...]  # of its operands, in front of it
    results: tuple[Forms, ...]
    meets_batch: bool  # are its operands read together with examples?


class Situations:
    """What was found out before, by situation. For one set of axes."""

    def __init__(self) -> None:
        self.outcomes: dict[Situation, Outcome] = {}  # of the forward walk
        self.requests: dict[Situation, tuple[tuple[int, Wanted], ...]] = {}  # of the backward walk, by operand
        self.answers: dict[Any, Any] = {}  # of the rules, to the questions of the backward walk
        self.bodies: dict[Situation, Schedule] = {}  # of loops and branches; each walk round a loop comes by again
        self._wanted: dict[Any, Wanted] = {}
        self._joined: dict[tuple[Wanted, Wanted], Wanted] = {}
        self._forms: dict[Any, Forms] = {}

    def wanted(self, demands: tuple[Demand, ...], several: bool = False) -> Wanted:
        examples = carry_examples(s for demand in demands for s in demand.splits)
        return self._wanted.setdefault((demands, examples, several), Wanted(demands, several))

    def both(self, first: Wanted, then: Wanted) -> Wanted:
        """What two readers want, the first of which is first to be pleased."""
        known = self._joined.get((first, then))
        if known is None:
            demands = tuple(a | b for a, b in zip(first.demands, then.demands, strict=True))
            known = self._joined[first, then] = self.wanted(demands, first.several or then.several)
        return known

    def forms(self, held: Sequence[Layout], present: Sequence[Layout], wanted: Wanted) -> Forms:
        held, present = tuple(dict.fromkeys(held)), tuple(present)
        key = held, present, carry_examples(p for layout in held + present for p in layout), wanted
        return self._forms.setdefault(key, Forms(held, present, wanted))

    def added(self, forms: Forms, layout: Layout) -> Forms:
        """Those of a value that is now held in another layout too."""
        return self.forms((*forms.held, layout), (*forms.present, layout), forms.wanted)


def carry_examples(placements: Iterable[Placement]) -> tuple[bool, ...]:
    """Which splits carry the examples: equality leaves it out, decisions do not."""
    return tuple([p.batch for p in placements if isinstance(p, Split)])
