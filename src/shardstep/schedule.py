"""What the planner decides, as frozen data: a program with a layout for every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .collectives import cost
from .layout import REPLICATED, Axis, Layout, Partial, Placement, Split
from .program import Equation, Program
from .rules.core import Emit


@dataclass(frozen=True)
class Demand:
    """What the readers of a value want of it along one axis: some want a split, some want it whole."""

    splits: tuple[Split, ...] = ()
    full: bool = False

    def __or__(self, other: Demand) -> Demand:
        if other is NOTHING:
            return self
        return Demand(tuple(dict.fromkeys(self.splits + other.splits)), self.full or other.full)

    def future(self, placement: Placement, nbytes: float, n: int) -> float:
        """Bytes that a value in this placement will still have to move to please its readers."""
        wanted: list[Placement] = [s for s in self.splits[:1]]
        moved = 0.0
        if wanted and placement != wanted[0]:
            moved += cost(placement, wanted[0], nbytes, n)
            placement = wanted[0] if isinstance(placement, Partial) else placement
        if self.full:
            moved += cost(placement, REPLICATED, nbytes, n)
        return moved


NOTHING = Demand()


@dataclass(frozen=True)
class Collective:
    """One communication of the rewritten step."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: float  # that one replica sends
    axis: str
    purpose: str
    line: str
    loop: str = ""  # the loop it is inside of, if any


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
