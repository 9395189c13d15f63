"""Flax NNX: the same steps under `nnx.jit` and under `shardstep.nnx.shard`, which both mutate their arguments."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardstep

STEPS = 3


class CNN(nnx.Module):
    """The model of Flax's own tutorial, smaller."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(16 * 4 * 4, 64, rngs=rngs)])
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.dropout(self.conv(x)))), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return self.out(x)


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(self.dropout(x.reshape(x.shape[0], -1)))))


def batch(i, size=32):
    random = np.random.default_rng(i)
    return {
        "image": random.normal(size=(size, 8, 8, 1)).astype(np.float32),
        "label": random.integers(0, 10, size).astype(np.int32),
    }


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def train_step(model, optimizer, metrics, batch):
    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, gradients)
    return loss


def make_metrics():
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def make_optimizer(model):
    return nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)


def assert_same(ours, theirs):
    ours, theirs = nnx.state(ours), nnx.state(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        exact = not jnp.issubdtype(a.dtype, jnp.inexact)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 2e-6}
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance, err_msg=jax.tree_util.keystr(path))


def test_a_step_that_mutates_model_optimizer_and_metrics(mesh):
    def evaluate(model, metrics, batch):
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    def train(wrap):
        model = CNN(rngs=nnx.Rngs(0))
        optimizer, metrics = make_optimizer(model), make_metrics()
        step, test = wrap(train_step), wrap(evaluate)
        losses = [step(model, optimizer, metrics, batch(i)) for i in range(STEPS)]
        trained = metrics.compute()
        metrics.reset()
        model.eval()  # another structure: dropout and BatchNorm are told
        test(model, metrics, batch(9))
        return model, optimizer, metrics, losses, trained

    theirs, ours = train(nnx.jit), train(shardstep.nnx.shard(mesh=mesh))
    assert_same(ours[:3], theirs[:3])
    np.testing.assert_allclose(ours[3], theirs[3], rtol=1e-5)
    assert ours[4]["accuracy"] == theirs[4]["accuracy"]
    moment = ours[1].opt_state[0].mu["out"]["kernel"].get_value()
    assert moment.sharding.is_fully_replicated  # 2.5 KiB: too small to split
    moment = ours[1].opt_state[0].mu["hidden"][0]["kernel"].get_value()
    assert moment.addressable_shards[0].data.size == moment.size // 8


def test_the_same_program_serves_every_step(mesh):
    traces = 0

    @shardstep.nnx.shard(mesh=mesh)
    def step(model, optimizer, batch):
        nonlocal traces
        traces += 1
        gradients, _ = nnx.grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, gradients)

    model = MLP(rngs=nnx.Rngs(0))
    optimizer = make_optimizer(model)
    for i in range(3):
        assert step(model, optimizer, batch(i)) is None
    assert traces == 1
    assert step.__name__ == "step"


def test_an_optimizer_that_holds_the_model(mesh):
    """What objects share is one state, and stays shared."""

    def step(optimizer, batch):
        gradients, _ = nnx.grad(loss_fn, has_aux=True)(optimizer.model, batch)
        optimizer.update(gradients)

    def both(model, optimizer, batch):
        assert optimizer.model is model
        step(optimizer, batch)

    def train(wrap, step, *, with_model):
        model = MLP(rngs=nnx.Rngs(0))
        optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2, eps=1e-3))
        run = wrap(step)
        for i in range(STEPS):
            run(*[model] * with_model, optimizer, batch(i))
        assert optimizer.model is model
        return optimizer

    ours = shardstep.nnx.shard(mesh=mesh)
    assert_same(train(ours, step, with_model=False), train(nnx.jit, step, with_model=False))
    assert_same(train(ours, both, with_model=True), train(nnx.jit, both, with_model=True))


