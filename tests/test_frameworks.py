"""Training steps in the style of each framework's own documentation, under its `jit` and under `shardstep.shard`."""

import dataclasses
from typing import Any

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, jaxtyped

import shardstep

STEPS = 3
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


def batch(i=0, examples=32):
    random = np.random.default_rng(i)
    return {
        "x": random.normal(size=(examples, 64)).astype(np.float32),
        "y": random.integers(0, 10, examples).astype(np.int32),
    }


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def assert_same(ours, theirs, tolerance=1e-4):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in pairs:
        if not isinstance(b, jax.Array):
            assert a is b or a == b
            continue
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        exact = not jnp.issubdtype(b.dtype, jnp.inexact)
        limits = {"rtol": 0, "atol": 0} if exact else {"rtol": tolerance, "atol": 2e-6}
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **limits, err_msg=jax.tree_util.keystr(path))


def train(plain, sharded, state, call):
    """Both for some steps; `call(step, state, i) -> (state, metrics)`. Returns the sharded run's state."""
    ours = theirs = state
    for i in range(STEPS):
        theirs, wanted = call(plain, theirs, i)
        ours, metrics = call(sharded, ours, i)
        assert_same(metrics, wanted)
    assert_same(ours, theirs)
    return ours


def is_shared(x, replicas=8):
    return x.addressable_shards[0].data.size * replicas == x.size


# -- Flax Linen -------------------------------------------------------------------------------------------------------


def test_linen_with_batch_statistics_and_dropout(mesh):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x, training: bool):
            x = linen.Dense(128)(x)
            x = linen.BatchNorm(use_running_average=not training)(x)
            x = linen.Dropout(0.2, deterministic=not training)(linen.relu(x))
            return linen.Dense(10)(x)

    class TrainState(train_state.TrainState):
        batch_stats: Any
        key: jax.Array

    model = Model()
    variables = model.init(jax.random.key(0), batch()["x"], training=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=OPTIMIZER,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
    )

    def train_step(state, batch):
        dropout_key = jax.random.fold_in(key=state.key, data=state.step)

        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x=batch["x"],
                training=True,
                rngs={"dropout": dropout_key},
                mutable=["batch_stats"],
            )
            return cross_entropy(logits, batch["y"]), (logits, updates)

        (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        state = state.replace(batch_stats=updates["batch_stats"])
        return state, {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["y"])}

    sharded = shardstep.shard(train_step, mesh)
    state = train(jax.jit(train_step), sharded, state, lambda step, state, i: step(state, batch(i)))
    assert is_shared(state.opt_state[0].mu["Dense_0"]["kernel"])
    assert state.apply_fn == model.apply


# -- Equinox ----------------------------------------------------------------------------------------------------------


class Stateful(eqx.Module):
    """A model with functions, strings and an `eqx.nn.State` for its BatchNorm."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    activation: Any
    name: str = eqx.field(static=True, default="stateful")

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 128, key=first)
        self.norm = eqx.nn.BatchNorm(128, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(128, 10, key=second)
        self.activation = jax.nn.gelu

    def __call__(self, x, state, key):
        x, state = self.norm(self.hidden(x), state)
        return self.out(self.dropout(self.activation(x), key=key)), state


def test_equinox_with_state_and_filtered_transformations(mesh):
    def compute_loss(model, state, batch, key):
        keys = jax.random.split(key, batch["x"].shape[0])
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        logits, state = batched(batch["x"], state, keys)
        return cross_entropy(logits, batch["y"]), state

    def make_step(model, state, opt_state, batch, key):
        (loss, state), grads = eqx.filter_value_and_grad(compute_loss, has_aux=True)(model, state, batch, key)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    model, state = eqx.nn.make_with_state(Stateful)(jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    def call(step, state, i):
        *state, loss = step(*state, batch(i), jax.random.key(i))
        return tuple(state), loss

    step = eqx.filter_jit(make_step)
    for wrapped in (make_step, step):  # the plain step, and the one that is already jitted
        model, _, opt_state = train(step, shardstep.shard(wrapped, mesh), (model, state, opt_state), call)
        assert is_shared(opt_state[0].mu.hidden.weight)
        assert model.activation is jax.nn.gelu and model.name == "stateful"


def test_equinox_filter_shard_in_the_step(mesh):
    """What Equinox's own data-parallel example does: constraints inside the step."""
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    model = eqx.nn.MLP(64, 10, 128, depth=1, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    def compute_loss(model, batch):
        return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])

    def train_step(model, opt_state, batch):
        model, opt_state = eqx.filter_shard((model, opt_state), replicated)
        batch = eqx.filter_shard(batch, rows)
        loss, grads = eqx.filter_value_and_grad(compute_loss)(model, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return *eqx.filter_shard((model, opt_state), replicated), loss

    def call(step, state, i):
        model, opt_state, loss = step(*state, eqx.filter_shard(batch(i), rows))
        return (model, opt_state), loss

    sharded = shardstep.shard(train_step, mesh)
    _, opt_state = train(eqx.filter_jit(train_step), sharded, (model, opt_state), call)
    assert is_shared(opt_state[0].nu.layers[0].weight)


# -- Haiku ------------------------------------------------------------------------------------------------------------


def test_haiku_with_state(mesh):
    def forward(batch, is_training):
        x = hk.Linear(128)(batch["x"])
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
        x = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x)) if is_training else jax.nn.relu(x)
        return hk.Linear(10)(x)

    network = hk.transform_with_state(forward)
    params, state = network.init(jax.random.key(0), batch(), is_training=True)

    def loss_fn(params, state, key, batch):
        logits, state = network.apply(params, state, key, batch, is_training=True)
        return cross_entropy(logits, batch["y"]), state

    def train_step(params, state, opt_state, key, batch):
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, key, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    def call(step, state, i):
        *state, loss = step(*state, jax.random.key(i), batch(i))
        return tuple(state), loss

    sharded = shardstep.shard(train_step, mesh)
    _, _, opt_state = train(jax.jit(train_step), sharded, (params, state, OPTIMIZER.init(params)), call)
    assert is_shared(opt_state[0].mu["linear"]["w"])


