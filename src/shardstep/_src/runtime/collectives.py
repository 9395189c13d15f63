"""A change of layout is a collective, and nothing else communicates.

`core/moves.py` says which collectives a conversion takes, axis by axis; here they are performed on a replica's blocks,
inside `shard_map`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from ..core import compat
from ..core.layout import Axis, Layout, Partial, Placement, Replicated, Split, Varying
from ..core.moves import Move, by_wire, moves, wire_dtype
from ..core.tiles import order_in_memory
from ..core.wire import Wire
from .ring_scatter import in_pieces, scatter_in_pieces
from .terms import gather_row, reduce_terms, scatter_terms


def convert(
    x: jax.Array,
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    axes: tuple[Axis, ...],
    wire: Wire | None = None,
) -> jax.Array:
    """Make the replica's block of a value of this shape in one layout into its block in another (in `shard_map`)."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and source != target:
        data = jax.random.key_data(x)
        data = convert(data, shape + data.shape[x.ndim :], source, target, axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    for move in (by_wire(m, wire) for m in moves(source, target, shape, axes)):
        axis = move.over(axes)
        sent = to_send(x, move, axis)
        if axis.backend.tiled and move.kind == "reduce-scatter" and move.wire is None:
            sent = _as_at_rest(sent, order_in_memory(shape, target, axes))
        x = unpadded(perform(sent, move, axis).astype(x.dtype), shape, move.source)
    return x


def _as_at_rest(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """A gradient, its dimensions in the order in which its state lies in memory.

    Left alone, the TPU compiler may produce a gradient transposed, and then transposes all state of its shape to match
    and back again: 24 copies of shards for 4 weights with Adam on v6e, or of whole weights that rest replicated.
    """
    return with_layout_constraint(x, MemoryLayout(order))


def to_send(x: jax.Array, move: Move, axis: Axis) -> jax.Array:
    """The replica's block as it goes into the move's collective."""
    room = padded(x, move.target)
    return room if move.wire else room.astype(wire_dtype(move, x.dtype, axis))


def padded(x: jax.Array, placement: Placement) -> jax.Array:
    """Room at the end of a dimension that is about to be cut."""
    if not isinstance(placement, Split) or not placement.extent:
        return x
    missing = placement.extent - x.shape[placement.dim]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, missing * (d == placement.dim), 0) for d in range(x.ndim)])


def unpadded(x: jax.Array, shape: tuple[int, ...], placement: Placement) -> jax.Array:
    """Without that room, where a dimension was cut and is whole again."""
    if not isinstance(placement, Split) or not placement.extent:
        return x
    return lax.slice_in_dim(x, 0, shape[placement.dim], axis=placement.dim)


def perform(x: jax.Array, move: Move, axis: Axis) -> jax.Array:
    """One move of a replica's block."""
    if move.wire is not None:
        return _by_wire(x, move, move.wire, axis)
    match move.source, move.target:
        case Partial(op), Replicated():
            return reduce(x, op, axis)
        case Partial(op), Varying():
            return varying(reduce(x, op, axis), *axis.names)
        case Partial("add"), Split() as s:
            return _in_view(x, s, lambda v, d: scatter(v, d, axis))
        case Partial(op), Split() as s:
            return block(reduce(x, op, axis), s, axis)
        case Split() as s, Replicated():
            return gather(x, s, axis)
        case Split(outer=1) as a, Split(outer=1) as b if a.dim != b.dim:
            return exchange(x, a, b, axis)
        case Replicated(), Split() as s:
            return block(x, s, axis)
        case Replicated(), Partial("add"):
            return jnp.where(lax.axis_index(axis.name) == 0, varying(x, *axis.names), jnp.zeros((), x.dtype))
        case Replicated(), Partial() | Varying():
            return varying(x, *axis.names)
    raise AssertionError(f"no way from {move.source} to {move.target}")


def _by_wire(x: jax.Array, move: Move, wire: Wire, axis: Axis) -> jax.Array:
    match move.source, move.target:
        case Partial(), Split() as s:
            return _in_view(x, s, lambda v, d: scatter_terms(in_blocks(v, d, axis.size), wire, axis))
        case Split() as s, Replicated():
            return _in_view(x, s, lambda v, d: from_blocks(gather_row(v, wire, axis), d))
        case _, Varying():
            return varying(reduce_terms(x, wire, axis), *axis.names)
    return reduce_terms(x, wire, axis)


def reduce(x: jax.Array, op: str, axis: Axis) -> jax.Array:
    """All-reduce."""
    if x.dtype == jnp.bool_:
        return reduce(x.astype(jnp.int8), op, axis).astype(jnp.bool_)
    return {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}[op](x, axis.name)


