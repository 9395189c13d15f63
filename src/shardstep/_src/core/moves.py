"""A change of layout, as single moves: which collectives it takes, in which order, and what they send.

    Partial -> Replicated   all-reduce            Split -> Replicated   all-gather
    Partial -> Split        reduce-scatter        Replicated -> Split   slice (free)
    Replicated -> Partial   keep on one (free)    Split(a) -> Split(b)  all-to-all

`moves` is the one generator of them. The planner prices what it yields and `runtime/collectives.py` performs it, so
that what is predicted is what is run. Nothing here touches an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

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
    joined,
    padded_shape,
)
from .tiles import cuts_tiles, order_in_memory
from .wire import Wire


class Move(NamedTuple):
    """One placement changes along one axis, or along several at once."""

    axis: int
    source: Placement  # along the outermost axis
    target: Placement
    inner: tuple[int, ...] = ()  # further axes that make the same move in the same collective
    wire: Wire | None = None  # how it travels, where that is not the collective's own way

    @property
    def axes(self) -> tuple[int, ...]:
        return (self.axis, *self.inner)

    def over(self, axes: tuple[Axis, ...]) -> Axis:
        """The axis of the collective."""
        return joined(tuple(axes[k] for k in self.axes))

    @property
    def op(self) -> str:
        """By which terms are reduced; empty where nothing is."""
        return self.source.op if isinstance(self.source, Partial) else ""

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


class Sent(NamedTuple):
    """One collective of a move, and what one replica puts on the wire for it."""

    kind: str
    dtype: Any
    bytes: float


def sent(move: Move, elements: float, dtype: Any, axis: Axis) -> tuple[Sent, ...]:
    """The collectives of a move, for a value with this number of elements (ring algorithms)."""
    if move.kind == "local":
        return ()
    if move.wire is not None:
        others = (axis.size - 1) * move.wire.nbytes(-(-elements // axis.size))
        kinds = {"reduce-scatter": ("all-to-all",), "all-reduce": ("all-to-all", "all-gather")}
        return tuple(Sent(kind, move.wire.dtype, others) for kind in kinds.get(move.kind, (move.kind,)))
    share = (axis.size - 1) / axis.size
    shares = {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "all-to-all": share / axis.size}
    travels = wire_dtype(move, dtype, axis)
    return (Sent(move.kind, travels, shares[move.kind] * elements * Array((), travels).nbytes),)


def wire_bytes(move: Move, elements: float, dtype: Any, axis: Axis) -> float:
    """Bytes that one replica sends when a value with this number of elements makes this move."""
    return sum(s.bytes for s in sent(move, elements, dtype, axis))


def wire_dtype(move: Move, dtype: Any, axis: Axis) -> Any:
    """The dtype in which a value travels: sums of 16-bit floats in float32 where the platform forms them so."""
    summed = isinstance(move.source, Partial) and move.source.op == "add" and move.kind != "local"
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
    return jnp.dtype(jnp.float32) if summed and narrow and axis.backend.widens else dtype


_STRIDED = 1 + 1e-6  # blocks of an inner dimension are not contiguous: of two equal collectives, take the outer one


def cost(source: Placement, target: Placement, array: Array, axis: Axis) -> float:
    """Bytes on the wire for one placement to become another; infinite where it cannot."""
    if source == target:
        return 0.0
    if isinstance(source, Varying) or _permuted(source) != _permuted(target):
        return math.inf
    strided = any(isinstance(p, Split) and p.dim > 0 for p in (source, target))
    elements = math.prod(padded_shape(array.shape, (source, target)))
    return wire_bytes(Move(0, source, target), elements, array.dtype, axis) * (_STRIDED if strided else 1)


def _permuted(placement: Placement) -> bool:
    return isinstance(placement, Split) and placement.permuted


def moves(source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[Axis, ...]) -> Iterator[Move]:
    """The conversion as single moves, in an order in which every step is a layout.

    Axes that split the same dimension nest in mesh order, so an outer axis cannot be gathered under an inner one:
    inner splits are undone first and made again last. Otherwise the last dimension in memory is scattered first and
    gathered last (what `planning/placement.py` counts on), except for blocks that end inside of a tile: the TPU's
    compiler makes an all-reduce of such a scatter, so it comes when little is left. What is to be split is split before
    anything else is reduced: an all-reduce of a shard is cheaper than one of the whole.
    """
    if exchanges := _exchanges(source, target):
        yield from exchanges
        return
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
        if not axes[k].backend.tiled:
            return False
        held = tuple(REPLICATED if j in left and j != k else p for j, p in enumerate(target))
        return any(cuts_tiles(block_shape(shape, held, axes), d, order) for d in _dims(target[k]))

    for k in _nested(made, target, order, outer_first=True, late=ragged):
        yield Move(k, current[k], target[k])
    yield from _at_once([Move(k, current[k], target[k]) for k in changing if k not in made])


def _order(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> Sequence[int]:
    return order_in_memory(shape, layout, axes) if axes and axes[0].backend.tiled else range(len(shape))


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
            if not axes[move.axis].backend.tiled or joint.over(axes).size <= _JOINT:
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
    """May axis k go from split to split in one all-to-all?

    Not if an axis further in lies on either dimension: it would have to change sides with k. Nor if another one comes
    to the dimension that k leaves, or leaves the one that k comes to. (There, axes further out are made first.)
    """
    if Move(k, current[k], target[k]).kind != "all-to-all":
        return False
    left, reached = _dims(current[k]), _dims(target[k])
    for j, (held, wanted) in enumerate(zip(current, target, strict=True)):
        if j > k and _dims(held) & (left | reached):
            return False
        if j != k and held != wanted and (_dims(wanted) & left or _dims(held) & (left | reached)):
            return False
    return True


def _exchanges(source: Layout, target: Layout) -> list[Move]:
    """Where axes only go from one dimension to another: one all-to-all for all of them that make the same move.

        split(1) x split(1) x split(2)  ->  split(0) x split(0) x split(0)      the first two at once, then the third

    None where they are in each other's way, or where a single axis changes.
    """
    current, made = list(source), list[Move]()
    left: dict[tuple[Placement, Placement], list[int]] = {}
    for k in range(len(source)):
        if source[k] != target[k]:
            left.setdefault((source[k], target[k]), []).append(k)
    if sum(map(len, left.values())) < 2:
        return []
    while left:
        moves = (Move(k, *change, tuple(inner)) for change, (k, *inner) in left.items())
        free = next((m for m in moves if m.kind == "all-to-all" and _is_free(m, current)), None)
        if free is None:
            return []
        made.append(free)
        del left[free.source, free.target]
        for k in free.axes:
            current[k] = free.target
    return made


def _is_free(move: Move, current: Sequence[Placement]) -> bool:
    """Are the axes of a move innermost on the dimension that they leave and on the one that they come to?"""
    near = [(j, p) for j, p in enumerate(current) if j not in move.axes and _dims(p) & _dims(move.source, move.target)]
    return all(j < move.axis and p == Split(max(_dims(p))) for j, p in near)


def layout_cost(source: Layout, target: Layout, array: Array, axes: tuple[Axis, ...]) -> float:
    return sum(bytes for _, bytes in priced_moves(source, target, array, axes))


def priced_moves(source: Layout, target: Layout, array: Array, axes: tuple[Axis, ...]) -> Iterator[tuple[Move, float]]:
    """Each move with the bytes it puts on the wire."""
    for move, held in sized_moves(source, target, array.shape, axes):
        yield move, wire_bytes(move, held, array.dtype, move.over(axes))


def sized_moves(
    source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[Axis, ...], wire: Wire | None = None
) -> Iterator[tuple[Move, int]]:
    """Each move with the number of elements that it moves."""
    current = list(source)
    for move in moves(source, target, shape, axes):
        for k in move.axes:
            current[k] = REPLICATED
        held = math.prod(padded_shape(block_shape(shape, tuple(current), axes), (move.source, move.target)))
        yield by_wire(move, wire), held
        for k in move.axes:
            current[k] = move.target


def by_wire(move: Move, wire: Wire | None) -> Move:
    """The move as the wire has it: sums, and gathers of what is scaled. Nothing else loses anything on the way."""
    if wire is None or not (move.op == "add" or (wire.scaled and move.kind == "all-gather")):
        return move
    return move._replace(wire=wire)
