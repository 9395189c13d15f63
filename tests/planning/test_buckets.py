"""Small tensors travel together: exactly as many collectives in the compiled program as the plan says, same numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from steps import assert_same

import shardstep
from shardstep import Options
from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import REPLICATED, Array, Axis, Partial, Split, block_shape
from shardstep._src.core.program import Var
from shardstep._src.core.schedule import Transfer
from shardstep._src.machine import topology
from shardstep._src.planning.buckets import Limits
from shardstep._src.runtime.packing import transfer
from shardstep._src.tools.hlo import collectives, counts

LAYERS = 12
WIDTH = 64  # a weight is 16 KiB: just large enough to be split
ALONE, TOGETHER = Options(bucket_bytes=0), Options(bucket_bytes=1 << 20)


def training(optimizer, layers=LAYERS, width=WIDTH, dtypes=(jnp.float32,)):
    """`layers` square weights with a bias each, of the given dtypes in turn."""

    def loss(params, batch):
        x = batch
        for p in params:
            x = jnp.tanh(x.astype(p["w"].dtype) @ p["w"] + p["b"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(state, batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    kinds = [dtypes[i % len(dtypes)] for i in range(layers)]
    keys = jax.random.split(jax.random.key(0), layers)
    params = [
        {"w": (jax.random.normal(k, (width, width)) / 8).astype(dtype), "b": jnp.full(width, 0.1, dtype)}
        for k, dtype in zip(keys, kinds, strict=True)
    ]
    batch = jax.random.normal(jax.random.key(1), (16, width))
    return step, (params, optimizer.init(params)), batch


def compiled(step, *args):
    return collectives(step.lower(*args).compile().as_text())


def assert_bits(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def as_planned(step, *args):
    """The collectives of the plan, after checking that the compiled program has the same ones."""
    found = compiled(step, *args)
    planned = step.plan(*args).collectives
    assert counts(found) == counts(planned)
    assert sum(c.wire_bytes for c in found) == pytest.approx(sum(c.total for c in planned))
    assert all(c.arrays == 1 for c in found)  # one buffer each: it was not XLA that combined them
    return planned


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_one_collective_of_each_kind(weights, mesh):
    step, state, batch = training(optax.adam(1e-2))
    sharded = shardstep.shard(step, mesh, weights=weights, options=TOGETHER)
    planned = as_planned(sharded, state, batch)
    tensors = {(c.kind, c.tensors) for c in planned}
    # the biases are too small to be split: their gradients and the loss are summed in one all-reduce
    assert tensors == {("reduce-scatter", LAYERS), ("all-gather", LAYERS), ("all-reduce", LAYERS + 1)}
    assert len(planned) == 3


def test_alone_when_asked(mesh):
    step, state, batch = training(optax.adam(1e-2))
    planned = shardstep.shard(step, mesh, options=ALONE).plan(state, batch).collectives
    assert counts(planned) == {"reduce-scatter": LAYERS, "all-gather": LAYERS, "all-reduce": LAYERS + 1}


@pytest.mark.parametrize(
    ("source", "target"),
    [(Partial(), REPLICATED), (Partial("max"), REPLICATED), (Partial(), Split(0)), (Partial(), Split(1))]
    + [(Split(0), REPLICATED), (Split(1), REPLICATED), (Partial("max"), Split(1))]
    + [(Partial(), Split(1, extent=48)), (Split(1, extent=48), REPLICATED)],
)
@pytest.mark.parametrize("tiled", [False, True])
def test_not_a_bit_changes(source, target, tiled, mesh):
    """The same blocks, moved alone and together."""
    axes = (Axis(("data",), 8, Backend(tiled=tiled)),)
    shapes = [(16, 8), (8, 24), (32, 40)]
    bundle = tuple(Transfer(Var(Array(s, jnp.float32)), (source,), (target,)) for s in shapes)
    held = [block_shape(s, (source,), axes) for s in shapes]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    blocks = [jax.random.normal(k, (8 * s[0], *s[1:])) for k, s in zip(keys, held, strict=True)]

    def both(*xs):
        alone = [transfer([x], (t,), axes)[0] for x, t in zip(xs, bundle, strict=True)]
        return alone, transfer(xs, bundle, axes)

    run = jax.shard_map(
        both, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
    )
    assert_bits(*jax.jit(run)(*blocks))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_same_numbers(weights, mesh):
    step, state, batch = training(optax.adam(1e-2, eps=1e-3))
    runs = []
    for options in (ALONE, TOGETHER):
        sharded = shardstep.shard(step, mesh, weights=weights, options=options)
        now = state
        for _ in range(2):
            now, value = sharded(now, batch)
        runs.append((now, value))
    assert_same(*runs, tolerance=1e-6)  # XLA contracts a*b+c differently around a slice


def test_a_bucket_is_never_over_full(mesh):
    step, state, batch = training(optax.adam(1e-2))
    five = 5 * WIDTH * WIDTH * 4
    planned = as_planned(shardstep.shard(step, mesh, options=Options(bucket_bytes=five)), state, batch)
    assert sorted(c.tensors for c in planned if c.kind == "reduce-scatter") == [2, 5, 5]
    assert sorted(c.tensors for c in planned if c.kind == "all-gather") == [2, 5, 5]
    assert all(c.shape[0] * 4 <= five for c in planned if c.tensors > 1)


def test_large_tensors_travel_alone_and_are_not_packed(mesh):
    step, state, batch = training(optax.adam(1e-2))
    sharded = shardstep.shard(step, mesh, options=Options(bucket_bytes=WIDTH * WIDTH * 4 - 1))
    planned = as_planned(sharded, state, batch)
    assert counts(planned) == {"reduce-scatter": LAYERS, "all-gather": LAYERS, "all-reduce": 1}
    program = sharded.lower(state, batch).as_text()
    packed = [line for line in program.splitlines() if "stablehlo.concatenate" in line]
    assert len(packed) == 1  # the biases and the loss
    assert f"tensor<{LAYERS * WIDTH + 1}xf32>" in packed[0]


def test_one_bucket_for_each_dtype(mesh):
    step, state, batch = training(optax.sgd(1e-2, momentum=0.9), dtypes=(jnp.float32, jnp.bfloat16), width=128)
    planned = shardstep.shard(step, mesh, options=TOGETHER).plan(state, batch).collectives
    gathers = sorted((c.dtype, c.tensors) for c in planned if c.kind == "all-gather")
    assert gathers == [("bfloat16", LAYERS // 2), ("float32", LAYERS // 2)]


def test_what_depends_on_a_bucket_is_not_in_it(mesh):
    """Clipping needs the norm of the reduced gradients: its sum comes after them."""
    step, state, batch = training(optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2)))
    sharded = shardstep.shard(step, mesh, options=TOGETHER)
    planned = as_planned(sharded, state, batch)
    assert [c.tensors for c in planned if c.kind == "reduce-scatter"] == [LAYERS]
    assert len([c for c in planned if c.kind == "all-reduce"]) == 2
    assert shardstep.check(sharded, state, batch).within(1e-4)


@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2)])
def test_two_axes_and_an_inner_dimension(mesh_shape):
    """Weights of 60 x 64: the first dimension does not divide by 8, so the blocks are columns."""
    mesh = jax.make_mesh(mesh_shape, ("hosts", "chips"), axis_types=(AxisType.Auto,) * 2)

    def step(params, batch):
        def loss(params):
            return sum(jnp.mean(jnp.tanh(batch @ p) ** 2) for p in params)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.random.normal(k, (60, 64)) for k in jax.random.split(jax.random.key(0), 5)]
    batch = jax.random.normal(jax.random.key(1), (16, 60))
    options = Options(bucket_bytes=1 << 20, min_shard_bytes=0)
    sharded = shardstep.shard(step, mesh, weights="sharded", options=options)
    planned = as_planned(sharded, params, batch)
    assert all(c.tensors > 1 for c in planned if c.kind != "all-reduce")
    placed, _ = sharded.place(params, batch)
    assert any(s is not None for s in placed[0].sharding.spec) and placed[0].sharding.spec != PartitionSpec()
    assert shardstep.check(sharded, params, batch).within(1e-5)


def test_inside_a_loop(mesh):
    """Three steps in a scan: the bundles are in its body, and nothing else communicates."""
    step, state, batch = training(optax.adam(1e-2), layers=4)

    def many(state, batches):
        return jax.lax.scan(step, state, batches)

    batches = jnp.stack([batch] * 3)
    sharded = shardstep.shard(many, mesh, batch_argnums=1, batch_axis=1, options=TOGETHER)
    inside = [c for c in sharded.plan(state, batches).collectives if c.loop]
    found = [c for c in compiled(sharded, state, batches) if c.in_loop]
    assert counts(found) == counts(inside)
    # the losses stay partial through the loop: they are summed once, behind it
    assert {c.kind: c.tensors for c in inside} == {"reduce-scatter": 4, "all-reduce": 4, "all-gather": 4}
    assert all(c.times == 3 for c in inside)
    alone = shardstep.shard(many, mesh, batch_argnums=1, batch_axis=1, options=ALONE)
    assert_same(sharded(state, batches), alone(state, batches), tolerance=1e-5)


def test_a_hundred_small_tensors(mesh):
    """Nothing is large enough to be split, and the step sends one message, as the replicated program does."""
    step, state, batch = training(optax.adam(1e-2), layers=50, width=16)
    planned = as_planned(shardstep.shard(step, mesh), state, batch)
    assert [(c.kind, c.tensors) for c in planned] == [("all-reduce", 101)]


@pytest.mark.parametrize("kind", ["integers", "booleans", "maxima"])
def test_other_sums_share_a_message_too(kind, mesh):
    def step(state, batch):
        parts = {
            "integers": lambda x: jnp.sum(jnp.round(10 * x).astype(jnp.int32), axis=0),
            "booleans": lambda x: jnp.any(x > 1.0, axis=0),
            "maxima": lambda x: jnp.max(x, axis=0),
        }[kind]
        found = [parts(batch), parts(-batch), parts(batch[:, :3])]
        return state * 0.9 + jnp.mean(batch), found

    batch = jax.random.normal(jax.random.key(0), (16, 5))
    sharded = shardstep.shard(step, mesh, batch_argnums=1)
    planned = sharded.plan(jnp.ones(4), batch).collectives
    assert [c.tensors for c in planned if c.tensors > 1] == [3]
    _, ours = sharded(jnp.ones(4), batch)
    _, theirs = jax.jit(step)(jnp.ones(4), batch)
    assert_bits(ours, theirs)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bucket_bytes": -1}, "number of bytes"),
        ({"bucket_bytes": "many"}, "number of bytes"),
        ({"min_shard_bytes": 1.5}, "number of bytes"),
        ({"reduce_dtype": "int32"}, "floating-point"),
        ({"gather_dtype": "no dtype"}, "not a dtype"),
        ({"engine": "magic"}, "'rewrite'"),
    ],
)
def test_bad_options_are_refused(wrong, message):
    with pytest.raises(shardstep.ShardstepError, match=message):
        Options(**wrong)


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor"])
def test_what_is_normalised_leaf_by_leaf_is_normalised_together(mesh, name):
    """Each weight's norms are messages of their own in the program; none waits for another's."""
    optimizer = getattr(optax, name)(1e-3)

    def step(state, x):
        params, moments = state

        def loss(params):
            y = x
            for w, b in params:
                y = jnp.tanh(y @ w + b)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def counted(layers):
        params = [(jnp.eye(128) + 0.01 * i, jnp.full(128, 0.1)) for i in range(layers)]
        state = params, optimizer.init(params)
        sharded = shardstep.shard(step, mesh, weights="replicated", options=shardstep.Options(min_shard_bytes=512))
        ours, plain = sharded(state, batch), jax.jit(step)(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), 1e-4, 1e-5), ours, plain)
        return counts(collectives(sharded.lower(state, batch).compile().as_text()))

    batch = jnp.linspace(-1, 1, 16 * 128).reshape(16, 128)
    assert counted(2)["all-reduce"] == counted(3)["all-reduce"] <= 4


# -- by time ----------------------------------------------------------------------------------------------------------


def packs(nbytes, machine, asked=None):
    axes = tuple(Axis((f"x{k}",), ring.size) for k, ring in enumerate(machine.rings))
    rest = (REPLICATED,) * (len(axes) - 1)
    var = Var(Array((nbytes // 4,), jnp.dtype("float32")))
    gather = Transfer(var, (*rest, Split(0)), (REPLICATED, *rest))
    return Limits.of(asked, machine).pays(gather, list(gather.moves(axes)), axes)


def test_a_tensor_travels_alone_if_copying_it_takes_longer_than_a_message():
    """A message over a slow network is worth larger copies; memory that is slow, smaller ones."""
    cpu, gpu = topology.describe("cpu:2"), topology.describe("h200:8")
    assert packs(64 << 10, cpu) and not packs(1 << 20, cpu)
    assert packs(4 << 20, gpu) and not packs(1 << 30, gpu)
    slow = replace(gpu, chip=gpu.chip._replace(memory=gpu.chip.memory / 100))
    assert packs(256 << 10, slow) and not packs(4 << 20, slow)


def test_what_was_asked_for_is_packed_whatever_it_takes():
    assert packs(1 << 20, topology.describe("cpu:2"), asked=1 << 20)
