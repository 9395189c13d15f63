"""What the planner decides, as frozen data: a program with a layout for every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .collectives import cost
from .layout import REPLICATED, Array, Axis, Layout, Partial, Placement, Replicated, Split, Varying, is_batch
from .program import Equation, Program
from .rules.core import Emit


@dataclass(frozen=True)
class Demand:
    """What the readers of a value want of it along one axis.

    Some want a certain split, some want it whole, some take any split (`any`: a sum does). `terms` counts the partial
    values that are added up before they are read: they share one reduction.
    """

    splits: tuple[Split, ...] = ()
    full: bool = False
    any: bool = False
    terms: int = 1

    def __or__(self, other: Demand) -> Demand:
        if other is NOTHING or self is NOTHING:
            return self if other is NOTHING else other
        splits = tuple(dict.fromkeys(self.splits + other.splits))
        return Demand(splits, self.full or other.full, self.any or other.any, min(self.terms, other.terms))

    def future(self, placement: Placement, array: Array, axis: Axis) -> float:
        """Bytes that a value in this placement will still have to move to please its readers.

        Where nobody said what they want, a value that is not whole is charged a quarter of what making it whole costs:
        enough not to cut work into pieces that nobody asked for, too little to hurry a reduction that can wait.
        """
        if isinstance(placement, Replicated | Varying) or is_batch(placement):
            return 0.0
        wanted: Placement | None = self.splits[0] if self.splits else REPLICATED if self.full else None
        if wanted is None:
            whole = cost(placement, REPLICATED, array, axis)
            return 0.0 if self.any and isinstance(placement, Split) else whole / 4
        moved = 0.0
        if isinstance(placement, Partial):
            moved += cost(placement, wanted, array, axis) / self.terms
            placement = wanted
        elif self.splits and placement not in self.splits and not self.any:
            moved += cost(placement, wanted, array, axis)
        if self.full:
            moved += cost(placement, REPLICATED, array, axis)
        return moved


NOTHING = Demand()


@dataclass(frozen=True)
class Collective:
    """One communication of the rewritten step."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: float  # that one replica sends, each time
    axis: str
    purpose: str
    line: str
    loop: str = ""  # the loop or branch it is inside of, if any
    times: int = 1  # how often a step does it (a while loop counts once)

    @property
    def total(self) -> float:
        return self.bytes * self.times


@dataclass(frozen=True)
class Fallback:
    """An equation that had to run whole on every replica."""

    primitive: str
    why: str
    bytes: float
    line: str


@dataclass(frozen=True, eq=False)
class Step:
    """One equation, decided."""

    equation: Equation
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    params: Mapping[str, Any]
    emit: Emit | None = None
    bodies: tuple[Schedule, ...] = ()
    apart: bool = False  # each result depends on its own operand alone
    gathered: bool = False  # no rule could keep its operands as they were
    fill: tuple[str | None, ...] = ()  # what the padding of each operand is filled for, see `Decision`


@dataclass(frozen=True, eq=False)
class Schedule:
    """A program, decided: how it runs and what it communicates."""

    program: Program
    axes: tuple[Axis, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    demands: tuple[tuple[Demand, ...], ...] = ()  # of the inputs
    met_batch: frozenset[int] = frozenset()  # inputs that were read together with the examples
