"""Along which dimensions a leaf is cut.

The rule sees a shape and the data axes, nothing else, so that all leaves of one shape agree: a weight, its gradient
and its moments meet in the update as they are. (On a torus, `torus_order.py` gives some of them another order of axes.)
"""

from __future__ import annotations

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
from ..core.tiles import cuts_tiles, filled, major_to_minor, order_in_memory


def split_layout(
    array: Array, axes: tuple[Axis, ...], shared: tuple[bool, ...], tiled: bool = False, room: float = math.inf
) -> Layout | None:
    """A leaf's layout at rest when it is split along the shared axes; None if it has no dimension to split.

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
    leaf is replicated at rest. Axes in `outer` keep off the dimension that the first axis takes.
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
    """The same for a leaf whose dimensions are in this order in memory."""
    found: dict[int, Placement] = {}
    local = shape
    for k in order:
        n = axes[k].size
        taken = _dims(*found.values())
        open_dims = [d for d in range(len(shape)) if local[d] and (divides(local, Split(d), n) or d not in taken)]
        splits = [cut(local, d, n) for d in open_dims]
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
