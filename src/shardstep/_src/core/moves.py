"""A change of layout is a collective, and nothing else communicates.

    Partial -> Replicated   all-reduce            Split -> Replicated   all-gather
    Partial -> Split        reduce-scatter        Replicated -> Split   slice (free)
    Replicated -> Partial   keep on one (free)    Split(a) -> Split(b)  all-to-all

`moves` says which of these a conversion takes, axis by axis; the planner counts them and `convert` performs them, so
that what is predicted is what is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from ..planning.placement import cuts_tiles, order_in_memory
from ..runtime.ring_scatter import in_pieces, scatter_in_pieces
from . import compat
from .layout import (
    REPLICATED,
    Array,
    Axis,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    block_shape,
    padded_shape,
)


class Move(NamedTuple):
    """One placement changes along one axis, or along several at once."""

    axis: int
    source: Placement  # along the outermost axis
    target: Placement
    inner: tuple[int, ...] = ()  # further axes that make the same move in the same collective

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.axis, *self.inner)

    def over(self, axes: tuple[Axis, ...]) -> Axis:
        """The axis of the collective."""
        taking_part = [axes[k] for k in self.axes]
        if len(taking_part) == 1:
            return taking_part[0]
        names = tuple(n for a in taking_part for n in a.names)
        return taking_part[0]._replace(names=names, size=math.prod(a.size for a in taking_part))

    @property
    def kind(self) -> str:
        match self.source, self.target:
            case Partial(), Replicated() | Varying():
                return "all-reduce"
            case Partial("add"), Split():
                return "reduce-scatter"
            case Partial(), Split():
                return "all-reduce"  # there is no scattering max: reduce, then slice
            case Split(), Replicated():
                return "all-gather"
            case Split(outer=1), Split(outer=1) if self.source.dim != self.target.dim:
                return "all-to-all"
            case Split(), _:
                return "all-gather"
            case _:
                return "local"


def wire_bytes(move: Move, elements: float, dtype: Any, axis: Axis) -> float:
    """Bytes that one replica sends when a value of so many elements makes this move (ring algorithms)."""
    share = (axis.size - 1) / axis.size
    sent = {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "all-to-all": share / axis.size}
    return sent.get(move.kind, 0.0) * elements * Array((), wire_dtype(move, dtype, axis)).nbytes


def wire_dtype(move: Move, dtype: Any, axis: Axis) -> Any:
    """The dtype in which a value travels: sums of 16-bit floats in float32 where the platform forms them so."""
    summed = isinstance(move.source, Partial) and move.source.op == "add" and move.kind != "local"
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
    return jnp.dtype(jnp.float32) if summed and narrow and axis.widens else dtype


_STRIDED = 1 + 1e-6  # blocks of an inner dimension are not contiguous: of two equal collectives, take the outer one


def cost(source: Placement, target: Placement, array: Array, axis: Axis) -> float:
    """Bytes on the wire for one placement to become another; infinite where it cannot."""
    if source == target:
        return 0.0
    if isinstance(source, Varying) or _dealt(source) != _dealt(target):
        return math.inf
    strided = any(isinstance(p, Split) and p.dim > 0 for p in (source, target))
    elements = math.prod(padded_shape(array.shape, (source, target)))
    return wire_bytes(Move(0, source, target), elements, array.dtype, axis) * (_STRIDED if strided else 1)


def _dealt(placement: Placement) -> bool:
    return isinstance(placement, Split) and placement.dealt


def moves(source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> Iterator[Move]:
    """The conversion as single moves, in an order in which every step is a layout.

    Axes that split the same dimension nest in mesh order, so an outer axis cannot be gathered under an inner one:
    inner splits are undone first and made again last. Otherwise the last dimension in memory is scattered first and
    gathered last (what `placement.py` counts on), except for blocks that end inside of a tile: the TPU's compiler makes
    an all-reduce of such a scatter, so it comes when little is left. What is to be split is split before anything else
    is reduced: an all-reduce of a shard is cheaper than one of the whole.
    """
    current = list(source)
    undone: list[int] = []
    whole = list(source)  # `current` with what is undone
    for k in reversed(range(len(current))):
        if isinstance(whole[k], Split) and (
            _inside_of_change(whole, target, k) or (whole[k] != target[k] and not _direct(whole, target, k))
        ):
            undone.append(k)
            whole[k] = REPLICATED
    gathered = _nested(undone, current, _order(shape, source, axes), outer_first=False)
    yield from _in_pairs([Move(k, current[k], REPLICATED) for k in gathered], axes)
    current = whole
    changing = [k for k in range(len(current)) if current[k] != target[k]]
    made = [k for k in changing if isinstance(target[k], Split)]
    order = _order(shape, target, axes)

    def ragged(k: int, left: Container[int]) -> bool:
        """Will blocks end inside of a tile if axis k is scattered now, and the others that are left are not yet?"""
        if not axes[k].tiled:
            return False
        held = tuple(REPLICATED if j in left and j != k else p for j, p in enumerate(target))
        return any(cuts_tiles(block_shape(shape, held, axes), d, order) for d in _dims(target[k]))

    for k in _nested(made, target, order, outer_first=True, late=ragged):
        yield Move(k, current[k], target[k])
    yield from _at_once([Move(k, current[k], target[k]) for k in changing if k not in made])


def _order(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> Sequence[int]:
    return order_in_memory(shape, layout, axes) if axes and axes[0].tiled else range(len(shape))


def _inside_of_change(current: list[Placement], target: Layout, k: int) -> bool:
    """Does an axis further out change its split of the dimension that axis k splits?"""
    return any(current[j] != target[j] and _dims(current[j], target[j]) & _dims(current[k]) for j in range(k))


def _nested(
    axes: list[int],
    layout: Sequence[Placement],
    order: Sequence[int],
    outer_first: bool,
    late: Callable[[int, Container[int]], bool] = lambda axis, left: False,
) -> Iterator[int]:
    """Axes that share a dimension from the outside in (or from the inside out); the last dimension first (or last).

    `order` is how the dimensions lie in memory. Of the axes that are left, those that are `late` wait.
    """
    dims, left = [_dims(p) for p in layout], sorted(axes)
    dim = {k: max(dims[k]) for k in axes}
    while left:
        free = [k for k in left if not any(dims[j] & dims[k] and (j < k if outer_first else j > k) for j in left)]
        chosen = (max if outer_first else min)(free, key=lambda k: (not late(k, left), order.index(dim[k]), k))
        left.remove(chosen)
        yield chosen


_JOINT = 32  # replicas


def _in_pairs(gathers: list[Move], axes: tuple[Axis, ...]) -> Iterator[Move]:
    """Gathers of one dimension, two axes at a time: the links of both work at once.

    The TPU's compiler makes a full all-reduce of a gather over three axes, and of one over two axes if many replicas
    take part (2 or 8 MB over 64 or 256: twice the bytes, up to 15 times the cycles; never seen over 16 or 32).
    """
    left = list(gathers)  # from the inside out
    while left:
        move = left.pop(0)
        if left and isinstance(outer := left[0].source, Split) and replace(outer, extent=0) == move.source:
            joint = left[0]._replace(inner=move.axes)
            if not axes[move.axis].tiled or joint.over(axes).size <= _JOINT:
                del left[0]
                move = joint
        yield move


def _at_once(reductions: list[Move]) -> Iterator[Move]:
    """What makes the same move along several axes makes it in one collective: an all-reduce over all of them."""
    left = list(reductions)
    while left:
        move = left.pop(0)
        if move.kind == "all-reduce":
            same = [m for m in left if (m.source, m.target) == (move.source, move.target)]
            left = [m for m in left if m not in same]
            move = move._replace(inner=tuple(m.axis for m in same))
        yield move


def _dims(*placements: Placement) -> set[int]:
    return {p.dim for p in placements if isinstance(p, Split)}


def _direct(current: list[Placement], target: Layout, k: int) -> bool:
    """May axis k go from split to split in one all-to-all? Only if no other axis shares either dimension."""
    if Move(k, current[k], target[k]).kind != "all-to-all":
        return False
    others = _dims(*(p for j, p in enumerate(current) if j != k), *(p for j, p in enumerate(target) if j != k))
    return not others & _dims(current[k], target[k])


def layout_cost(source: Layout, target: Layout, array: Array, axes: tuple[Axis, ...]) -> float:
    return sum(bytes for _, bytes in priced_moves(source, target, array, axes))


def priced_moves(source: Layout, target: Layout, array: Array, axes: tuple[Axis, ...]) -> Iterator[tuple[Move, float]]:
    """Each move with the bytes it puts on the wire."""
    current = list(source)
    for move in moves(source, target, array.shape, axes):
        for k in move.axes:
            current[k] = REPLICATED
        held = math.prod(padded_shape(block_shape(array.shape, tuple(current), axes), (move.source, move.target)))
        yield move, wire_bytes(move, held, array.dtype, move.over(axes))
        for k in move.axes:
            current[k] = move.target


def convert(x: jax.Array, shape: tuple[int, ...], source: Layout, target: Layout, axes: tuple[Axis, ...]) -> jax.Array:
    """Make the replica's block of a value of this shape in one layout into its block in another (in `shard_map`)."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and source != target:
        data = jax.random.key_data(x)
        data = convert(data, shape + data.shape[x.ndim :], source, target, axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    for move in moves(source, target, shape, axes):
        axis = move.over(axes)
        sent = padded(x, move.target).astype(wire_dtype(move, x.dtype, axis))
        if axis.tiled and move.kind == "reduce-scatter":
            sent = _as_at_rest(sent, order_in_memory(shape, target, axes))
        x = unpadded(perform(sent, move, axis).astype(x.dtype), shape, move.source)
    return x


def _as_at_rest(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """A gradient, its dimensions in the order in which its state lies in memory.

    Left alone, the TPU compiler may produce a gradient transposed, and then transposes all state of its shape to match
    and back again: 24 copies of shards for 4 weights with Adam on v6e, or of whole weights that rest replicated.
    """
    return with_layout_constraint(x, MemoryLayout(order))


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
            return lax.all_to_all(x, axis.name, split_axis=b.dim, concat_axis=a.dim, tiled=True)
        case Replicated(), Split() as s:
            return block(x, s, axis)
        case Replicated(), Partial("add"):
            return jnp.where(lax.axis_index(axis.name) == 0, varying(x, *axis.names), jnp.zeros((), x.dtype))
        case Replicated(), Partial() | Varying():
            return varying(x, *axis.names)
    raise AssertionError(f"no way from {move.source} to {move.target}")


def reduce(x: jax.Array, op: str, axis: Axis) -> jax.Array:
    """All-reduce."""
    if x.dtype == jnp.bool_:
        return reduce(x.astype(jnp.int8), op, axis).astype(jnp.bool_)
    return {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}[op](x, axis.name)


def scatter(x: jax.Array, dim: int, axis: Axis) -> jax.Array:
    """Reduce-scatter."""
    if in_pieces(x.nbytes // axis.size, axis):
        return scatter_in_pieces(x, dim, axis)
    if axis.outermost and dim:
        return lax.psum_scatter(in_blocks(x, dim, axis.size), axis.name, scatter_dimension=0, tiled=False)
    return lax.psum_scatter(x, axis.name, scatter_dimension=dim, tiled=True)


def gather(x: jax.Array, split: Split, axis: Axis) -> jax.Array:
    """All-gather, certified by JAX's type system to be the same on every replica."""

    def whole(v: jax.Array, d: int) -> jax.Array:
        if axis.outermost and d:
            return from_blocks(gather_blocks(v, axis, 0, tiled=False), d)
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


def gather_blocks(x: jax.Array, axis: Axis, dim: int, tiled: bool) -> jax.Array:
    """`lax.all_gather` of 16-bit floats as what they are: where sums are widened, XLA widens whatever it moves.

    (Its CPU backend has no 16-bit collectives, and would send float32. It does have them for integers.)
    """
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 and axis.widens
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
    return done.reshape(*shape[:d], -1, *shape[d + 1 :])
