"""Around a step: what JAX does to a sharded one, and steps that are jitted already."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardstep

SPLIT = shardstep.Options(min_shard_bytes=0)
X = jax.random.normal(jax.random.key(1), (16, 8))


def step(w, x, rounds, *, mode):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    for _ in range(rounds if {"plain": True}[mode] else 0):
        w = w - 0.1 * grad
    return w, loss


@pytest.mark.parametrize("argnums", [2, (2,), -1, None], ids=str)
def test_static_arguments_are_read_from_the_inner_jit(argnums):
    names = "mode" if argnums is not None else ("mode", "rounds")
    jitted = functools.partial(jax.jit, static_argnums=argnums, static_argnames=names)(step)
    sharded = shardstep.shard(jitted)
    for rounds in (1, 3):
        w, _ = sharded(jnp.ones((8, 16)), X, rounds, mode="plain")
        expected, _ = step(jnp.ones((8, 16)), X, rounds, mode="plain")
        np.testing.assert_allclose(np.asarray(w), np.asarray(expected), rtol=1e-5)


# -- JAX around a sharded step ----------------------------------------------------------------------------------------


def momentum(state, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * m, "m": m}, loss


def start(rows):
    return {"w": jnp.ones((rows, 3)), "m": jnp.zeros((rows, 3))}


def examples(rows):
    return jax.random.normal(jax.random.key(2), (16, rows))


def once(sharded, state, x):
    return sharded(state, x)


def under_jit(sharded, state, x):
    return jax.jit(sharded)(state, x)


def under_a_donating_jit(sharded, state, x):
    return jax.jit(sharded, donate_argnums=0)(state, x)


def in_a_scan(sharded, state, x):
    state, losses = jax.lax.scan(sharded, state, x[None])
    return state, losses[0]


def in_a_jitted_scan(sharded, state, x):
    return jax.jit(lambda state: in_a_scan(sharded, state, x))(state)


def without_jit(sharded, state, x):
    with jax.disable_jit():
        return sharded(state, x)


def debugging_nans(sharded, state, x):
    with jax.debug_nans(True):
        return sharded(state, x)


AROUND = [once, under_jit, under_a_donating_jit, in_a_scan, in_a_jitted_scan, without_jit, debugging_nans]
PADDED = [pytest.param(around, 10, id=f"{around.__name__}-padded") for around in AROUND]
EVEN = [
    pytest.param(around, 16, id=f"{around.__name__}-even", marks=[pytest.mark.thorough] * (around is without_jit))
    for around in AROUND
]


@pytest.mark.parametrize(("around", "rows"), PADDED + EVEN)
def test_what_jax_puts_around_a_step(around, rows, mesh):
    """First on state as it came, then on state as it rests, `Padded` leaves included."""
    sharded, x = shardstep.shard(momentum, mesh, weights="sharded", options=SPLIT), examples(rows)
    expected = ours = start(rows)
    for act in (around, once, around, around):
        expected, loss = momentum(expected, x)
        shapes = jax.eval_shape(sharded, ours, x)
        ours, found = act(sharded, ours, x)
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, (expected, loss))
        assert isinstance(ours["m"], shardstep.Padded) == (rows == 10 and act in (once, without_jit, debugging_nans))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (ours, found), (expected, loss))


def by_sign(state, x):
    """Of the zeros in padding this makes NaN."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad / jnp.abs(grad)}, loss


