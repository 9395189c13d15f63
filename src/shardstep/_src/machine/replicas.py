"""The mesh as shardstep uses it: Auto axes, one data axis for each ring, and those that state is split along.

The order of devices along the data axes is the user's own wherever that is a walk along the rings: then arrays on
the user's mesh are in place on ours. Where it is not (`jax.devices()` on several TPU hosts), devices change places,
`Replicas.note` says so, and arrays on the user's mesh are moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from ..core import compat
from ..core.backend import Backend
from ..core.errors import ShardstepError
from ..core.layout import Axis
from . import topology
from .links import Ring, collective_time
from .topology import Arrangement, Topology

_MESSAGE_BYTES = 2 * 1024 * 1024  # between processes on CPU, larger blocks are scattered in pieces (`ring_scatter.py`)


@dataclass(frozen=True)
class Replicas:
    """The mesh, its data axes (outermost first), and whether state may be split along each."""

    mesh: Mesh
    axes: tuple[Axis, ...]
    shared: tuple[bool, ...]
    given: tuple[str, ...]  # the user's own names of the data axes
    user_mesh: Mesh
    topology: Topology  # one ring for each axis
    why_group: str
    note: str = ""

    @property
    def count(self) -> int:
        return math.prod(a.size for a in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for a in self.axes for n in a.names)

    @property
    def known_names(self) -> tuple[str, ...]:
        """What an array's own sharding may call the data axes."""
        return tuple(dict.fromkeys(self.given + self.names))

    @property
    def user_axes(self) -> tuple[str, ...]:
        """The axes that are the user's: state keeps the sharding that it has over them."""
        return tuple(name for name in self.mesh.axis_names if name not in self.names)

    @property
    def group(self) -> int:
        """How many replicas share one copy of the state."""
        return math.prod(a.size for a, shared in zip(self.axes, self.shared, strict=True) if shared)

    @classmethod
    def of(
        cls, mesh: Mesh, axis: str | Sequence[str] | None, group: int | None, machine: str | None = None
    ) -> Replicas:
        """Read a user's mesh. `machine` names a topology to use in place of the devices' own."""
        names = _data_axes(mesh, axis)
        size = math.prod(mesh.shape[n] for n in names)
        if group is not None and group != size:
            _check_group(mesh, names, size, group)
        columns = _columns(mesh, names)
        found = _arranged(columns) if machine is None else _as_named(machine, size)
        rings = _named(found, names, mesh)
        chosen = _by_cost(rings, columns[0], mesh) if group is None else _grouped(rings, group, mesh)
        devices, axis_names = _devices(mesh, names, found, chosen.rings)
        backend = _backend(columns[0], machine)
        machine_topology = topology.of_devices(columns[0], (r.ring for r in chosen.rings))
        if machine is not None:
            named = topology.describe(machine)
            machine_topology = replace(named, rings=machine_topology.rings)
        return cls(
            Mesh(devices, axis_names),  # Auto: ordinary code on arrays of an Explicit mesh raises sharding errors
            tuple(Axis(r.names, r.ring.size, backend) for r in chosen.rings),
            chosen.shared,
            names,
            mesh,
            machine_topology,
            chosen.why,
            _MOVED if found.moved else "",
        )


def _backend(devices: Sequence[Any], machine: str | None) -> Backend:
    """That of the devices; sums are formed as on the machine that was named."""
    platform = devices[0].platform
    summed_on = platform if machine is None else topology.describe(machine).platform
    on_cpu, processes = platform == "cpu", len({d.process_index for d in devices})
    return Backend(
        widens=summed_on == "cpu",  # XLA's CPU backend sums 16-bit floats in float32: the rewritten step too
        multiplies_wide=summed_on == "cpu" and compat.CPU_MULTIPLIES_WIDE,
        tiled=platform == "tpu",
        # What ring_scatter.py says was measured with every replica in a process of its own.
        message_bytes=_MESSAGE_BYTES if on_cpu and processes == len(devices) else 0,
        outermost=on_cpu,
        merges=summed_on == "cpu" and compat.CPU_DROPS_BARRIERS,
        indexes=summed_on == "cpu",
        in_memory=on_cpu and processes == 1,
    )


_MOVED = (
    "the mesh's order of devices jumps about on the torus: shardstep uses another, so arrays placed on that mesh are"
    " moved at each call (place batches with plan.shardings, or build the mesh with jax.make_mesh)"
)


class _NamedRing(NamedTuple):
    names: tuple[str, ...]
    ring: Ring


class _Chosen(NamedTuple):
    rings: tuple[_NamedRing, ...]
    shared: tuple[bool, ...]
    why: str


