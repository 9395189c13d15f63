"""A padded leaf is an array to everyone: to JAX, and to the libraries that states are handed to."""

from __future__ import annotations

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import shardstep

SHAPE = (67, 131)  # 8 divides neither
X = jnp.ones((8, 67)) / 67


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


SHARDED = shardstep.shard(step, weights="sharded", donate_argnums=())


@pytest.fixture(scope="module")
def value():
    return jnp.arange(67.0 * 131.0).reshape(SHAPE)


@pytest.fixture(scope="module")
def padded(value):
    leaf, _ = SHARDED.place(value, X)
    assert type(leaf) is shardstep.Padded and leaf.data.shape != SHAPE
    return leaf


def test_it_is_an_array(padded):
    assert isinstance(padded, jax.Array) and not isinstance(padded, jax.core.Tracer)
    assert eqx.is_array(padded) and eqx.is_inexact_array(padded) and eqx.is_array_like(padded)
    assert jax.tree.structure({"w": padded}).num_leaves == 1
    assert jax.typeof(padded).shape == SHAPE == jax.eval_shape(lambda w: w, padded).shape


def test_every_public_name_of_an_array_answers_for_the_logical_one(padded, value):
    names = [n for n in dir(jax.Array) if not n.startswith("_")]
    silent = [n for n in names if n not in vars(shardstep.Padded)]
    assert len(names) > 60 and not silent
    for name in ("T", "mean", "sum", "real", "nbytes", "size", "ndim", "itemsize", "dtype", "shape"):
        ours, theirs = getattr(padded, name), getattr(value, name)
        if callable(theirs):
            ours, theirs = ours(), theirs()
        assert np.all(np.asarray(ours) == np.asarray(theirs)), name
    index = padded.addressable_shards[0].index
    np.testing.assert_array_equal(padded.addressable_shards[0].data, np.asarray(value)[index])
    np.testing.assert_array_equal(padded.addressable_data(0), value)


WAYS = {
    "jnp": lambda w: jnp.concatenate([jnp.where(w > 3, w, 0), jnp.zeros_like(w)]),
    "lax": lambda w: jax.lax.add(w, w),
    "operators": lambda w: 2 * w - w / (1 + w) + w[3],
    "grad": jax.grad(lambda w: jnp.sum(w**2)),
    "vmap": jax.vmap(lambda row: row * 2),
    "jit": jax.jit(lambda w: w * 2),
    "cond": lambda w: jax.lax.cond(True, lambda a: a, lambda a: a * 2, w),
    "fori_loop": lambda w: jax.lax.fori_loop(0, 2, lambda i, a: a * 2, w),
    "filter_jit": eqx.filter_jit(lambda w: w * 2),
    "filter_grad": eqx.filter_grad(lambda w: jnp.sum(w**2)),
    "partition and combine": lambda w: eqx.combine(*eqx.partition({"w": w, "f": jnp.tanh}, eqx.is_array))["w"],
    "tree_at": lambda w: eqx.tree_at(lambda t: t["w"], {"w": w}, replace_fn=lambda w: w + 1)["w"],
    "global norm": lambda w: optax.global_norm({"w": w}),
    "zeros like": lambda w: optax.tree.zeros_like({"w": w})["w"],
    "cast": lambda w: optax.tree.cast({"w": w}, jnp.bfloat16)["w"],
    "apply updates": lambda w: optax.apply_updates({"w": w}, {"w": w})["w"],
    "optimizer": lambda w: optax.adam(1e-3).update({"w": w}, optax.adam(1e-3).init({"w": w}))[0]["w"],
    "device_put": lambda w: jax.device_put(w, jax.devices()[1]),
    "device_get": jax.device_get,
    "a step under jit": jax.jit(lambda w: SHARDED(w, X)),
    "a step under scan": lambda w: jax.lax.scan(lambda w, x: (SHARDED(w, x), 0.0), w, jnp.stack([X, X]))[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_where_an_array_goes(way, padded, value):
    ours, theirs = WAYS[way](padded), WAYS[way](value)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=1e-5)


def test_flax_serialization(padded, value):
    text = flax.serialization.to_bytes({"w": padded})
    np.testing.assert_array_equal(flax.serialization.from_bytes({"w": padded}, text)["w"], value)
    assert text == flax.serialization.to_bytes({"w": value})


def test_orbax_without_us(padded, value, tmp_path):
    plain = ocp.PyTreeCheckpointer()
    plain.save(tmp_path / "plain", {"w": padded})
    np.testing.assert_array_equal(plain.restore(tmp_path / "plain")["w"], value)
    np.testing.assert_array_equal(plain.restore(tmp_path / "plain", item={"w": padded})["w"], value)
    with ocp.StandardCheckpointer() as standard:
        standard.save(tmp_path / "standard", {"w": padded})
        standard.wait_until_finished()
        restored = standard.restore(tmp_path / "standard", {"w": padded})["w"]
    np.testing.assert_array_equal(restored, value)
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": padded}))
        manager.wait_until_finished()
        for target in ({"w": padded}, {"w": ocp.utils.to_shape_dtype_struct(padded)}):
            managed = manager.restore(0, args=ocp.args.StandardRestore(target))["w"]
            np.testing.assert_array_equal(managed, value)
    np.testing.assert_allclose(SHARDED(restored, X), SHARDED(padded, X))


def test_equinox_serialisation(padded, value, tmp_path):
    """Equinox compares the types of leaves exactly, so the target is a structure of shapes or the logical state."""
    eqx.tree_serialise_leaves(tmp_path / "w.eqx", {"w": padded})
    for like in (jax.eval_shape(lambda: {"w": value}), shardstep.logical({"w": padded})):
        np.testing.assert_array_equal(eqx.tree_deserialise_leaves(tmp_path / "w.eqx", like)["w"], value)