def test_a_step_that_changes_the_structure_and_returns_objects(mesh):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 64, rngs=rngs)
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            self.hidden = nnx.Intermediate(x.mean())
            return self.linear(x)

    def step(model, x):
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return {"loss": loss, "mean": nnx.Variable(x.mean()), "model": model}

    def train(wrap):
        model, run = Model(nnx.Rngs(0)), wrap(step)
        for i in range(2):
            out = run(model, batch(i)["image"].reshape(32, 64))
            assert out["model"] is model
            nnx.pop(model, nnx.Intermediate)
        return model, out["mean"], nnx.Variable(out["loss"])

    ours = train(shardstep.nnx.shard(mesh=mesh))
    assert_same(ours, train(nnx.jit))
    assert ours[0].calls[...] == 2


def test_split_and_merge_through_the_plain_shard(mesh):
    """The functional form of NNX needs no adapter."""
    model = MLP(rngs=nnx.Rngs(0))
    optimizer, metrics = make_optimizer(model), make_metrics()

    def pure(graphdef, state, batch):
        model, optimizer, metrics = nnx.merge(graphdef, state)
        loss = train_step(model, optimizer, metrics, batch)
        return nnx.state((model, optimizer, metrics)), loss

    graphdef, state = nnx.split((model, optimizer, metrics))
    ours = theirs = state
    plain, sharded = jax.jit(pure, static_argnums=0), shardstep.shard(pure, mesh, static_argnums=0)
    for i in range(STEPS):
        theirs, _ = plain(graphdef, theirs, batch(i))
        ours, _ = sharded(graphdef, ours, batch(i))
    assert_same(nnx.merge(graphdef, ours), nnx.merge(graphdef, theirs))


def test_plan_and_lower_leave_the_objects_alone(mesh):
    model = MLP(rngs=nnx.Rngs(0))
    optimizer, metrics = make_optimizer(model), make_metrics()
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer, metrics)))
    step = shardstep.nnx.shard(train_step, mesh)
    plan = step.plan(model, optimizer, metrics, batch(0))
    assert any("opt_state" in leaf.path and leaf.layout == "split(0)" for leaf in plan.leaves)
    assert "reduce-scatter" in step.lower(model, optimizer, metrics, batch(0)).compile().as_text()
    assert_same(nnx.state((model, optimizer, metrics)), before)


def test_errors_name_the_users_arguments(mesh):
    model = MLP(rngs=nnx.Rngs(0))
    step = shardstep.nnx.shard(train_step, mesh, batch_argnames="examples")
    with pytest.raises(shardstep.ShardstepError, match=r"was called with model, optimizer, metrics, batch"):
        step(model, make_optimizer(model), make_metrics(), batch(0))


def test_importing_shardstep_imports_no_framework():
    code = "import sys, shardstep; assert not {'flax', 'keras', 'optax', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Odd(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(67, 129, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(129, 67, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jnp.tanh(self.hidden(x))))


def test_objects_are_born_sharded():
    def create(seed):
        model = Odd(rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @shardstep.nnx.shard
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    shapes = nnx.eval_shape(lambda: create(0))
    model, optimizer = step.plan(*shapes, jax.ShapeDtypeStruct((16, 67), jnp.float32)).init(create, 0)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), nnx.state(create(0)[0], nnx.Param))
    assert any(isinstance(x, shardstep.Padded) for x in jax.tree.leaves(nnx.state(optimizer)))
    losses = [float(step(model, optimizer, jnp.ones((16, 67)))) for _ in range(3)]
    assert losses[2] < losses[0]


def test_a_step_may_be_a_method_of_the_model():
    class Regression(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((64, 96)))

        @shardstep.nnx.shard()
        def train(self, x):
            self.w[...] = self.w[...] - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(self.w[...])

    model, w, x = Regression(), jnp.ones((64, 96)), jnp.ones((16, 64)) / 8
    model.train(x)
    np.testing.assert_allclose(model.w[...], w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), rtol=1e-5)
    assert model.train.plan(x).leaves
