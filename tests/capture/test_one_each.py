"""Values of which each replica has its own, passed as `pmap` has them; the reference is `pmap`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from steps import OPTIMIZER, adam_state, assert_same, batch, loss, mesh_of, split_leaves, update

import shardstep

STEPS = 2
KINDS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}


def stacked(tree, n):
    return jax.tree.map(lambda x: jnp.stack([x] * n), tree)


def parted(tree, n):
    return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)


def dropped(key, batch):
    return {**batch, "x": batch["x"] * jax.random.bernoulli(key, 0.8, batch["x"].shape)}


def trained(state, batch, objective=loss):
    params, moments = state
    value, gradients = jax.value_and_grad(objective)(params, batch)
    return update(params, moments, lax.pmean(gradients, "batch")), lax.pmean(value, "batch")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 8])
def test_a_dropout_key_for_each_device(n, kind):
    """As Flax's examples have it: `dropout_rngs = jax.random.split(rng, jax.local_device_count())`."""

    def step(state, batch, dropout_rng):
        dropout_rng = jax.random.fold_in(dropout_rng, state[1][0].count)
        return trained(state, dropped(dropout_rng, batch))

    sharded = shardstep.shard(step, mesh_of(n), axis_name="batch")
    plain = jax.pmap(step, axis_name="batch", devices=jax.devices()[:n])
    keys = jax.random.split(KINDS[kind](7), n)
    ours, theirs = adam_state(), stacked(adam_state(), n)
    for i in range(STEPS):
        ours, found = sharded(ours, batch(i), keys)
        theirs, expected = plain(theirs, parted(batch(i), n), keys)
        assert_same(found, expected[0])
    assert_same(ours, jax.tree.map(lambda x: x[0], theirs))
    assert len(split_leaves(sharded.plan(ours, batch(), keys))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_come_back(kind):
    def step(state, batch, key):
        key, mine = jax.random.split(key)
        return *trained(state, dropped(mine, batch)), key

    sharded = shardstep.shard(step, mesh_of(3), axis_name="batch")
    plain = jax.pmap(step, axis_name="batch", devices=jax.devices()[:3])
    our_keys = their_keys = jax.random.split(KINDS[kind](7), 3)
    ours, theirs = adam_state(), stacked(adam_state(), 3)
    for i in range(STEPS):
        ours, found, our_keys = sharded(ours, batch(i), our_keys)
        theirs, expected, their_keys = plain(theirs, parted(batch(i), 3), their_keys)
        assert_same((found, our_keys), (expected[0], their_keys))


def test_keys_that_the_step_reads_by_its_own_index():
    """A table of keys that every replica sees whole, as `shard_map` has it, is one still."""

    def step(state, batch, keys):
        return trained(state, dropped(keys[lax.axis_index("batch")], batch))

    keys = jax.random.split(jax.random.key(7), 8)
    by_index = shardstep.shard(step, mesh_of(8), axis_name="batch")(adam_state(), batch(), keys)
    own = shardstep.shard(lambda s, b, key: trained(s, dropped(key, b)), mesh_of(8), axis_name="batch")
    assert_same(by_index, own(adam_state(), batch(), keys))


def test_a_scalar_for_each_device():
    def step(state, batch, scale):
        return trained(state, batch, lambda params, batch: scale * loss(params, batch))

    how = {"batch_argnames": ("batch", "scale"), "batch_axis": (0, None)}
    sharded = shardstep.shard(step, mesh_of(8), axis_name="batch", **how)
    plain = jax.pmap(step, axis_name="batch")
    arguments = parted(batch(), 8), jnp.arange(1.0, 9)
    theirs, expected = plain(stacked(adam_state(), 8), *arguments)
    ours, found = sharded(adam_state(), batch(), arguments[1])
    assert_same((ours, found), jax.tree.map(lambda x: x[0], (theirs, expected)))
    assert shardstep.check(sharded, ours, batch(), arguments[1]).within(1e-5)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(64, use_bias=False)(x))
        return nn.Dense(96)(nn.relu(x))


def test_batch_statistics_of_each_replica():
    """As under `pmap` without an axis name in BatchNorm: each replica keeps its own, and they are averaged later."""
    model = Normalized()

    def step(state, statistics, batch):
        def objective(params):
            variables = {"params": params, "batch_stats": statistics}
            out, changed = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), changed["batch_stats"]

        (value, new), gradients = jax.value_and_grad(objective, has_aux=True)(state[0])
        return update(*state, lax.pmean(gradients, "batch")), new, lax.pmean(value, "batch")

    variables = model.init(jax.random.key(0), batch()["x"])
    state, each = (variables["params"], OPTIMIZER.init(variables["params"])), stacked(variables["batch_stats"], 8)
    how = {"batch_argnums": (1, 2), "batch_axis": (None, 0)}
    sharded = shardstep.shard(step, mesh_of(8), axis_name="batch", **how)
    plain = jax.pmap(step, axis_name="batch")
    ours, theirs = (state, each), (stacked(state, 8), each)
    for i in range(STEPS):
        *ours, found = sharded(*ours, batch(i))
        *theirs, expected = plain(*theirs, parted(batch(i), 8))
        assert_same(found, expected[0])
    assert_same(ours[1], theirs[1])
    assert np.ptp(jax.tree.leaves(ours[1])[0], axis=0).max() > 0  # they differ
    assert_same(ours[0], jax.tree.map(lambda x: x[0], theirs[0]), 1e-4)


def test_state_that_differs_between_replicas_names_both_ways_out():
    def step(state, batch):
        (params, seen), moments = state
        (params, moments), value = trained((params, moments), batch)
        return ((params, 0.9 * seen + 0.1 * batch["x"].mean(0)), moments), value

    params, moments = adam_state()
    with pytest.raises(shardstep.ShardstepError, match=r"lax\.pmean\(x, 'batch'\).*batch_axis=None"):
        shardstep.shard(step, mesh_of(8), axis_name="batch")(((params, jnp.zeros(96)), moments), batch())


def test_what_cannot_be_meant_is_refused():
    def step(state, batch, scale):
        return trained(state, batch, lambda params, batch: scale * loss(params, batch))

    how = {"batch_argnums": (1, 2), "batch_axis": (0, None)}
    with pytest.raises(shardstep.ShardstepError, match="set axis_name"):
        shardstep.shard(step, mesh_of(8), **how)
    sharded = shardstep.shard(step, mesh_of(8), axis_name="batch", **how)
    with pytest.raises(shardstep.ShardstepError, match=r"scale is to hold one value for each of 8 replicas.*\(3,\)"):
        sharded(adam_state(), batch(), jnp.ones(3))
