"""Rings from coordinates, and what a collective along them takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from shardstep.errors import ShardstepError
from shardstep.topology import arrange, collective_time, describe


@dataclass(frozen=True)
class Device:
    """As much of a jax.Device as the topology reads."""

    id: int
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(*shape: int, cores: int = 1, kind: str = "TPU v5 lite") -> list[Device]:
    """In the order of their ids: x runs fastest, a chip's cores side by side."""
    x, y, z = (*shape, 1, 1)[:3]
    cells = itertools.product(range(z), range(y), range(x), range(cores))
    return [Device(i, (x, y, z), core, device_kind=kind) for i, (z, y, x, core) in enumerate(cells)]


# -- reading devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "sizes", "names"),
    [
        (chips(4, 4), (4, 4), ("y", "x")),
        (chips(2, 4), (4, 2), ("y", "x")),
        (chips(8, 1), (8,), ("x",)),
        (chips(4, 4, 2, kind="TPU v5"), (2, 4, 4), ("z", "y", "x")),
        (chips(4, 4, cores=2, kind="TPU v3"), (4, 8), ("y", "x")),  # a chip's cores are neighbours in the first ring
        (chips(1, 1, cores=2, kind="TPU v3"), (2,), ("core",)),
    ],
)
def test_rings_follow_the_torus(devices, sizes, names):
    found = arrange(devices)
    assert tuple(r.size for r in found.rings) == sizes and found.names == names
    assert not found.moved


def test_any_walk_along_the_rings_is_kept():
    """What `jax.make_mesh` gives, x slowest: the same devices in the same order, other rings."""
    devices = sorted(chips(4, 2), key=lambda d: d.coords)
    found = arrange(devices)
    assert tuple(r.size for r in found.rings) == (4, 2) and found.names == ("x", "y") and not found.moved


def test_an_order_that_jumps_is_straightened():
    """Host by host, as `jax.devices()` lists a v5e slice: 2 x 2 blocks."""
    devices = sorted(chips(4, 4), key=lambda d: (d.coords[1] // 2, d.coords[0] // 2, d.coords[1], d.coords[0]))
    found = arrange(devices)
    assert found.moved and tuple(r.size for r in found.rings) == (4, 4)
    assert [devices[i].id for i in found.order] == list(range(16))


@pytest.mark.parametrize(
    "devices",
    [
        chips(4, 4)[:-1],  # a hole
        [*chips(2, 2), *chips(2, 2)],  # twice the same
        [d for d in chips(4, 4) if d.coords[0] != 1],  # 3 x 4, but not neighbours
    ],
)
def test_what_is_no_grid_stays_one_axis(devices):
    found = arrange(devices)
    assert [r.size for r in found.rings] == [len(devices)] and not found.moved


def test_hosts_of_gpus_are_counted():
    devices = [Device(i, None, 0, i // 4, "gpu", "NVIDIA H100 80GB HBM3") for i in range(8)]
    (ring,) = arrange(devices).rings
    assert (ring.size, ring.hosts, ring.link.name, ring.network.name) == (8, 2, "NVLink", "InfiniBand")


# -- the cost model -----------------------------------------------------------------------------------------------


def test_names():
    assert [r.size for r in describe("v3:4x4").rings] == [4, 8]  # as the devices themselves would say
    assert [r.size for r in describe("v5p:4x4x8").rings] == [8, 4, 4]
    assert (describe("h200:8x8").replicas, describe("h200:8x8").hosts) == (64, 8)
    assert describe("cpu:8").replicas == 8


@pytest.mark.parametrize("name", ["v9:4x4", "v5e", "v5e:4y4", "h200:"])
def test_names_that_mean_nothing(name):
    with pytest.raises(ShardstepError, match="write KIND:SHAPE"):
        describe(name)


@pytest.mark.parametrize("name", ["v3:4x4", "v5e:4x4", "v5e:16x16", "v5p:4x4x4", "h200:8", "h200:8x8", "cpu:8"])
def test_an_all_reduce_is_a_scatter_and_a_gather(name):
    topology, size = describe(name), 1e9
    both = topology.time("reduce-scatter", size) + topology.time("all-gather", size)
    assert topology.time("all-reduce", size) == pytest.approx(both, rel=1e-2)  # one start more
    assert topology.time("all-reduce", 2 * size) > topology.time("all-reduce", size) > 0


def test_a_ring_by_hand():
    """16 chips of v5e in a closed ring: both ways at 50 GB/s, eight hops of a microsecond, one to start."""
    (ring,) = describe("v5e:16").rings
    assert collective_time("all-gather", 16e6, ring) == pytest.approx(1e-6 + 15e6 / 100e9 + 8e-6)


def test_between_hosts_the_network_rules():
    one, several = describe("h200:8"), describe("h200:8x8")
    assert several.time("all-gather", 1e9) > one.time("all-gather", 1e9)
    (ring,) = several.rings
    assert ring.rate == pytest.approx(8 * 50e9)  # eight ports of 50 GB/s for eight GPUs


def test_one_replica_sends_nothing():
    assert describe("cpu:1").time("all-reduce", 1e9) == 0
