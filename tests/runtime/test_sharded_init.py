"""State that is born sharded, and state that comes from anywhere."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from steps import mesh_of

import shardstep
from shardstep import Padded, ShardstepError
from shardstep._src.runtime.sharded_init import prepare

OPTIMIZER = optax.adam(1e-2, eps=1e-3)
FEATURES = 67  # odd: the optimizer's state is padded
BATCH = jax.ShapeDtypeStruct((16, FEATURES), jnp.float32)


def batch(seed=0):
    return jax.random.normal(jax.random.key(seed), BATCH.shape)


def update(params, opt, x, loss):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, opt = OPTIMIZER.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value


# -- plain functions, Flax, Equinox -----------------------------------------------------------------------------------


def plain_create(key, inner):
    params = {
        "w": jax.random.normal(key, (FEATURES, inner)) / 8,
        "v": jax.random.truncated_normal(key, -1, 1, (inner, 128)),
    }
    return params, OPTIMIZER.init(params)


def plain_step(params, opt, x):
    return update(params, opt, x, lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(128)(nn.tanh(nn.Dense(71)(x)))


APPLY = Network().apply


def flax_create(key, inner):
    params = Network().init(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=APPLY, params=params, tx=OPTIMIZER)


def flax_step(state, x):
    value, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
    return state.apply_gradients(grads=grads), value


def equinox_create(key, inner):
    model = eqx.nn.MLP(FEATURES, 128, inner, 1, activation=jnp.tanh, key=key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def equinox_step(model, opt, x):
    value, grads = eqx.filter_value_and_grad(lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2))(model, x)
    updates, opt = OPTIMIZER.update(grads, opt, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt, value


PROGRAMS = {
    "plain": (plain_create, plain_step),
    "flax": (flax_create, flax_step),
    "equinox": (equinox_create, equinox_step),
}


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") or isinstance(x, int)]  # Flax counts from a plain 0


def as_arguments(state):
    return state if isinstance(state, tuple) and not hasattr(state, "_fields") else (state,)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_is_born_where_it_rests(name, weights):
    create, step = PROGRAMS[name]
    sharded = shardstep.shard(step, mesh_of(8), weights=weights)
    example = eqx.filter_eval_shape(create, jax.random.key(0), 77)
    plan = sharded.plan(*as_arguments(example), BATCH)
    born = plan.init(create, jax.random.key(0), 77)
    plain = create(jax.random.key(0), 77)
    assert jax.tree.structure(born) == jax.tree.structure(plain)
    for ours, theirs in zip(arrays(born), arrays(plain), strict=True):
        # The suite compiles without machine-code optimization: one program may round a product that the other adds
        # unrounded.
        rounding = np.finfo(np.float32).eps * np.max(np.abs(theirs), initial=0)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=rounding)
    assert any(isinstance(x, Padded) for x in arrays(born))
    placed = sharded.place(*as_arguments(born), batch())[: len(as_arguments(born))]
    for ours, again in zip(arrays(born), arrays(placed), strict=True):
        held, held_again = (x.data if isinstance(x, Padded) else x for x in (ours, again))
        assert held is held_again, "what is in place is not copied"
    sharded(*as_arguments(born), batch())


def test_no_device_holds_the_optimizer_state_while_it_is_born():
    """The full state of 48 MB would not fit a budget of 10 MB a device; sharded, its birth does."""

    def create(key):
        params = {f"w{i}": jax.random.normal(k, (1024, 1023)) / 30 for i, k in enumerate(jax.random.split(key, 4))}
        return params, OPTIMIZER.init(params)

    def step(state, x):
        def loss(params):
            return jnp.mean((x @ sum(params.values())) ** 2)

        params, opt = state
        grads = jax.grad(loss)(params)
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), 0.0

    example = jax.eval_shape(create, jax.random.key(0))
    plan = shardstep.shard(step, mesh_of(8), weights="sharded").plan(
        example, jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    )
    full = sum(leaf.bytes_before for leaf in plan.leaves if leaf.role in ("weight", "auxiliary"))
    memory = prepare(plan, create, (jax.random.key(0),), {}).lowered.compile().memory_analysis()
    assert full > 48e6
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 10e6


def test_a_create_state_of_another_structure_is_refused():
    example = eqx.filter_eval_shape(plain_create, jax.random.key(0), 77)
    plan = shardstep.shard(plain_step).plan(*example, BATCH)
    with pytest.raises(ShardstepError, match=r"create_state must return the step's state.*\['w'\] float32\[67, 5\]"):
        plan.init(plain_create, jax.random.key(0), 5)


# -- placement --------------------------------------------------------------------------------------------------------


def on_host(state):
    return jax.tree.map(np.asarray, state)


def on_one_device(state):
    return jax.device_put(state, jax.devices()[3])


def replicated(state):
    return jax.device_put(state, jax.sharding.NamedSharding(mesh_of(8), jax.sharding.PartitionSpec()))


def of_another_plan(weights, replicas):
    def lay_out(state):
        sharded = shardstep.shard(plain_step, mesh_of(replicas), weights=weights)
        return sharded.place(*state, batch())[:2]

    return lay_out


@pytest.mark.parametrize(
    "come_from",
    [on_host, on_one_device, replicated, of_another_plan("sharded", 8), of_another_plan("replicated", 3)],
    ids=["host", "one device", "replicated", "sharded weights", "three replicas"],
)
def test_state_comes_from_anywhere(come_from):
    sharded = shardstep.shard(plain_step, mesh_of(8))
    state = plain_create(jax.random.key(0), 77)
    plain = jax.jit(plain_step)(*state, batch())  # first: the replicated copy shares the memory that is donated
    for ours, theirs in zip(arrays(sharded(*come_from(state), batch())), arrays(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
