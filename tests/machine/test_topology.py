"""Rings from coordinates, and what a collective along them takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from steps import OPTIMIZER, assert_same

import shardstep
from shardstep._src.core.backend import Backend
from shardstep._src.core.errors import ShardstepError
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Axis, Split, fits
from shardstep._src.core.moves import moves
from shardstep._src.core.tiles import major_to_minor, order_in_memory
from shardstep._src.machine.replicas import choose_group
from shardstep._src.machine.topology import Arrangement, arrange, collective_time, describe
from shardstep._src.planning.placement import split_layout
from shardstep._src.tools.hlo import collectives


@dataclass(frozen=True)
class Device:
    """As much of a jax.Device as the topology reads."""

    id: int
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int | None = None
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
    devices = [Device(i, None, 0, i // 4, platform="gpu", device_kind="NVIDIA H100 80GB HBM3") for i in range(8)]
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


# -- where leaves are cut -----------------------------------------------------------------------------------------


TORUS = (Axis(("y",), 4), Axis(("x",), 4))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2048, 8192), (1, 1)),  # blocks of 2048 x 512: whole tiles
        ((2048, 2048), (0, 1)),  # blocks of 512 x 512, not 2048 x 128
        ((4096, 512), (0, 0)),
        ((2048, 1000), (0, 0)),
        ((3, 3, 512, 512), (2, 2)),
        ((1024, 16, 64), (1, 0)),  # lies as 16 x 64 x 1024: blocks of 4 x 64 x 256
        ((3, 3, 64, 64), (None, 2)),  # a further cut would only fill up tiles: along y it rests replicated
        ((4096,), (0, 0)),
        ((512,), (None, 0)),
        ((50257, 1024), (1, 1)),  # tiles half empty, but a plain array at rest
        ((50257, 512), ("padded 0", 1)),  # a quarter of the memory for a thousandth of padding
        ((3, 5), (None, None)),
    ],
)
def test_tiles_stay_whole(shape, expected):
    found = split_layout(Array(shape, jnp.dtype("float32")), TORUS, (True, True), tiled=True)
    placed = found or (REPLICATED, REPLICATED)
    dims = [(f"padded {p.dim}" if p.extent else p.dim) if isinstance(p, Split) else None for p in placed]
    assert tuple(dims) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 64, 1024), (0, 1, 2)),
        ((1024, 16, 64), (1, 2, 0)),  # row after row, half of each tile would be empty
        ((64, 16, 64), (0, 1, 2)),  # nothing fills tiles better
        ((4096, 64), (1, 0)),
        ((300, 2), (1, 0)),
        ((1, 1, 256, 64), (0, 1, 3, 2)),
        ((4096,), (0,)),
        ((), ()),
    ],
)
def test_dimensions_lie_so_that_tiles_are_full(shape, expected):
    assert major_to_minor(shape) == expected


def test_with_many_replicas_rows_are_better_than_cut_tiles():
    """Over 16 x 16 replicas a head is left, and 64 of its columns (or 4 of its rows): no whole tile."""
    many = tuple(axis._replace(size=16, backend=Backend(tiled=True)) for axis in TORUS)
    found = split_layout(Array((1024, 16, 64), jnp.dtype("float32")), many, (True, True), tiled=True)
    assert found == (Split(0), Split(0)) and order_in_memory((1024, 16, 64), found, many) == (0, 1, 2)


def test_the_last_dimension_in_memory_is_scattered_first_and_gathered_last():
    torus = tuple(axis._replace(backend=Backend(tiled=True)) for axis in TORUS)
    split, summed, whole = (Split(1), Split(0)), (PARTIAL,) * 2, (REPLICATED,) * 2
    for shape, axes in {(1024, 16, 64): [1, 0], (16, 64, 1024): [0, 1]}.items():
        assert [m.axis for m in moves(summed, split, shape, torus)] == axes
        assert [m.axis for m in moves(split, whole, shape, torus)] == axes[::-1]
    assert [m.axis for m in moves(summed, split, (1024, 16, 64), TORUS)] == [0, 1]  # not in tiles: as it is written


def test_axes_take_dimensions_of_their_own():
    """Off the TPU: the outer axis on the first dimension that divides, the inner one on another if it can."""
    hosts = (Axis(("hosts",), 4), Axis(("device",), 8))
    for shape, expected in {(64, 64): (0, 1), (64, 3): (0, 0), (3, 64): (1, 1)}.items():
        found = split_layout(Array(shape, jnp.dtype("float32")), hosts, (True, True))
        assert tuple(p.dim for p in found) == expected and fits(shape, found, hosts)


# -- several data axes, executed: eight CPU devices as a torus -----------------------------------------------------


WIDTH, LAYERS, EXAMPLES = 512, 3, 16
WEIGHT = 4 * WIDTH * WIDTH


def train_step(state, batch):
    """`LAYERS` square weights and a bias; dropout, so that the order of examples shows."""

    def loss(params):
        x = batch["x"]
        for w in params["w"]:
            x = jnp.tanh(x @ w + params["b"])
        kept = jax.random.bernoulli(jax.random.key(7), 0.5, x.shape)
        return jnp.mean((jnp.where(kept, x, 0) - batch["y"]) ** 2)

    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), value


def train_state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {"w": [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in keys], "b": jnp.zeros(WIDTH)}
    return params, OPTIMIZER.init(params)


def train_batch(i=0):
    x, y = jax.random.normal(jax.random.key(10 + i), (2, EXAMPLES, WIDTH))
    return {"x": x, "y": y}


def equal_the_plain_run(sharded, steps=2, place=lambda batch: batch):
    plain = jax.jit(train_step)
    ours = theirs = train_state()
    for i in range(steps):
        theirs, expected = plain(theirs, train_batch(i))
        ours, found = sharded(ours, place(train_batch(i)))
        assert_same(found, expected)
    assert_same(ours, theirs)
    return ours


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("machine", ["v5e:2x4", "v5p:2x2x2", "v3:2x2"])
def test_a_torus_equals_the_plain_run(machine, weights, mesh):
    options = shardstep.Options(topology=machine)
    sharded = shardstep.shard(train_step, mesh, weights=weights, options=options)
    _, moments = equal_the_plain_run(sharded)
    shard = moments[0].mu["w"][0].addressable_shards[0]
    assert shard.data.size == WIDTH * WIDTH // 8
    plan = sharded.plan(train_state(), train_batch())
    assert plan.wire_bytes.sharded <= plan.wire_bytes.replicated * 1.001


@pytest.mark.parametrize(
    ("machine", "scattered", "gathered"),
    [
        ("v5e:4x2", [2, 4], [4, 2]),  # y on the last dimension, x on the first: gathered in reverse
        ("v5e:2x2", None, None),
        ("v5p:2x2x2", [2, 2, 2], [4, 2]),  # two axes on the first dimension are gathered at once
    ],
)
def test_each_ring_is_scattered_in_turn(machine, scattered, gathered, mesh):
    if scattered is None:
        with pytest.raises(ShardstepError, match="has 4 replicas, but the mesh has 8"):
            shardstep.shard(train_step, mesh, options=shardstep.Options(topology=machine))
        return
    options = shardstep.Options(topology=machine, bucket_bytes=0)
    sharded = shardstep.shard(train_step, mesh, weights="replicated", options=options)
    text = sharded.lower(train_state(), train_batch()).compile().as_text()
    found = [c for c in collectives(text) if c.bytes > 4096]  # the weights; not the bias and the loss
    for kind, groups in (("reduce-scatter", scattered), ("all-gather", gathered)):
        expected = sorted(groups * LAYERS)
        assert sorted(c.group for c in found if c.kind == kind for _ in range(c.arrays)) == expected, kind
    assert not [c for c in found if c.kind == "all-reduce"]
    # A scatter along one ring after the other sends what one over all replicas sends, and no more.
    sent = sum(c.wire_bytes for c in found)
    assert sent == pytest.approx(2 * LAYERS * WEIGHT * 7 / 8)
    planned = sharded.plan(train_state(), train_batch()).collectives
    assert sum(c.bytes for c in planned if len(c.shape) == 2) == pytest.approx(sent)


def test_what_is_summed_over_all_axes_is_summed_at_once(mesh):
    sharded = shardstep.shard(train_step, mesh, options=shardstep.Options(topology="v5p:2x2x2"))
    plan = sharded.plan(train_state(), train_batch())
    reduced = [c for c in plan.collectives if c.kind == "all-reduce"]
    assert reduced and all(c.axis == "data_z+data_y+data_x" for c in reduced)


def test_examples_do_not_give_way_to_an_embedding_split_by_features(mesh):
    """Gathering the tokens would be cheaper than gathering the table, but then every replica reads all examples."""

    def step(state, tokens):
        def loss(table):
            return jnp.mean(jnp.tanh(table[tokens]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["table"])
        m = 0.9 * state["m"] + grads
        return {"table": state["table"] - 0.1 * m, "m": m}, value

    state = {"table": jax.random.normal(jax.random.key(0), (64, 2048)), "m": jnp.zeros((64, 2048))}
    tokens = jax.random.randint(jax.random.key(1), (EXAMPLES, 4), 0, 64)
    options = shardstep.Options(topology="v5e:4x2")
    sharded = shardstep.shard(step, mesh, batch_argnums=1, weights="sharded", options=options)
    plan = sharded.plan(state, tokens)
    assert "split(1)" in next(leaf.layout for leaf in plan.leaves if "table" in leaf.path)
    assert not [c for c in plan.collectives if c.dtype == "int32"]
    theirs, ours = jax.jit(step)(state, tokens), sharded(state, tokens)
    assert_same(ours, theirs)


def test_a_mesh_whose_axes_are_the_rings_keeps_its_names():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("rows", "columns"))
    sharded = shardstep.shard(train_step, mesh, options=shardstep.Options(topology="v5e:4x2"))
    assert sharded.replicas.names == ("rows", "columns") and len(sharded.replicas.axes) == 2
    equal_the_plain_run(sharded)


def test_a_torus_beside_another_axis():
    """Data parallelism over a 2 x 2 torus, the other axis of the mesh untouched."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = shardstep.shard(train_step, mesh, axis="data", options=shardstep.Options(topology="v5e:2x2"))
    assert sharded.replicas.mesh.axis_names == ("data_y", "data_x", "model")
    equal_the_plain_run(sharded)


