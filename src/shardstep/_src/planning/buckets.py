"""Small tensors travel together.

A collective costs a fixed time however little it moves, so transfers that make the same moves are bundled: at most
`bucket_bytes` in one collective, one dtype on the wire. Larger tensors travel alone: packing them would copy them, and
the compiler can overlap them with the backward pass one by one.

`fuse` is a pass over a finished schedule, so the plan says what is run. A transfer may be made at any place between
where its value is made and where it is first read. A bundle stands where the first of its members is read; members are
taken in the order in which they become ready, so that early gradients leave early.

    all-reduce        ravel, concatenate, reduce, cut; on TPU side by side (see `_all_reduce`)
    reduce-scatter    (n, -1): row r is what replica r will keep; concatenate the rows, scatter, cut
    all-gather        ravel, concatenate, gather to (n, -1), cut the columns
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.layout import REPLICATED, Axis, Layout, Partial, Replicated, Split
from ..core.moves import (
    Move,
    convert,
    from_blocks,
    gather_blocks,
    in_blocks,
    moves,
    padded,
    perform,
    reduce,
    unpadded,
    wire_dtype,
)
from ..core.program import Var
from ..core.schedule import Bundle, Schedule, Transfer
from .message_depth import by_depth

# CPU: measured with benchmarks/buckets.py; tensors of 64 KiB gain 1.4x by packing, tensors of 256 KiB lose.
# GPU: reckoned, not measured: a collective starts in about 20 us, in which 4 MiB are copied there and back at 2 TB/s.
# TPU: reckoned likewise, from a few us for each collective.
BUCKET_BYTES = {"cpu": 256 * 1024, "gpu": 4 * 1024 * 1024, "tpu": 1024 * 1024}


def bucket_bytes(asked: int | None, platform: str) -> int:
    return BUCKET_BYTES[platform] if asked is None else asked


# -- the plan's half: which transfers share their collectives -----------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A small transfer that may be made at any place from `ready` to `needed`."""

    transfer: Transfer
    ready: int
    needed: int

    @property
    def nbytes(self) -> int:
        return self.transfer.array.nbytes


def fuse(schedule: Schedule, limit: int) -> Schedule:
    """The same schedule with transfers of at most `limit` bytes bundled, in bodies too."""
    if not limit:
        return schedule

    def small(t: Transfer) -> bool:
        return t.array.nbytes <= limit and _kind(t, schedule.axes) is not None

    as_it_is, could_be_fewer = _bundled(schedule, limit)
    if not could_be_fewer:
        return as_it_is
    return min(as_it_is, _bundled(by_depth(schedule, small), limit)[0], key=_bundles)


def _bundles(schedule: Schedule) -> int:
    return sum(map(len, schedule.transfers))


def _bundled(schedule: Schedule, limit: int) -> tuple[Schedule, bool]:
    """The schedule in its own order, bundled; and whether fewer buckets would hold as much, were they filled better."""
    steps = tuple(
        step._replace(bodies=tuple(fuse(body, limit) for body in step.bodies)) if step.bodies else step
        for step in schedule.steps
    )
    waiting: dict[Any, list[_Waiting]] = {}
    placed: list[list[Bundle]] = []
    ready = _made(schedule)
    for place, bundles in enumerate(schedule.transfers):
        placed.append([])
        for bundle in bundles:
            for t in bundle:
                since = ready.get((t.var, t.source), 0)
                if since <= place and t.array.nbytes <= limit and (kind := _kind(t, schedule.axes)):
                    waiting.setdefault(kind, []).append(_Waiting(t, since, place))
                else:
                    placed[place].append((t,))
                ready[t.var, t.target] = place + 1
    shared: list[list[Bundle]] = [[] for _ in placed]
    could_be_fewer = False
    for alike in waiting.values():
        buckets = list(_buckets(alike, limit))
        could_be_fewer |= (len(buckets) - 1) * limit >= sum(w.nbytes for w in alike)
        for members in buckets:
            shared[min(w.needed for w in members)].append(tuple(w.transfer for w in members))
    transfers = tuple((*first, *then) for first, then in zip(shared, placed, strict=True))
    return replace(schedule, steps=steps, transfers=transfers), could_be_fewer


def _made(schedule: Schedule) -> dict[tuple[Var, Layout], int]:
    """The first place where a value is there in its first layout; what is not listed enters the program."""
    return {
        (var, layout): place + 1
        for place, step in enumerate(schedule.steps)
        for var, layout in zip(step.equation.outputs, step.results, strict=True)
    }


def _kind(transfer: Transfer, axes: tuple[Axis, ...]) -> Any:
    """Equal for transfers that can share their collectives; None for one that travels alone, or not at all."""
    dtype = transfer.array.dtype
    steps = list(moves(transfer.source, transfer.target, transfer.array.shape, axes))
    if not transfer.array.size or not all(map(_packs, steps)) or all(m.kind == "local" for m in steps):
        return None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    whole = tuple(isinstance(p, Replicated) for p in transfer.source + transfer.target)
    return whole, tuple((m.kind, m.axes, _op(m), str(wire_dtype(m, dtype, m.over(axes)))) for m in steps)


