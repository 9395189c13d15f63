"""How the values of a program enter and leave it: what is settled before the program itself is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.layout import Layout
from ...core.schedule import Preference


@dataclass(frozen=True)
class Boundary:
    """A whole step leaves its outputs in layouts that arrays have at rest; a body may leave them in any layout."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]  # None: as it comes
    outside: tuple[tuple[Preference, ...], ...] | None = None  # what the surroundings of a body want of its results
    seen: tuple[Layout, ...] = ()  # the layouts in which readers see the first inputs first
    inside: bool = False  # is this the body of a loop or branch?
    leaves_partial: bool = False  # may an output that leaves as it comes be a partial sum or a merged split?
    notes_batch: bool = False  # is it to be found out which inputs meet the examples?
    visits: bool = False  # may examples go to weights, if that sends less than moving the weights?
    drawn: tuple[tuple[int, Layout], ...] = ()  # what the program makes itself with so many rows are examples too

    @classmethod
    def of_body(
        cls,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout | None],
        outside: Sequence[tuple[Preference, ...]] | None = None,
        seen: Sequence[Layout] = (),
    ) -> Boundary:
        """Of the body of a loop or branch."""
        around = None if outside is None else tuple(outside)
        return cls(
            tuple(inputs), tuple(outputs), around, tuple(seen), inside=True, leaves_partial=True, notes_batch=True
        )
