"""The equations that put rows into the slots of a stack, and that take them out again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..core import compat
from ..core.layout import Array, resized
from ..core.pieces import along
from ..core.program import Atom, Equation, Var
from .slots import Slots

_STACK, _UNSTACK = (compat.primitive(name) for name in ("stack", "unstack"))
_CONCATENATE, _SLICE, _SPLIT = (compat.primitive(name) for name in ("concatenate", "slice", "split"))

Sources = tuple[Any, ...]


def stacked(values: Sequence[Var], slots: Slots, sources: Sources) -> list[Equation]:
    """One value for each row; an empty slot has a copy of the last."""
    filled = tuple(values[-1 if row is None else row] for row in slots)
    return [Equation(_STACK, {"axis": 0}, filled, (Var(along(values[0].array, len(slots))),), sources)]


def unstacked(values: Sequence[Var], slots: Slots, sources: Sources) -> list[Equation]:
    array = values[0].array
    made = tuple(Var(array) if row is None else values[row] for row in slots)
    return [Equation(_UNSTACK, {"axis": 0}, (Var(along(array, len(slots))),), made, sources)]


class _Run(NamedTuple):
    """Slots next to one another that hold rows of one leaf, in order; or copies, from its first row on."""

    leaf: int | None
    first: int
    rows: int


def _runs(slots: Slots, size: int) -> Iterator[_Run]:
    """Leaves of so many rows, end to end, in these slots."""
    start = 0
    while start < len(slots):
        row, stop = slots[start], start + 1
        leaf = None if row is None else row // size
        while stop < len(slots) and stop - start < size and _continues(leaf, slots[stop], size):
            stop += 1
        yield _Run(leaf, 0 if row is None else row % size, stop - start)
        start = stop


def _continues(leaf: int | None, row: int | None, size: int) -> bool:
    return (None if row is None else row // size) == leaf  # rows are in order


def join(values: Sequence[Var], slots: Slots, sources: Sources) -> list[Equation]:
    """The rows of all leaves, and rows of the last one once more in empty slots."""
    array = values[0].array
    runs = list(_runs(slots, array.shape[0]))
    if len(runs) == 1 and len(values) == 1:
        return []
    equations: list[Equation] = []
    parts: list[Atom] = []
    for run in runs:
        leaf = values[-1 if run.leaf is None else run.leaf]
        if run.rows < array.shape[0]:
            leaf, whole = Var(Array(resized(array.shape, 0, run.rows), array.dtype)), leaf
            start = (run.first, *[0] * (array.ndim - 1))
            stop = (run.first + run.rows, *array.shape[1:])
            bounds = {"start_indices": start, "limit_indices": stop, "strides": None}
            equations.append(Equation(_SLICE, bounds, (whole,), (leaf,), sources))
        parts.append(leaf)
    return [*equations, _end_to_end(parts, Var(Array(resized(array.shape, 0, len(slots)), array.dtype)), sources)]


def cut(values: Sequence[Var], slots: Slots, sources: Sources) -> list[Equation]:
    """Each leaf's rows again."""
    array = values[0].array
    runs = list(_runs(slots, array.shape[0]))
    if len(runs) == 1 and len(values) == 1:
        return []
    whole = Var(Array(resized(array.shape, 0, len(slots)), array.dtype))
    parts: dict[int | None, list[Var]] = {}
    made = []
    for run in runs:
        is_all = run.leaf is not None and run.rows == array.shape[0]
        part = values[run.leaf] if is_all else Var(Array(resized(array.shape, 0, run.rows), array.dtype))  # type: ignore[index]
        parts.setdefault(run.leaf, []).append(part)
        made.append(part)
    sizes = tuple(run.rows for run in runs)
    equations = [Equation(_SPLIT, {"sizes": sizes, "axis": 0}, (whole,), tuple(made), sources)]
    several = ((leaf, found) for leaf, found in parts.items() if leaf is not None and len(found) > 1)
    return equations + [_end_to_end(found, values[leaf], sources) for leaf, found in several]


def _end_to_end(parts: Sequence[Atom], whole: Var, sources: Sources) -> Equation:
    return Equation(_CONCATENATE, {"dimension": 0}, tuple(parts), (whole,), sources)