def _packs(move: Move) -> bool:
    plain = all(p.outer == 1 and not p.dealt for p in (move.source, move.target) if isinstance(p, Split))
    return plain and move.kind in ("local", "all-reduce", "reduce-scatter", "all-gather")


def _op(move: Move) -> str:
    return move.source.op if isinstance(move.source, Partial) else ""


def _buckets(alike: Sequence[_Waiting], limit: int) -> Iterator[list[_Waiting]]:
    """Cover all intervals [ready, needed] with few points, then fill buckets with those that share a point."""
    by_ready = sorted(alike, key=lambda w: (w.ready, w.needed))
    start, point = 0, -1
    for w in sorted(alike, key=lambda w: w.needed):
        if w.ready > point:  # it does not share the last point, nor does anything that is ready later
            point = w.needed
            end = bisect.bisect_right(by_ready, point, start, key=lambda w: w.ready)
            yield from _filled(by_ready[start:end], limit)
            start = end


def _filled(waiting: Sequence[_Waiting], limit: int) -> Iterator[list[_Waiting]]:
    """One bucket after the other, each as full as it gets."""
    bucket: list[_Waiting] = []
    held = 0
    for w in waiting:
        if bucket and held + w.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(w)
        held += w.nbytes
    yield bucket


# -- the replica's half: making the transfers of a bundle ---------------------------------------------------------


def transfer(arrays: Sequence[jax.Array], bundle: Bundle, axes: tuple[Axis, ...]) -> list[jax.Array]:
    """The blocks of the bundle's values in their new layouts (inside `shard_map`)."""
    xs = [x if t.dtype is None else x.astype(t.dtype) for x, t in zip(arrays, bundle, strict=True)]
    if len(bundle) == 1:
        (t,) = bundle
        xs = [convert(xs[0], t.var.array.shape, t.source, t.target, axes)]
    else:
        for stage in zip(*(moves(t.source, t.target, t.array.shape, axes) for t in bundle), strict=True):
            xs = _move_together(xs, [t.var.array.shape for t in bundle], stage, stage[0].over(axes))
    return [x.astype(t.var.array.dtype) if t.dtype is not None else x for x, t in zip(xs, bundle, strict=True)]


def _move_together(
    xs: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]], stage: Sequence[Move], axis: Axis
) -> list[jax.Array]:
    sent = [padded(x, m.target).astype(wire_dtype(m, x.dtype, axis)) for x, m in zip(xs, stage, strict=True)]
    moved = _MOVES[stage[0].kind](sent, stage, axis)
    arrived = [y.astype(x.dtype) for y, x in zip(moved, xs, strict=True)]
    return [unpadded(y, shape, m.source) for y, shape, m in zip(arrived, shapes, stage, strict=True)]


def _local(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    return [perform(x, m, axis) for x, m in zip(xs, stage, strict=True)]


def _all_reduce(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    """On TPU the compiler sends all-reduces that stand side by side in one message, and packs nothing.

    (There any operation takes about 2,100 cycles however little it does, packing too. ResNet-50 has two small sums for
    each of its 53 normalisations, forward and backward. Thousand cycles, packed and side by side: 4,435 and 3,755 on
    v6e:4x4, 7,026 and 6,792 on v5e:4x4, 14,154 and 14,165 on v3:4x4.)
    """
    if axis.tiled:
        reduced = [reduce(x, _op(stage[0]), axis) for x in xs]
    else:
        whole = reduce(jnp.concatenate([x.ravel() for x in xs]), _op(stage[0]), axis)
        cut = _cut(whole, [x.size for x in xs])
        reduced = [y.reshape(x.shape) for y, x in zip(cut, xs, strict=True)]
    return [
        y if m.target == REPLICATED else perform(y, Move(m.axis, REPLICATED, m.target), axis)
        for y, m in zip(reduced, stage, strict=True)
    ]


def _reduce_scatter(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    rows = jnp.concatenate([_rows(x, m.target, axis.size) for x, m in zip(xs, stage, strict=True)], axis=1)
    mine = lax.psum_scatter(rows, axis.name, scatter_dimension=0, tiled=True)[0]
    cut = _cut(mine, [x.size // axis.size for x in xs])
    return [y.reshape(_block(x.shape, m.target, axis.size)) for y, x, m in zip(cut, xs, stage, strict=True)]


def _all_gather(xs: Sequence[jax.Array], stage: Sequence[Move], axis: Axis) -> list[jax.Array]:
    mine = jnp.concatenate([x.ravel() for x in xs])
    rows = gather_blocks(mine, axis, 0, tiled=False)
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
