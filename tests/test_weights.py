"""How weights rest: `weights="sharded"`, and what "auto" chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from steps import assert_same

import shardstep
from shardstep import Options
from shardstep.hlo import collectives, counts
from shardstep.plan import choose_weights

WIDTH, LAYERS = 256, 4
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
ALONE = Options(bucket_bytes=0)


def loss(weights, batch):
    x = batch
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(state, batch):
    weights, moments = state
    value, grads = jax.value_and_grad(loss)(weights, batch)
    updates, moments = OPTIMIZER.update(grads, moments, weights)
    return (optax.apply_updates(weights, updates), moments), value


def start():
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in jax.random.split(jax.random.key(0), LAYERS)]
    return weights, OPTIMIZER.init(weights)


BATCH = jax.random.normal(jax.random.key(1), (32, WIDTH))


@pytest.fixture(scope="module")
def compiled():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    steps = {w: shardstep.shard(step, mesh, weights=w, options=ALONE) for w in ("replicated", "sharded")}
    return {name: s.lower(start(), BATCH).compile() for name, s in steps.items()}


def test_each_weight_is_gathered_once_for_both_passes(compiled):
    assert counts(collectives(compiled["sharded"].as_text())) == {
        "all-gather": LAYERS,
        "reduce-scatter": LAYERS,
        "all-reduce": 1,
    }


def test_the_gathered_copy_is_not_kept_for_the_update(mesh):
    """The update reads the shard that was there before the gather: it does not cut it out of the copy."""
    cut = f"(tensor<{WIDTH}x{WIDTH}xf32>, tensor<i32>, tensor<i32>) -> tensor<{WIDTH // 8}x{WIDTH}xf32>"
    found = {}
    for weights in ("replicated", "sharded"):
        program = shardstep.shard(step, mesh, weights=weights, options=ALONE).lower(start(), BATCH).as_text()
        found[weights] = sum("dynamic_slice" in line and cut in line for line in program.splitlines())
    assert found == {"replicated": LAYERS, "sharded": 0}


def test_less_memory(compiled):
    def held(program):
        memory = program.memory_analysis()
        return memory.argument_size_in_bytes, memory.argument_size_in_bytes + memory.temp_size_in_bytes

    weight = WIDTH * WIDTH * 4
    replicated, sharded = held(compiled["replicated"]), held(compiled["sharded"])
    assert replicated[0] - sharded[0] == LAYERS * weight * 7 // 8
    assert sharded[1] <= replicated[1]


def test_evaluation_reads_the_state_as_it_is(mesh):
    ours = {}
    for weights in ("replicated", "sharded"):
        sharded = shardstep.shard(step, mesh, weights=weights)
        (found, _), _ = sharded(start(), BATCH)
        ours[weights] = [
            jax.jit(loss)(found, BATCH),
            loss(found, BATCH),  # op by op
            found[0][3, 5],
            jax.tree.map(jnp.linalg.norm, found),
            np.asarray(found[1]),
        ]
    assert found[0].sharding.spec == PartitionSpec("data") and found[0].shape == (WIDTH, WIDTH)
    assert_same(ours["sharded"], ours["replicated"], tolerance=1e-5)


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("platform", "chosen"), [("cpu", "replicated"), ("gpu", "sharded"), ("tpu", "sharded")])
def test_auto_goes_by_platform(platform, chosen):
    found, why = choose_weights("auto", Options(), platform)
    assert found == chosen and platform.upper() in why


def test_the_plan_says_why(mesh):
    plan = shardstep.shard(step, mesh).plan(start(), BATCH)
    assert plan.weights == "replicated" and "evaluation code" in plan.why_weights
    asked = shardstep.shard(step, mesh, weights="sharded").plan(start(), BATCH)
    assert asked.weights == "sharded" and asked.why_weights == "as asked"


def test_auto_sends_no_more_than_replicated_weights_do(mesh):
    machine = Options(topology="h100:8")
    plans = {
        w: shardstep.shard(step, mesh, weights=w, options=machine).plan(start(), BATCH) for w in ("auto", "replicated")
    }
    assert plans["auto"].weights == "sharded"
    assert plans["auto"].wire_bytes.sharded <= plans["replicated"].wire_bytes.sharded * 1.001
