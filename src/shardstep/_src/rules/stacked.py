"""Equal work on several values: one row of the stack after the other, no two of them ever meet.

    stacked(rows split)     -> split         each replica owns whole rows
    stacked(rows whole)     -> split, whole  own some of the rows, or repeat all of them: whatever takes less time

An operand that is split along another dimension becomes split along the rows by one all-to-all. Where a replica has
fewer rows than there are slots for them, it computes those rows and no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import compat
from ..core.layout import VARYING, Array
from ..core.pieces import STACKED, Cast, Piece, run_stacked
from .contract import REPLICATED, Decision, Local, Placement, Site, Split, register

_BRANCHES = 8  # each is compiled


def stacked(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision]:
    piece: Piece = site.piece
    if VARYING in placements:
        operands = tuple(VARYING if p == VARYING else REPLICATED for p in placements)
        return [Decision(operands, (VARYING,) * len(site.outputs), emit=_emit)]
    owned = tuple(Split(0) if rows else REPLICATED for rows in piece.stacked)
    repeated = (REPLICATED,) * len(site.inputs)
    return [
        Decision(owned, (Split(0),) * len(site.outputs), emit=_emit),
        Decision(repeated, (REPLICATED,) * len(site.outputs), emit=_emit),
    ]


def _emit(local: Local, *arrays: Any) -> list[Any]:
    names = sorted(set().union(*(compat.varying_axes(x) for x in arrays)))

    def cast(x: Any) -> Any:
        missing = tuple(n for n in names if n not in compat.varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    piece: Piece = local.params["piece"]
    held, first = local.outputs[0].local[0], local.outputs[0].offsets[0]
    patterns = piece.patterns(held)
    distinct = sorted(set(patterns))
    if len(distinct) > _BRANCHES:
        return run_stacked(piece, arrays, cast)
    branches = [_rows_alone(piece, rows, held, cast) for rows in distinct]
    if len(branches) == 1:
        return branches[0](*arrays)
    which = np.array([distinct.index(p) for p in patterns], np.int32)
    return lax.switch(jnp.asarray(which)[first // held], branches, *map(cast, arrays))


def _rows_alone(piece: Piece, rows: Sequence[int], held: int, cast: Cast) -> Callable[..., list[Any]]:
    """The piece on those of the slots that hold rows. What comes out of the others is of no matter."""

    def run(*arrays: Any) -> list[Any]:
        made: list[Any] = [None] * len(piece.program.outputs)
        if rows:
            taken = [_taken(x, rows) if own else x for x, own in zip(arrays, piece.stacked, strict=True)]
            made = run_stacked(piece, taken, cast)
        shapes = [piece.shape_of(v.array, held) for v in piece.program.outputs]
        return [_in_place(y, rows, shape, cast) for y, shape in zip(made, shapes, strict=True)]

    return run


def _taken(x: Any, rows: Sequence[int]) -> Any:
    """These rows, in runs."""
    parts = [lax.slice_in_dim(x, run[0], run[-1] + 1) for run in _runs(rows)]
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _in_place(y: Any, rows: Sequence[int], whole: Array, cast: Cast) -> Any:
    """Rows in their slots."""
    parts: list[Any] = []
    filled = 0
    for run in [*_runs(rows), [whole.shape[0]]]:
        if run[0] > sum(p.shape[0] for p in parts):
            missing = run[0] - sum(p.shape[0] for p in parts)
            parts.append(cast(_nothing(Array((missing, *whole.shape[1:]), whole.dtype))))
        if run[0] < whole.shape[0]:
            parts.append(lax.slice_in_dim(y, filled, filled + len(run)))
            filled += len(run)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _nothing(array: Array) -> Any:
    """What stands where nobody computed anything."""
    return jnp.zeros(array.shape, array.dtype)


def _runs(rows: Sequence[int]) -> list[list[int]]:
    """Neighbours together."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


register(stacked, STACKED, per_replica=True)