def _data_axes(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(mesh.axis_names) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        if name not in mesh.axis_names:
            raise ShardstepError(f"axis={name!r} is not an axis of the mesh, which has {', '.join(mesh.axis_names)}")
    return tuple(n for n in mesh.axis_names if n in names)


def _check_group(mesh: Mesh, names: tuple[str, ...], size: int, group: int) -> None:
    of = f"{'axis' if len(names) == 1 else 'axes'} {', '.join(map(repr, names))}"
    if group < 1 or size % group:
        raise ShardstepError(f"group={group} does not divide the {size} replicas of {of}")
    if not _adjacent(mesh, names) and not _border(names, group, mesh):
        raise ShardstepError(
            f"group={group} would cut one of {of}, which are not adjacent in the mesh. Give the size of the"
            f" inner ones ({mesh.shape[names[-1]]}, say), or a mesh in which they are adjacent."
        )


# -- rings of the mesh --------------------------------------------------------------------------------------------


def _columns(mesh: Mesh, names: tuple[str, ...]) -> list[list[Any]]:
    """The devices along the data axes, once for each position on the other axes."""
    data = [mesh.axis_names.index(n) for n in names]
    others = [i for i in range(mesh.devices.ndim) if i not in data]
    size = math.prod(mesh.shape[n] for n in names)
    return [list(column) for column in mesh.devices.transpose(*others, *data).reshape(-1, size)]


def _arranged(columns: list[list[Any]]) -> Arrangement:
    found = {topology.arrange(column) for column in columns}
    return found.pop() if len(found) == 1 else topology.flat(columns[0])  # the other axes cut across the rings


def _as_named(machine: str, size: int) -> Arrangement:
    named = topology.describe(machine)
    if named.replicas != size:
        raise ShardstepError(f"topology={machine!r} has {named.replicas} replicas, but the mesh has {size}")
    dims = ("z", "y", "x")[-len(named.rings) :] if len(named.rings) > 1 else ("",)
    return Arrangement(tuple(range(size)), named.rings, dims)


def _named(found: Arrangement, names: tuple[str, ...], mesh: Mesh) -> tuple[_NamedRing, ...]:
    """Under the user's names where those axes are the rings (or there is one ring); else under names of our own."""
    if len(found.rings) == 1 or not _adjacent(mesh, names):
        return (_NamedRing(names, _joined(found.rings)),)
    if not found.moved and [r.size for r in found.rings] == [mesh.shape[n] for n in names]:
        return tuple(_NamedRing((n,), r) for n, r in zip(names, found.rings, strict=True))
    base = "_".join(names)
    return tuple(_NamedRing((f"{base}_{d}",), r) for d, r in zip(found.names, found.rings, strict=True))


def _joined(rings: Sequence[Ring]) -> Ring:
    return replace(rings[-1], size=math.prod(r.size for r in rings), closed=len(rings) == 1 and rings[0].closed)


def _adjacent(mesh: Mesh, names: tuple[str, ...]) -> bool:
    first = mesh.axis_names.index(names[0])
    return tuple(mesh.axis_names[first : first + len(names)]) == names


def _devices(
    mesh: Mesh, names: tuple[str, ...], found: Arrangement, rings: tuple[_NamedRing, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The devices with the data axes cut into rings, in their place among the other axes."""
    if [n for r in rings for n in r.names] == list(names):
        return mesh.devices, tuple(mesh.axis_names)
    where, shape = mesh.axis_names.index(names[0]), mesh.devices.shape
    before, after = shape[:where], shape[where + len(names) :]
    flat = mesh.devices.reshape(*before, -1, *after).take(found.order, axis=where)
    devices = flat.reshape(*before, *(r.ring.size for r in rings), *after)
    ours = tuple(n for r in rings for n in r.names)
    return devices, (*mesh.axis_names[:where], *ours, *mesh.axis_names[where + len(names) :])


# -- groups -------------------------------------------------------------------------------------------------------


def _grouped(rings: tuple[_NamedRing, ...], group: int, mesh: Mesh) -> _Chosen:
    """State is shared by the innermost rings that hold `group` replicas; a ring may be cut in two for that."""
    if math.prod(r.ring.size for r in rings) == group:
        return _Chosen(rings, (True,) * len(rings), "as asked: all replicas")
    left = group
    inner: list[_NamedRing] = []
    for k in reversed(range(len(rings))):
        ring = rings[k]
        if left % ring.ring.size == 0 and left > 1:
            inner.insert(0, ring)
            left //= ring.ring.size
        elif ring.ring.size % left == 0:
            between, within = _cut(ring, left, mesh)
            return _Chosen(
                (*rings[:k], between, within, *inner),
                (False,) * (k + 1) + (True,) * (1 + len(inner)),
                f"as asked: groups of {group}",
            )
        else:
            break
    whole = _NamedRing((rings[0].names[0],), _joined([r.ring for r in rings]))  # the group fits no ring: forget them
    return _grouped((whole,), group, mesh)


def _border(names: tuple[str, ...], group: int, mesh: Mesh | None) -> int:
    """How many of the user's axes, outermost first, are between groups, if the groups end where axes do; else 0."""
    if mesh is None or not set(names) <= set(mesh.axis_names):
        return 0
    inside = (math.prod(mesh.shape[n] for n in names[k:]) for k in range(1, len(names)))
    return next((k for k, size in enumerate(inside, 1) if size == group), 0)


def _cut(ring: _NamedRing, group: int, mesh: Mesh | None) -> tuple[_NamedRing, _NamedRing]:
    """The replicas of one ring as groups: hosts stay whole where the group allows it."""
    whole = ring.ring
    per_host = max(whole.size // whole.hosts, 1)
    outer = replace(whole, size=whole.size // group, closed=False, hosts=min(whole.hosts, whole.size // group))
    inner = replace(whole, size=group, closed=False, hosts=max(group // per_host, 1))
    if k := _border(ring.names, group, mesh):
        return _NamedRing(ring.names[:k], outer), _NamedRing(ring.names[k:], inner)
    name = "_".join(ring.names)
    return _NamedRing((f"{name}_groups",), outer), _NamedRing((f"{name}_group",), inner)


_MESSAGE = 25e6  # bytes: the size into which data-parallel frameworks cut gradients (PyTorch DDP's bucket_cap_mb)
_TOLERANCE = 1.1


class Group(NamedTuple):
    """Which rings share the state, and why."""

    rings: tuple[Ring, ...]
    shared: tuple[bool, ...]
    why: str


def choose_group(found: Arrangement, devices: Sequence[Any]) -> Group:
    """The rings that share one copy of the state when the user does not say."""
    rings = tuple(_NamedRing((name,), r) for name, r in zip(found.names, found.rings, strict=True))
    chosen = _by_cost(rings, devices, None)
    return Group(tuple(r.ring for r in chosen.rings), chosen.shared, chosen.why)


def _by_cost(rings: tuple[_NamedRing, ...], devices: Sequence[Any], mesh: Mesh | None) -> _Chosen:
    """State is shared by as many replicas as possible: memory first. Only where slow links between hosts make that
    more than a tenth slower than sharing within a host does the group stay inside.
    """
    everyone = math.prod(r.ring.size for r in rings)
    candidates = [_Chosen(rings, (True,) * len(rings), "")]
    if rings[0].ring.hosts > 1:
        candidates += _inside_hosts(rings, devices, mesh)
    if len(candidates) == 1:
        return candidates[0]._replace(why=f"all {everyone} replicas: fast links between all of them")
    times = [_time(c) for c in candidates]
    k = next(i for i, t in enumerate(times) if t <= _TOLERANCE * min(times))
    listed = ", ".join(f"{t * 1e3:.2f} ms {_shape(c)}" for c, t in zip(candidates, times, strict=True))
    return candidates[k]._replace(why=f"predicted for 25 MB of gradients: {listed}")


def _inside_hosts(rings: tuple[_NamedRing, ...], devices: Sequence[Any], mesh: Mesh | None) -> list[_Chosen]:
    if len(rings) > 1:  # slices of a TPU: the outermost ring is the network
        return [_Chosen(rings, (False,) + (True,) * (len(rings) - 1), "")]
    hosts = rings[0].ring.hosts
    if len(devices) % hosts or not topology.host_by_host(devices):
        return []
    between, within = _cut(rings[0], len(devices) // hosts, mesh)
    return [_Chosen((between, within), (True, True), ""), _Chosen((between, within), (False, True), "")]


def _time(chosen: _Chosen) -> float:
    """Scatter along the inner rings first, so that the network carries least; sum what is left; gather back."""
    held, total = _MESSAGE, 0.0
    for ring, shared in reversed(list(zip(chosen.rings, chosen.shared, strict=True))):
        if shared:
            total += collective_time("reduce-scatter", held, ring.ring) + collective_time("all-gather", held, ring.ring)
            held /= ring.ring.size
        else:
            total += collective_time("all-reduce", held, ring.ring)
    return total


def _shape(chosen: _Chosen) -> str:
    sizes = " x ".join(str(r.ring.size) for r, shared in zip(chosen.rings, chosen.shared, strict=True) if shared)
    return f"shared by {sizes}"
