"""Small tensors travel together.

A collective costs a fixed time however little it moves, so transfers that make the same moves are bundled: at most
`bucket_bytes` in one collective, one dtype on the wire. A tensor travels alone if copying it into a bucket and out
again takes longer than starting a message of its own; so do large ones, which the compiler can overlap with the
backward pass.

`fuse` is a pass over a finished schedule, so the plan says what is run. A transfer may be made at any place between
where its value is made and where it is first read. A bundle stands where the first of its members is read; members are
taken in the order in which they become ready, so that early gradients leave early. `runtime/packing.py`
packs them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..core.layout import Array, Axis, Layout, Replicated, Split, block_shape
from ..core.moves import Move, wire_dtype
from ..core.program import Var
from ..core.schedule import Bundle, Schedule, Transfer
from ..machine.links import sent_time
from ..machine.topology import Topology
from .message_depth import by_depth

# The largest buckets, unless asked otherwise: beyond that a message is long enough to be overlapped by itself.
# CPU: measured with benchmarks/buckets.py; tensors of 64 KiB gain 1.4x by packing, tensors of 256 KiB lose.
# GPU, TPU: not measured.
BUCKET_BYTES = {"cpu": 256 * 1024, "gpu": 4 * 1024 * 1024, "tpu": 1024 * 1024}


@dataclass(frozen=True)
class Limits:
    """Which tensors travel together."""

    bytes: int  # in one bucket, and so of one tensor; 0: each travels alone
    machine: Topology | None = None  # where copies and messages are compared; None: whatever fits is packed

    @classmethod
    def of(cls, asked: int | None, machine: Topology) -> Limits:
        """What was asked for is done."""
        return cls(BUCKET_BYTES[machine.platform], machine) if asked is None else cls(asked)

    def pays(self, transfer: Transfer, moves: Sequence[Move], axes: tuple[Axis, ...]) -> bool:
        """Is it copied, as it is sent and as it arrives, in less time than a message of its own takes to start?"""
        if self.machine is None:
            return True
        array, rings = transfer.array, self.machine.rings
        blocks = (Array(block_shape(array.shape, f, axes), array.dtype) for f in (transfer.source, transfer.target))
        copying = 2 * sum(block.nbytes for block in blocks) / self.machine.chip.memory
        return copying < sum(sent_time(m.kind, 0.0, *(rings[k] for k in m.axes)) for m in moves)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A small transfer that may be made at any place from `ready` to `needed`."""

    transfer: Transfer
    ready: int
    needed: int

    @property
    def nbytes(self) -> int:
        return self.transfer.array.nbytes


def fuse(schedule: Schedule, limits: Limits, in_order: bool = False) -> Schedule:
    """The same schedule with small transfers bundled, in bodies too. `in_order`: its own order is
    kept, even if another one would fill buckets better.
    """
    if not limits.bytes:
        return schedule

    def small(t: Transfer) -> bool:
        return t.array.nbytes <= limits.bytes and _kind(t, schedule.axes, limits) is not None

    as_it_is, could_be_fewer = _bundled(schedule, limits)
    if in_order or not could_be_fewer:
        return as_it_is
    return min(as_it_is, _bundled(by_depth(schedule, small), limits)[0], key=_bundles)


def _bundles(schedule: Schedule) -> int:
    return sum(map(len, schedule.transfers))


def _bundled(schedule: Schedule, limits: Limits) -> tuple[Schedule, bool]:
    """The schedule in its own order, bundled; and whether fewer buckets would hold as much, were they filled better."""
    steps = tuple(
        step._replace(bodies=tuple(fuse(body, limits) for body in step.bodies)) if step.bodies else step
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
                if since <= place and t.array.nbytes <= limits.bytes and (kind := _kind(t, schedule.axes, limits)):
                    waiting.setdefault(kind, []).append(_Waiting(t, since, place))
                else:
                    placed[place].append((t,))
                ready[t.var, t.target] = place + 1
    shared: list[list[Bundle]] = [[] for _ in placed]
    could_be_fewer = False
    for alike in waiting.values():
        buckets = list(_buckets(alike, limits.bytes))
        could_be_fewer |= (len(buckets) - 1) * limits.bytes >= sum(w.nbytes for w in alike)
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


def _kind(transfer: Transfer, axes: tuple[Axis, ...], limits: Limits) -> Any:
    """Equal for transfers that can share their collectives; None for one that travels alone, or not at all."""
    dtype = transfer.array.dtype
    steps = list(transfer.moves(axes))
    if not transfer.array.size or not all(map(_packs, steps)) or all(m.kind == "local" for m in steps):
        return None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or not limits.pays(transfer, steps, axes):
        return None
    whole = tuple(isinstance(p, Replicated) for p in transfer.source + transfer.target)
    return whole, tuple((m.kind, m.axes, m.op, str(m.wire or wire_dtype(m, dtype, m.over(axes)))) for m in steps)


def _packs(move: Move) -> bool:
    plain = all(p.outer == 1 and not p.permuted for p in (move.source, move.target) if isinstance(p, Split))
    return plain and move.kind in ("local", "all-reduce", "reduce-scatter", "all-gather")


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
