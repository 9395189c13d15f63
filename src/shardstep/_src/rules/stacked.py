"""Equal work on several values: one row of the stack after the other, no two of them ever meet.

    stacked(rows split)     -> split         each replica owns whole rows
    stacked(rows whole)     -> split, whole  own some of the rows, or repeat all of them: whatever takes less time

An operand that is split along another dimension becomes split along the rows by one all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ..core import compat
from ..core.layout import VARYING
from ..core.pieces import STACKED, Piece, run_stacked
from .contract import REPLICATED, Decision, Local, Placement, Site, Split, register


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

    return run_stacked(local.params["piece"], arrays, cast)


register(stacked, STACKED, per_replica=True)