def test_groups_on_a_torus(mesh):
    """A group of one ring: state is split along x, and summed along y."""
    sharded = shardstep.shard(train_step, mesh, group=4, options=shardstep.Options(topology="v5e:4x2"))
    _, moments = equal_the_plain_run(sharded)
    assert moments[0].mu["w"][0].addressable_shards[0].data.size == WIDTH * WIDTH // 4
    plan = sharded.plan(train_state(), train_batch())
    assert plan.group == 4 and plan.why_group == "as asked: groups of 4"


def test_arrays_on_the_users_mesh_are_in_place(mesh):
    """Where the user's order walks the rings, nothing that he placed is moved."""
    sharded = shardstep.shard(train_step, mesh, options=shardstep.Options(topology="v5e:2x4"))
    placed = jax.device_put(train_batch(), NamedSharding(mesh, PartitionSpec("data")))
    _, again = sharded.place(train_state(), placed)
    assert all(again[name] is placed[name] for name in placed)


def test_devices_that_change_places(mesh, monkeypatch):
    """Where the user's order jumps about, arrays on the user's mesh are moved, and the plan says so."""
    order = (0, 1, 4, 5, 2, 3, 6, 7)
    rings = describe("v5e:2x4").rings
    monkeypatch.setattr(
        "shardstep._src.machine.topology.arrange", lambda devices: Arrangement(order, rings, ("y", "x"))
    )
    sharded = shardstep.shard(train_step, mesh)
    assert [d.id for d in sharded.replicas.mesh.devices.flat] == list(order)
    on_his_mesh = NamedSharding(mesh, PartitionSpec("data"))
    equal_the_plain_run(sharded, place=lambda batch: jax.device_put(batch, on_his_mesh))
    plan = sharded.plan(train_state(), train_batch())
    assert "jumps about" in plan.notes[0] and "jumps about" in str(plan)