@pytest.mark.parametrize("rows", [16, 10], ids=["even", "padded"])
def test_debug_nans_tells_of_nan_among_the_arguments(rows, mesh):
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    sharded = shardstep.shard(step, mesh, batch_argnums=1, options=shardstep.Options(min_shard_bytes=0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        sharded(jnp.ones((rows, 3)), np.full((16, rows), np.nan, np.float32))
    assert np.all(np.isfinite(sharded(jnp.ones((rows, 3)), np.ones((16, rows), np.float32))))


def test_debug_nans_says_nothing_of_padding(mesh):
    sharded, x = shardstep.shard(by_sign, mesh, weights="sharded", options=SPLIT), examples(10)
    expected = ours = {"w": jnp.ones((10, 3))}
    for debug in (False, True, True, False):
        with jax.debug_nans(debug), jax.debug_infs(debug):
            ours, _ = sharded(ours, x)
        expected, _ = by_sign(expected, x)
        np.testing.assert_allclose(ours["w"], expected["w"], rtol=1e-5)
    assert isinstance(ours["w"], shardstep.Padded) and np.isnan(ours["w"].data[-1]).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        sharded(ours, x * np.nan)


# -- already jitted ---------------------------------------------------------------------------------------------------

JITS = {"jax": jax.jit, "equinox": eqx.filter_jit, "nnx": nnx.jit}
DONATING = {
    "jax": functools.partial(jax.jit, donate_argnums=0),
    "jax, by name": functools.partial(jax.jit, donate_argnames="state"),
    "equinox": functools.partial(eqx.filter_jit, donate="all"),
    "nnx": functools.partial(nnx.jit, donate_argnums=0),
    "none": lambda step: step,
}


def at_rest(step, **options):
    sharded = shardstep.shard(step, **options)
    return sharded, *sharded.place(start(16), examples(16))


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_a_jit_that_says_nothing_of_donation_changes_nothing(jit):
    sharded, state, x = at_rest(jit(momentum))
    first, _ = sharded(state, x)
    assert all(leaf.is_deleted() for leaf in state.values())
    np.testing.assert_allclose(first["w"], momentum(start(16), x)[0]["w"], rtol=1e-5)


@pytest.mark.parametrize("jit", DONATING.values(), ids=DONATING)
def test_what_a_step_donates_is_donated(jit):
    sharded, state, x = at_rest(jit(momentum))
    sharded(state, x)
    assert all(leaf.is_deleted() for leaf in state.values())
    kept, state, x = at_rest(jit(momentum), options=shardstep.Options(donate=False))
    kept(state, x)
    assert not any(leaf.is_deleted() for leaf in state.values())


def test_some_of_the_state_is_donated():
    def step(w, m, x):
        state, loss = momentum({"w": w, "m": m}, x)
        return state["w"], state["m"], loss

    sharded = shardstep.shard(jax.jit(step, donate_argnums=1))
    w, m, x = sharded.place(*start(16).values(), examples(16))
    sharded(w, m, x)
    assert m.is_deleted() and not w.is_deleted()


def test_shardings_are_read_from_the_inner_jit():
    """Which leaf holds the examples, on which dimension, on which devices, and how state lies on other axes."""

    def step(state, table, x):  # nothing but the shardings tells the table from the examples
        state, loss = momentum(state, x.T)
        return state, loss + jnp.sum(table)

    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))

    def over(*names):
        return NamedSharding(mesh, PartitionSpec(*names))

    jitted = jax.jit(step, in_shardings=(over(None, "model"), None, over(None, "data")))
    state, table, x = {k: v.repeat(2, 1) for k, v in start(16).items()}, jnp.ones((6, 5)), examples(16).T
    sharded = shardstep.shard(jitted, mesh, axis="data", options=SPLIT)
    (rests, _) = sharded.plan(state, table, x).shardings
    assert rests[2].spec == PartitionSpec(None, "data") and rests[1].is_fully_replicated
    assert all("model" in rest.spec for rest in rests[0].values())
    ours, loss = sharded(state, table, x)
    expected, wanted = step(state, table, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (ours, loss), (expected, wanted))
    assert shardstep.shard(jitted).replicas.mesh.size == 4


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
def test_static_arguments_of_any_jit(jit):
    """`rounds` is a bare number, which a loop in Python cannot take traced."""
    kwargs = {} if jit is eqx.filter_jit else {"static_argnums": 2, "static_argnames": ("mode",)}
    sharded = shardstep.shard(jit(step, **kwargs))
    w, _ = sharded(jnp.ones((8, 16)), X, 3, mode="plain")
    np.testing.assert_allclose(w, step(jnp.ones((8, 16)), X, 3, mode="plain")[0], rtol=1e-5)
    again, _ = sharded(jnp.ones((8, 16)), X, 1, mode="plain")
    np.testing.assert_allclose(again, step(jnp.ones((8, 16)), X, 1, mode="plain")[0], rtol=1e-5)


def test_static_arguments_are_found_behind_a_wrapper():
    jitted = jax.jit(step, static_argnums=2, static_argnames=("mode",))

    @functools.wraps(jitted)
    def logged(*args, **kwargs):
        return jitted(*args, **kwargs)

    w, _ = shardstep.shard(logged)(jnp.ones((8, 16)), X, 2, mode="plain")
    np.testing.assert_allclose(w, step(jnp.ones((8, 16)), X, 2, mode="plain")[0], rtol=1e-5)
