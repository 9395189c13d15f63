"""Small tensors travel together: the collectives of a bundle, packed and performed (inside `shard_map`).

Which transfers share their collectives is chosen by `planning/buckets.py`; all of a bundle make the same moves.

    all-reduce        ravel, concatenate, reduce, cut; on TPU side by side (see `_all_reduce`)
    reduce-scatter    (n, -1): row r is what replica r will keep; concatenate the rows, scatter, cut (on TPU a row is
                      whole tiles, see `_tiled`)
    all-gather        ravel, concatenate, gather to (n, -1), cut the columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.layout import REPLICATED, Axis
from ..core.moves import Move
from ..core.schedule import Bundle, Transfer
from ..core.tiles import TILE
from ..rules.contract import filled
from .blocks import block_of
from .collectives import convert, from_blocks, gather_blocks, in_blocks, perform, reduce, to_send, unpadded
from .terms import gather_row, reduce_terms, scatter_terms


def transfer(arrays: Sequence[jax.Array], bundle: Bundle, axes: tuple[Axis, ...]) -> list[jax.Array]:
    """The blocks of the bundle's values in their new layouts (inside `shard_map`)."""
    xs = [x if t.dtype is None else x.astype(t.dtype) for x, t in zip(arrays, bundle, strict=True)]
    xs = [_cleared(x, t, axes) for x, t in zip(xs, bundle, strict=True)]
    if len(bundle) == 1:
        (t,) = bundle
        xs = [convert(xs[0], t.var.array.shape, t.source, t.target, axes, t.wire)]
    else:
        for stage in zip(*(t.moves(axes) for t in bundle), strict=True):
            xs = _move_together(xs, [t.var.array.shape for t in bundle], stage, stage[0].over(axes))
    return [x.astype(t.var.array.dtype) if t.dtype is not None else x for x, t in zip(xs, bundle, strict=True)]


def _cleared(x: jax.Array, t: Transfer, axes: tuple[Axis, ...]) -> jax.Array:
    """Without what padding happens to hold, where elements are scaled by the largest beside them."""
    if t.wire is None or not t.wire.scaled:
        return x
    return filled(x, block_of(t.var.array.shape, t.source, axes), t.source, "add")


def _move_together(
    xs: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]], stage: Sequence[Move], axis: Axis
) -> list[jax.Array]:
    sent = [to_send(x, m, axis) for x, m in zip(xs, stage, strict=True)]
    moved = _MOVES[stage[0].kind](sent, stage, axis)
    arrived = [y.astype(x.dtype) for y, x in zip(moved, xs, strict=True)]
    return [unpadded(y, shape, m.source) for y, shape, m in zip(arrived, shapes, stage, strict=True)]


def _local(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    return [perform(x, m, axis) for x, m in zip(xs, stage, strict=True)]


def _all_reduce(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    """On TPU the compiler sends neighbouring all-reduces in one message, and packs nothing.

    (There any operation takes about 2,100 cycles however little it does, packing too. ResNet-50 has two small sums for
    each of its 53 normalisations, forward and backward. Thousand cycles, packed and side by side: 4,435 and 3,755 on
    v6e:4x4, 7,026 and 6,792 on v5e:4x4, 14,154 and 14,165 on v3:4x4.)
    """
    wire = stage[0].wire
    if wire is None and axis.backend.tiled:
        reduced = [reduce(x, stage[0].op, axis) for x in xs]
    else:
        flat = jnp.concatenate([x.ravel() for x in xs])
        whole = reduce(flat, stage[0].op, axis) if wire is None else reduce_terms(flat, wire, axis)
        cut = _cut(whole, [x.size for x in xs])
        reduced = [y.reshape(x.shape) for y, x in zip(cut, xs, strict=True)]
    return [
        y if m.target == REPLICATED else perform(y, Move(m.axis, REPLICATED, m.target), axis)
        for y, m in zip(reduced, stage, strict=True)
    ]


def _reduce_scatter(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    rows = jnp.concatenate([_rows(x, m.target, axis.size) for x, m in zip(xs, stage, strict=True)], axis=1)
    if (wire := stage[0].wire) is not None:
        mine = scatter_terms(rows, wire, axis)
    elif axis.backend.tiled:
        mine = lax.psum_scatter(_tiled(rows), axis.name, scatter_dimension=0, tiled=False).ravel()[: rows.shape[1]]
    else:
        mine = lax.psum_scatter(rows, axis.name, scatter_dimension=0, tiled=True)[0]
    cut = _cut(mine, [x.size // axis.size for x in xs])
    return [y.reshape(_block(x.shape, m.target, axis.size)) for y, x, m in zip(cut, xs, stage, strict=True)]


def _tiled(rows: jax.Array) -> jax.Array:
    """The rows as whole tiles of the TPU's memory.

    Its compiler makes an all-reduce of a scatter into single rows, for twice the bytes. (Three kernels of 128 x 512
    over 4 chips of v5e, thousand cycles beside the collective: rows 23.5, tiles 17.5.)
    """
    sublanes, lanes = TILE
    filled = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % (sublanes * lanes))))
    return filled.reshape(rows.shape[0], -1, lanes)


def _all_gather(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    mine = jnp.concatenate([x.ravel() for x in xs])
    wire = stage[0].wire
    rows = gather_blocks(mine, axis, 0, tiled=False) if wire is None else gather_row(mine, wire, axis)
    cut = _cut(rows, [x.size for x in xs])
    return [_from_rows(y, x.shape, m.source) for y, x, m in zip(cut, xs, stage, strict=True)]


_MOVES: dict[str, Callable[..., list[jax.Array]]] = {
    "local": _local,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
}


def _cut(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1)


def _block(shape: tuple[int, ...], split: Any, n: int) -> tuple[int, ...]:
    return shape[: split.dim] + (shape[split.dim] // n,) + shape[split.dim + 1 :]


def _rows(x: jax.Array, split: Any, n: int) -> jax.Array:
    """Row r holds what replica r will keep."""
    return in_blocks(x, split.dim, n).reshape(n, -1)


def _from_rows(rows: jax.Array, local: tuple[int, ...], split: Any) -> jax.Array:
    """The whole value, from one row for each replica."""
    return from_blocks(rows.reshape(rows.shape[0], *local), split.dim)