# -- what is chosen by cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "sizes", "shared"),
    [
        (1, [8], (True,)),
        (2, [16], (True,)),  # two hosts: one ring over all is as fast as any
        (32, [32, 8], (True, True)),  # many: within the host, then between hosts; state still shared by all
    ],
)
def test_the_group_is_chosen_by_cost(hosts, sizes, shared):
    devices = [Device(i, None, 0, i // 8, platform="gpu", device_kind="NVIDIA H200") for i in range(8 * hosts)]
    chosen = choose_group(arrange(devices), devices)
    assert [r.size for r in chosen.rings] == sizes and chosen.shared == shared
    assert "predicted" in chosen.why or hosts == 1


def test_slices_of_a_tpu_are_weighed_against_the_network():
    """Between slices a scatter and a gather send what an all-reduce would: memory decides, and the plan shows both."""
    devices = [replace(d, slice_index=s) for s in range(2) for d in chips(4, 4)]
    found = arrange(devices)
    assert [r.size for r in found.rings] == [2, 4, 4] and found.names == ("slice", "y", "x")
    chosen = choose_group(found, devices)
    assert chosen.shared == (True, True, True)
    assert "shared by 2 x 4 x 4" in chosen.why and "shared by 4 x 4" in chosen.why


def test_small_leaves_by_cost(mesh):
    """Many small leaves hold too much memory to stay whole; a few among large ones do."""

    def step(state, batch):
        grads = jax.tree.map(lambda w: w * jnp.mean(batch), state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(jnp.add, state["w"], m), "m": m}

    def shares(*shapes):
        leaves = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        plan = shardstep.shard(step, mesh, batch_argnums=1).plan(
            {"w": leaves, "m": leaves}, jax.ShapeDtypeStruct((8,), jnp.float32)
        )
        return ["split" in leaf.layout for leaf in plan.leaves if "['m']" in leaf.path]

    assert shares((64, 128), (64, 128)) == [True, True]
    assert shares((64, 128), (4096, 4096)) == [False, True]
    assert shares((32, 64), (64, 128)) == [False, True]  # below 16 KiB in any case


def test_the_plan_predicts(mesh):
    sharded = shardstep.shard(train_step, mesh, options=shardstep.Options(topology="v5e:2x4"))
    plan = sharded.plan(train_state(), train_batch())
    assert 0 < plan.update_seconds.sharded < plan.update_seconds.replicated / 4
    assert plan.wire_seconds.replicated > 0 and plan.wire_seconds.sharded > 0
    shown = str(plan)
    assert "TPU v5 lite, 4 x 2 (ICI 50 GB/s)" in shown and "predicted" in shown
    assert plan.group == 8 and plan.why_group in shown
