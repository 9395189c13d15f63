"""The tiles of the TPU's memory: how a value fills them, and which blocks cut one.

Placement chooses layouts by this, but it belongs below the planner: the order of moves depends on tiles, and the moves
are generated for those who price them and for those who perform them (`moves.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from .layout import Axis, Layout, Split, block_shape

TILE = (16, 128)  # bfloat16's; float32 has (8, 128), but a bfloat16 weight and its float32 moments must agree


def cuts_tiles(block: tuple[int, ...], dim: int, order: Sequence[int]) -> bool:
    """Does a block end inside of a tile? (Two tiles side by side: a bfloat16 gradient that is scattered into columns of
    one, 128 wide, compiles to an all-reduce.)
    """
    from_last = len(block) - 1 - order.index(dim)
    return from_last < 2 and block[dim] % (TILE[0], 2 * TILE[1])[1 - from_last] != 0


def all_reduced(block: tuple[int, ...], dim: int, order: Sequence[int], itemsize: int) -> bool:
    """Does the compiler make an all-reduce and a slice of the scatter into such blocks?

    It scatters whole tiles: 8 rows and 128 lanes of float32, twice that of bfloat16. (libtpu 0.0.50, v3, v5e and v5p.)
    """
    from_last = len(block) - 1 - order.index(dim)
    return from_last < 2 and block[dim] % (32 // itemsize, 512 // itemsize)[1 - from_last] != 0


def filled(block: tuple[int, ...], order: Sequence[int]) -> int:
    """Elements that a block takes in memory: its last two dimensions there fill whole tiles."""
    if len(block) < 2:
        return _up(block[0], TILE[1]) if block else 1
    *outer, rows, lanes = (block[d] for d in order)
    return math.prod(outer) * _up(rows, TILE[0]) * _up(lanes, TILE[1])


_SAVED = 4 / 3  # an order other than the shape's own is taken into account if it saves a quarter


def order_in_memory(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """From major to minor, the order of dimensions for which a leaf is cut.

    As the compiler would lay it out, unless blocks end inside of a tile so. (On v5e:16x16 an attention kernel of
    [1024, 16, 64] leaves too little for whole tiles: there it is better cut into rows, and transposed.)
    """
    order, block = major_to_minor(shape), block_shape(shape, layout, axes)
    split = {p.dim for p in layout if isinstance(p, Split)}
    whole = not any(cuts_tiles(block, d, order) for d in split)
    return order if whole else tuple(range(len(shape)))


@functools.cache
def major_to_minor(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions in the TPU's memory: the last two are those that fill tiles best.

    What libtpu does with arguments: float32[1024, 16, 64] lies as [16, 64, 1024], since row after row it would take
    twice the memory. (It does so for the least gain. For [2048, 1000] that is 2 %, and there blocks of rows, which cut
    no tile, are worth more.)
    """
    own = tuple(range(len(shape)))
    if len(shape) < 2:
        return own

    def taken(last: tuple[int, int]) -> float:
        rows, lanes = (max(shape[d], 1) for d in last)
        return _up(rows, min(8, 1 << (rows - 1).bit_length())) / rows * _up(lanes, TILE[1]) / lanes

    pairs = ((r, c) for c in reversed(own) for r in reversed(own) if r != c)
    last = min(pairs, key=taken)
    if taken((own[-2], own[-1])) < _SAVED * taken(last):
        return own
    return (*(d for d in own if d not in last), *last)


def _up(size: int, tile: int) -> int:
    return -(-size // tile) * tile