def exchange(x: jax.Array, source: Split, target: Split, axis: Axis) -> jax.Array:
    """All-to-all."""
    if not target.extent or x.shape[target.dim] > axis.size:
        return lax.all_to_all(x, axis.name, split_axis=target.dim, concat_axis=source.dim, tiled=True)
    # Of a single row beside its padding, XLA sends the row as it lies, and padding as it would lie by itself: it finds
    # two layouts of one block in the all-to-all, and gives up. One dimension has one layout.
    blocks = in_blocks(x, target.dim, axis.size)
    sent = lax.all_to_all(blocks.ravel(), axis.name, split_axis=0, concat_axis=0, tiled=True)
    return from_blocks(sent.reshape(blocks.shape), source.dim)


def scatter(x: jax.Array, dim: int, axis: Axis) -> jax.Array:
    """Reduce-scatter."""
    if in_pieces(x.nbytes // axis.size, axis):
        return scatter_in_pieces(x, dim, axis)
    if axis.backend.outermost and dim:
        return lax.psum_scatter(in_blocks(x, dim, axis.size), axis.name, scatter_dimension=0, tiled=False)
    return lax.psum_scatter(x, axis.name, scatter_dimension=dim, tiled=True)


def gather(x: jax.Array, split: Split, axis: Axis) -> jax.Array:
    """All-gather, certified by JAX's type system to be the same on every replica."""

    def whole(v: jax.Array, d: int) -> jax.Array:
        if axis.backend.outermost and d:
            return _end_to_end(gather_blocks(v, axis, 0, tiled=False), d)
        return gather_blocks(v, axis, d, tiled=True)

    return _in_view(x, split, whole)


def in_blocks(x: jax.Array, dim: int, n: int) -> jax.Array:
    """n blocks of a dimension, one after the other in memory.

    Asked to cut another dimension than the outermost, XLA's CPU backend makes it the outermost one in memory: it
    transposes the tensor element by element, and what is computed with the shards reads them across. Blocks are moved
    by whole rows.
    """
    blocks = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0)


def from_blocks(blocks: jax.Array, dim: int) -> jax.Array:
    """The tensor of which these are blocks of a dimension."""
    n, *block = blocks.shape
    block[dim] *= n
    return jnp.moveaxis(blocks, 0, dim).reshape(block)


_LONG = 32 * 1024  # bytes


def _end_to_end(blocks: jax.Array, dim: int) -> jax.Array:
    """The same, where XLA's CPU backend gathered them.

    Blocks whose rows are long in memory are concatenated: XLA then copies row by row, not element by element. (Measured
    on 8 devices, rows of 32 to 256 KiB: 0.56 to 1.06 of the CPU time with JAX 0.12, 0.88 to 1.02 with 0.10. With rows
    of 2 KiB it would take half as long again.)
    """
    n, *block = blocks.shape
    if math.prod(block[dim:]) * blocks.dtype.itemsize < _LONG:
        return from_blocks(blocks, dim)
    return lax.concatenate([lax.index_in_dim(blocks, i, keepdims=False) for i in range(n)], dim)


def gather_blocks(x: jax.Array, axis: Axis, dim: int, tiled: bool) -> jax.Array:
    """`lax.all_gather` of 16-bit floats as what they are: where sums are widened, XLA widens whatever it moves.

    (Its CPU backend has no 16-bit collectives, and would send float32. It does have them for integers.)
    """
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 and axis.backend.widens
    bits = lax.bitcast_convert_type(x, jnp.uint16) if narrow else x
    gathered = lax.all_gather(bits, axis.name, axis=dim, tiled=tiled, to="invarying")
    return lax.bitcast_convert_type(gathered, x.dtype) if narrow else gathered


def block(x: jax.Array, split: Split, axis: Axis) -> jax.Array:
    """The replica's own block of a value that it holds whole."""

    def take(v: jax.Array, d: int) -> jax.Array:
        size = v.shape[d] // axis.size
        return lax.dynamic_slice_in_dim(v, lax.axis_index(axis.name) * size, size, d)

    return _in_view(varying(x, *axis.names), split, take)


def varying(x: jax.Array, *names: str) -> jax.Array:
    """The same data, typed as differing between replicas."""
    missing = tuple(n for n in names if n not in compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _in_view(x: jax.Array, split: Split, act: Any) -> jax.Array:
    """Apply `act(view, dim)` where an outer factor of the split dimension is a dimension of its own."""
    if split.outer == 1:
        return act(x, split.dim)
    d, shape = split.dim, x.shape
    done = act(x.reshape(*shape[:d], split.outer, shape[d] // split.outer, *shape[d + 1 :]), d + 1)
    return done.reshape(*shape[:d], done.shape[d] * done.shape[d + 1], *shape[d + 1 :])
