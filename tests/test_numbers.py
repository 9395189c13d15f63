"""Python numbers among the arguments: constants where the step hands them back, traced where it changes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardstep

X = jax.random.normal(jax.random.key(1), (16, 8))


class Scaled(eqx.Module):
    """Arrays and numbers, and nothing that would tell it from a dictionary."""

    weight: jax.Array
    scale: Any
    size: int = 4
    count: Any = 0

    def __call__(self, x):
        return self.scale * x @ self.weight + jnp.zeros(self.size).sum()


def model(**numbers):
    return Scaled(jax.random.normal(jax.random.key(0), (8, 4)), **{"scale": 0.5, **numbers})


def loss_of(model, x):
    return jnp.mean((model(x) - 1.0) ** 2)


OPTIMIZER = optax.sgd(0.1)


def train_step(model, opt_state, x):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def run(step, model, steps=3):
    state = model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(steps):
        *state, loss = step(*state, X)
    return state[0], float(loss)


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b) or (hasattr(a, "dtype") and hasattr(b, "dtype"))
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["plain", "filter_jit"])
@pytest.mark.parametrize("scale", [0.5, 2, True])
def test_a_number_that_comes_back_is_a_constant(wrap, scale):
    sharded = shardstep.shard(wrap(train_step))
    ours, loss = run(sharded, model(scale=scale))
    theirs, expected = run(eqx.filter_jit(train_step), model(scale=scale))
    assert ours.scale == scale and type(ours.scale) is type(scale)
    assert ours.size == 4 and type(ours.size) is int
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_same(ours, theirs)
    assert len(sharded._programs) == 1


def test_other_values_of_a_constant_give_other_programs():
    sharded = shardstep.shard(train_step)
    for scale in (0.5, 0.25, 0.5):
        assert run(sharded, model(scale=scale))[1] == pytest.approx(
            run(eqx.filter_jit(train_step), model(scale=scale))[1], rel=1e-5
        )


def counting(model, opt_state, x):
    model, opt_state, loss = train_step(model, opt_state, x)
    return eqx.tree_at(lambda m: m.count, model, model.count + 1), opt_state, loss


@pytest.mark.parametrize("count", [0, 0.0], ids=["int", "float"])
def test_a_counter_beside_a_constant(count):
    """The counter is not trained either, though the constant beside it is handed back as it came."""
    sharded = shardstep.shard(counting)
    ours, loss = run(sharded, model(count=count))
    _, expected = run(eqx.filter_jit(train_step), model())
    assert ours.scale == 0.5 and type(ours.scale) is float
    assert float(ours.count) == 3
    assert loss == pytest.approx(expected, rel=1e-5)


class State(NamedTuple):
    w: Any
    step: Any
    lr: Any
    rounds: Any = 2


def plain_step(state, x):
    def loss_of(w):
        return jnp.mean((x @ w) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state.w)
    w = state.w
    for _ in range(state.rounds):
        w = w - state.lr * grad
    return state._replace(w=w, step=state.step + 1), loss


def test_counters_are_traced_and_sizes_are_not():
    traces = []

    def step(state, x):
        traces.append(1)
        return plain_step(state, x)

    sharded = shardstep.shard(step)
    state = State(jnp.ones((8, 4)), 0, 0.1)
    for i in range(4):
        state, _ = sharded(state, X)
        assert int(state.step) == i + 1
    assert isinstance(state.step, jax.Array) and type(state.lr) is float and type(state.rounds) is int
    assert len(traces) == 2
    expected = State(jnp.ones((8, 4)), 0, 0.1)
    for _ in range(4):
        expected, _ = plain_step(expected, X)
    np.testing.assert_allclose(np.asarray(state.w), np.asarray(expected.w), rtol=1e-5)


def test_a_number_that_varies_is_compiled_no_more_than_twice():
    """A rate inside the state that its user changes is traced from the second value on, since nothing else changes."""
    sharded = shardstep.shard(plain_step)
    w = jnp.ones((8, 4))
    for i in range(5):
        rate = 0.1 / (i + 1)
        state, _ = sharded(State(w, 0, rate), X)
        np.testing.assert_allclose(np.asarray(state.w), np.asarray(plain_step(State(w, 0, rate), X)[0].w), rtol=1e-5)
    assert len({id(p) for p in sharded._programs.values()}) == 2


def test_a_bare_number_is_traced():
    traces = []

    def step(w, x, rate):
        traces.append(1)
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - rate * grad, loss

    sharded = shardstep.shard(step)
    w = jnp.ones((8, 4))
    for rate in (0.1, 0.2, 0.3):
        w, _ = sharded(w, X, rate)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda n, w: jnp.zeros(n).sum(),  # a shape
        lambda n, w: {3: 0.0}[n],  # a hash
        lambda n, w: 1.0 if n > 2 else 0.0,  # a branch
        lambda n, w: sum(w[i].sum() for i in range(n)),  # a range
    ],
    ids=["shape", "hash", "branch", "range"],
)
@pytest.mark.parametrize("bare", [True, False])
def test_a_number_that_cannot_be_traced_is_a_constant(use, bare):
    def step(w, x, n):
        n = n if bare else n["n"]
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) + use(n, w))(w)
        return w - 0.1 * grad, loss

    w, n = jnp.ones((8, 4)), 3 if bare else {"n": 3}
    assert_same(shardstep.shard(step)(w, X, n), step(w, X, n))


def test_a_number_that_must_be_traced_is_traced():
    def step(state, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "n": state["n"].astype(jnp.int32) + 1}, loss

    state, _ = shardstep.shard(step)({"w": jnp.ones((8, 4)), "n": 0}, X)
    assert int(state["n"]) == 1


def test_an_honest_error_is_that_of_the_plain_step():
    def step(state, x):
        return state, x @ jnp.ones((7, 7)) * state["n"]

    with pytest.raises(TypeError, match="dot_general"):
        shardstep.shard(step)({"w": jnp.ones((8, 4)), "n": 0}, X)


def test_born_state_keeps_its_numbers():
    sharded = shardstep.shard(train_step)
    opt_state = OPTIMIZER.init(eqx.filter(model(), eqx.is_inexact_array))
    born = sharded.plan(model(), opt_state, X).init(model)
    assert type(born.scale) is float and type(born.size) is int
    assert run(sharded, born)[1] == pytest.approx(run(eqx.filter_jit(train_step), model())[1], rel=1e-5)


def test_check_compares_arrays_only():
    opt_state = OPTIMIZER.init(eqx.filter(model(), eqx.is_inexact_array))
    assert shardstep.check(train_step, model(), opt_state, X).within(1e-5)