# -- Chex, jaxtyping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mappable", [True, False], ids=["mappable", "plain"])
def test_chex_dataclasses(mappable, mesh):
    chex = pytest.importorskip("chex")

    @chex.dataclass(frozen=True, mappable_dataclass=mappable)
    class Batch:
        x: chex.Array
        y: chex.Array

    @chex.dataclass(mappable_dataclass=mappable)
    class State:
        w: chex.Array
        opt_state: chex.ArrayTree
        step: chex.Numeric

    def train_step(state: State, batch: Batch):
        chex.assert_equal_shape_prefix([batch.x, batch.y], 1)
        chex.assert_rank(state.w, 2)
        loss, grad = jax.value_and_grad(lambda w: cross_entropy(batch.x @ w, batch.y))(state.w)
        update, opt_state = OPTIMIZER.update(grad, state.opt_state)
        return State(w=state.w + update, opt_state=opt_state, step=state.step + 1), {"loss": loss}

    w = jax.random.normal(jax.random.key(0), (64, 80)) / 8
    state = State(w=w, opt_state=OPTIMIZER.init(w), step=jnp.zeros((), jnp.int32))
    sharded = shardstep.shard(train_step, mesh)
    train(jax.jit(train_step), sharded, state, lambda step, state, i: step(state, Batch(**batch(i))))


def test_jaxtyping_annotations_hold_inside_the_step(mesh):
    """The step is traced with the shapes of the whole batch, so its annotations are true."""
    seen = []
    Weight = Float[Array, "features classes"]

    @jaxtyped(typechecker=None)
    def train_step(w: Weight, m: Weight, x: Float[Array, "n features"], y: Int[Array, "n"]):  # noqa: F722, F821
        seen.append((isinstance(x, Float[Array, "32 64"]), isinstance(y, Int[Array, "32"])))
        loss, grad = jax.value_and_grad(lambda w: cross_entropy(x @ w, y))(w)
        m = 0.9 * m + grad
        return w - 0.1 * m, m, loss

    def call(step, state, i):
        w, m, loss = step(*state, batch(i)["x"], batch(i)["y"])
        return (w, m), loss

    w = jax.random.normal(jax.random.key(0), (64, 80)) / 8
    train(jax.jit(train_step), shardstep.shard(train_step, mesh), (w, jnp.zeros_like(w)), call)
    assert set(seen) == {(True, True)}


def test_dataclasses_registered_with_jax(mesh):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: jax.Array
        m: jax.Array
        rate: float = dataclasses.field(metadata={"static": True}, default=0.1)

    def train_step(state, batch):
        loss, grad = jax.value_and_grad(lambda w: cross_entropy(batch["x"] @ w, batch["y"]))(state.w)
        m = 0.9 * state.m + grad
        return State(state.w - state.rate * m, m, state.rate), loss

    w = jax.random.normal(jax.random.key(0), (64, 80)) / 8
    sharded = shardstep.shard(train_step, mesh)
    state = State(w, jnp.zeros_like(w))
    trained = train(jax.jit(train_step), sharded, state, lambda step, state, i: step(state, batch(i)))
    assert isinstance(trained, State) and trained.rate == 0.1 and is_shared(trained.m)
