"""From devices to rings: which replicas are neighbours, and how fast they talk.

A user's mesh says which devices take part. Their coordinates say more: on a TPU torus each data axis should be one
physical ring, because the compiler turns a scatter along a ring into a true reduce-scatter and a scatter over the
whole torus at once into an all-reduce followed by a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import ShardstepError
from .links import CHIPS, Chip, Ring, chip_of, collective_time


@dataclass(frozen=True)
class Topology:
    """The replicas as a machine: one ring for each data axis, outermost first."""

    platform: str
    chip: Chip
    rings: tuple[Ring, ...]

    @property
    def replicas(self) -> int:
        return math.prod(r.size for r in self.rings)

    @property
    def hosts(self) -> int:
        return math.prod(r.hosts for r in self.rings)

    @property
    def tiled(self) -> bool:
        """Does memory come in tiles of 8 x 128 words, so that a block that cuts one is padded and moved about?"""
        return self.platform == "tpu"

    def time(self, kind: str, nbytes: float, axis: int | None = None) -> float:
        """Seconds for a collective along one data axis, or over all replicas at once."""
        return collective_time(kind, nbytes, *(self.rings if axis is None else self.rings[axis : axis + 1]))

    def update_time(self, nbytes: float) -> float:
        """Seconds to read or write this number of bytes: an update is bound by memory."""
        return nbytes / self.chip.memory

    @property
    def message_bytes(self) -> float:
        """The bytes that travel in the time a message needs to start: below this, a collective is all latency."""
        ring = max(self.rings, key=lambda r: r.start + r.delay)
        return (ring.start + ring.delay) * ring.rate

    @property
    def break_even_bytes(self) -> float:
        """The smallest leaf for which sharding the update saves more time than an extra message takes.

        An optimizer passes over a weight about four times (read it, its gradient and a moment or two; write them).
        """
        message = sum(r.start + r.delay for r in self.rings)
        return message * self.chip.memory / 4

    def __str__(self) -> str:
        shape = " x ".join(str(r.size) for r in self.rings)
        joined = ", ".join(dict.fromkeys(_joined(r) for r in self.rings if r.size > 1)) or "alone"
        return f"{self.chip.name}, {shape} ({joined})"


def _joined(ring: Ring) -> str:
    link = f"{ring.link.name} {ring.link.bandwidth / 1e9:g} GB/s"
    if ring.hosts > 1 and ring.network is not None:
        return f"{link}, {ring.hosts} hosts by {ring.network.name} {ring.network.bandwidth / 1e9:g} GB/s"
    return link


# -- without devices ----------------------------------------------------------------------------------------------


def describe(name: str) -> Topology:
    """A topology by name: `"v5e:16x16"`, `"v5p:4x4x4"` (chips), `"h200:8x8"` (hosts x GPUs), `"cpu:8"`."""
    version, _, shape = name.partition(":")
    try:
        chip, sizes = CHIPS[version], [int(n) for n in shape.split("x")]
    except (KeyError, ValueError):
        raise ShardstepError(
            f"topology {name!r}: write KIND:SHAPE, for example 'v5e:4x4', 'h200:2x8' or 'cpu:8'; the kinds are"
            f" {', '.join(CHIPS)}"
        ) from None
    if chip.link.torus:
        rings = [Ring(n, chip.link, _closed(chip, n)) for n in sizes]
        cores = 2 if version in ("v2", "v3", "tpu7x") else 1
        rings[0] = replace(rings[0], size=rings[0].size * cores)
        return Topology("tpu", chip, tuple(reversed(rings)))  # x varies fastest, so it is the innermost
    platform = "cpu" if version == "cpu" else "gpu"
    hosts = sizes[0] if len(sizes) > 1 else 1
    return Topology(platform, chip, (Ring(math.prod(sizes), chip.link, hosts=hosts, network=chip.network),))


def _closed(chip: Chip, length: int) -> bool:
    return chip.wraps > 0 and length % chip.wraps == 0


# -- with devices -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """The devices of the data axes as nested rings, outermost first."""

    order: tuple[int, ...]  # positions in the user's order; 0, 1, 2, ... where that is a walk along the rings already
    rings: tuple[Ring, ...]
    names: tuple[str, ...]  # "z", "y", "x": what the ring is on the machine; "" where nothing is known

    @property
    def moved(self) -> bool:
        """Must devices change places for the rings to nest?"""
        return self.order != tuple(range(len(self.order)))


def arrange(devices: Sequence[Any]) -> Arrangement:
    """Find the rings among devices that a user gave in some order."""
    first = devices[0]
    chip = chip_of(first.platform, first.device_kind)
    if not chip.link.torus or len(devices) == 1 or getattr(first, "coords", None) is None:
        return flat(devices)
    cells = [_cell(d) for d in devices]
    varying = [k for k in range(len(_DIMENSIONS)) if len({c[k] for c in cells}) > 1]
    if not _is_grid([[c[k] for k in varying] for c in cells]):
        return flat(devices)
    dims = next((d for d in _nestings(varying) if _walks(cells, d)), None)
    if dims is None:  # the devices form a grid, but the user's order jumps about in it
        dims = tuple(varying)
    order = sorted(range(len(cells)), key=lambda i: [cells[i][k] for k in dims])
    rings: list[Ring] = []
    names: list[str] = []
    for k in dims:
        length = len({c[k] for c in cells})
        if _DIMENSIONS[k] == "core" and rings and names[-1] != "slice":
            rings[-1] = replace(rings[-1], size=rings[-1].size * length)  # a chip's cores sit in the ring of its axis
        elif _DIMENSIONS[k] == "slice":
            rings.append(Ring(length, chip.link, hosts=length, network=chip.network))
            names.append("slice")
        else:
            rings.append(Ring(length, chip.link, _closed(chip, length)))
            names.append(_DIMENSIONS[k])
    return Arrangement(tuple(order), tuple(rings), tuple(names))


def of_devices(devices: Sequence[Any], rings: Iterable[Ring]) -> Topology:
    first = devices[0]
    platform = first.platform if first.platform in ("cpu", "tpu") else "gpu"
    return Topology(platform, chip_of(first.platform, first.device_kind), tuple(rings))


_DIMENSIONS = ("slice", "z", "y", "x", "core")


def _cell(device: Any) -> tuple[int, ...]:
    x, y, z = (*device.coords, 0, 0)[:3]
    return (getattr(device, "slice_index", 0) or 0, z, y, x, getattr(device, "core_on_chip", 0) or 0)


def _is_grid(cells: list[list[int]]) -> bool:
    """Is every cell of the smallest box taken, once?"""
    spans = [max(column) - min(column) + 1 for column in zip(*cells, strict=True)]
    return math.prod(spans) == len(cells) == len({tuple(c) for c in cells})


def _nestings(varying: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The orders in which a walk may nest the dimensions: slices outermost, cores right inside of a torus axis."""
    slices, core = _DIMENSIONS.index("slice"), _DIMENSIONS.index("core")
    for dims in itertools.permutations(varying):
        if slices in dims and dims[0] != slices:
            continue
        if core in dims and len(dims) > 1 and dims.index(core) == 0:
            continue
        yield dims


def _walks(cells: list[tuple[int, ...]], dims: Sequence[int]) -> bool:
    keys = [[c[k] for k in dims] for c in cells]
    return keys == sorted(keys)


def flat(devices: Sequence[Any]) -> Arrangement:
    """One axis over all of them, as the user ordered them."""
    chip = chip_of(devices[0].platform, devices[0].device_kind)
    ring = Ring(len(devices), chip.link, hosts=len(set(map(_host, devices))), network=chip.network)
    return Arrangement(tuple(range(len(devices))), (ring,), ("",))


def host_by_host(devices: Sequence[Any]) -> bool:
    """Do the devices come one host after the other, the same number of each?"""
    hosts = [_host(d) for d in devices]
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    return len(runs) == len(set(hosts)) and len(set(runs)) == 1


def _host(device: Any) -> int:
    """The devices that share fast links: what the runtime calls a slice, else a process."""
    domain = getattr(device, "slice_index", None)
    return device.process_index if domain is None else domain
