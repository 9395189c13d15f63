"""Along which dimensions a leaf is cut.

The rule sees a shape and the data axes, nothing else, so that all leaves of one shape agree: a weight, its gradient
and its moments meet in the update as they are. (On a torus, `torus_order.py` gives some of them another order of axes.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from ..core.layout import (
    REPLICATED,
    Array,
    Axis,
    Layout,
    Placement,
    Split,
    block_shape,
    cut,
    divides,
    is_padded,
    local_shape,
)

TILE = (16, 128)  # bfloat16's; float32 has (8, 128), but a bfloat16 weight and its float32 moments must agree


def split_layout(
    array: Array, axes: tuple[Axis, ...], shared: tuple[bool, ...], tiled: bool = False, room: float = math.inf
) -> Layout | None:
    """How a leaf rests when it is split along the shared axes; None if it has no dimension to split.

    Padded, it may take `room` times as many elements: all of them travel.
    """
    sharded = [k for k in range(len(axes)) if shared[k]]
    if tiled:
        found = _whole_tiles(array.shape, axes, sharded[::-1])
    else:
        found = _own_dimensions(array.shape, axes, sharded)
    if found:
        return tuple(found.get(k, REPLICATED) for k in range(len(axes)))
    dims = [d for d, size in enumerate(array.shape) if size > 1]
    if tiled or not dims:
        return None
    n = math.prod(axes[k].size for k in sharded)
    taken = {d: -(-array.shape[d] // n) * n / array.shape[d] for d in dims}
    least = min(dims, key=taken.__getitem__)
    return split_on(array.shape, least, axes, shared) if taken[least] <= room else None


def split_on(
    shape: tuple[int, ...], dim: int, axes: tuple[Axis, ...], shared: tuple[bool, ...], batch: bool = False
) -> Layout:
    """One dimension over several axes, nested in mesh order. The outermost carries the padding of all."""
    sharded = [k for k in range(len(axes)) if shared[k]]
    first = cut(shape, dim, math.prod(axes[k].size for k in sharded), batch)
    layout: list[Placement] = [REPLICATED] * len(axes)
    for k in sharded:
        layout[k] = first if k == sharded[0] else replace(first, extent=0)
    return tuple(layout)


def beginning_with(first: int, shape: tuple[int, ...], usual: Layout, axes: tuple[Axis, ...]) -> Layout | None:
    """The layout of a leaf on TPU if this axis is the first to be scattered along; None if that is not as good.

    The axis takes the last dimension. Axes nest in mesh order, so that those further out must take others.
    """
    split = [k for k, p in enumerate(usual) if isinstance(p, Split)]
    if first not in split:
        return None
    order = [first, *(k for k in reversed(split) if k != first)]
    found = _whole_tiles(shape, axes, order, outer=[k for k in split if k < first])
    layout = tuple(found.get(k, REPLICATED) for k in range(len(axes)))
    return layout if _waste(shape, layout, axes) <= _waste(shape, usual, axes) else None


def _waste(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> tuple[int, int, int]:
    """What speaks against a layout: memory, padding, cut tiles."""
    block, order = block_shape(shape, layout, axes), order_in_memory(shape, layout, axes)
    cut_tiles = sum(cuts_tiles(block, d, order) for d in _dims(*layout))
    return filled(block, order), sum(map(is_padded, layout)), cut_tiles


def _dims(*placements: Placement | None) -> set[int]:
    return {p.dim for p in placements if isinstance(p, Split)}


def _own_dimensions(shape: tuple[int, ...], axes: tuple[Axis, ...], sharded: list[int]) -> dict[int, Placement]:
    """The first dimension that divides. Of several axes the outer ones take it, and inner ones a later dimension if
    there is one: later dimensions are scattered first, and so along the faster links. Empty where padding is needed.
    """
    found: dict[int, Placement] = {}
    local = shape
    for k in sharded:
        taken = [p.dim for p in found.values() if isinstance(p, Split)]
        fitting = [d for d in range(len(shape)) if divides(local, Split(d), axes[k].size)]
        if not fitting:
            return {}
        found[k] = Split(min(fitting, key=lambda d: (d in taken, d)))
        local = local_shape(local, found[k], axes[k].size)
    return found


_PADDED = 2.0  # a padded leaf is no plain array at rest: only for half the memory,
_WASTE = 1.1  # and only where little of it is padding


def _whole_tiles(
    shape: tuple[int, ...], axes: tuple[Axis, ...], order: list[int], outer: Sequence[int] = ()
) -> dict[int, Placement]:
    """The TPU's memory has tiles of 8 (or 16) x 128: a block that cuts one is filled up and shifted about.

    Axis by axis, the dimension whose blocks take the least memory, tiles filled up; of equals one that cuts no tile,
    the last dimension in memory before the first ones. (Measured with libtpu: so cut, scatters and gathers compile
    without fix-ups, if that dimension is scattered first.) An axis that would save no memory is left out: along it, the
    leaf rests replicated. Axes in `outer` keep off the dimension that the first axis takes.
    """
    lying = major_to_minor(shape)
    found = _cut_to(lying, shape, axes, order, outer)
    layout = tuple(found.get(k, REPLICATED) for k in range(len(axes)))
    if order_in_memory(shape, layout, axes) != lying:
        found = _cut_to(range(len(shape)), shape, axes, order, outer)
    return found


def _cut_to(
    lying: Sequence[int], shape: tuple[int, ...], axes: tuple[Axis, ...], order: list[int], outer: Sequence[int]
) -> dict[int, Placement]:
    """The same for a leaf whose dimensions lie in this order."""
    found: dict[int, Placement] = {}
    local = shape
    for k in order:
        n = axes[k].size
        taken = _dims(*found.values())
        splits = [cut(local, d, n) for d in range(len(shape)) if divides(local, Split(d), n) or d not in taken]
        closed = {p.dim for p in found.values() if isinstance(p, Split) and p.extent}  # nothing nests in padding
        if k in outer:
            closed |= _dims(found.get(order[0]))
        splits = [s for s in splits if s.extent <= _WASTE * local[s.dim] and s.dim not in closed]
        memory = {s: filled(local_shape(local, s, n), lying) * (_PADDED if s.extent else 1) for s in splits}
        ragged = {s: cuts_tiles(local_shape(local, s, n), s.dim, lying) for s in splits}
        best = min(splits, key=lambda s: (memory[s], ragged[s], s.dim != lying[-1], s.dim), default=None)
        if best is not None and memory[best] < filled(local, lying):
            found[k] = best
            local = local_shape(local, best, n)
    return found


def cuts_tiles(block: tuple[int, ...], dim: int, order: Sequence[int]) -> bool:
    """Does a block end inside of a tile? (Two tiles side by side: a bfloat16 gradient that is scattered into columns of
    one, 128 wide, compiles to an all-reduce.)
    """
    from_last = len(block) - 1 - order.index(dim)
    return from_last < 2 and block[dim] % (TILE[0], 2 * TILE[1])[1 - from_last] != 0


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
    whole = not any(cuts_tiles(block, d, order) for d in _dims(*layout))
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
