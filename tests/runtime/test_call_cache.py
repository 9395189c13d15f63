"""Calls in a training loop: recognised without looking at each leaf, and never mistaken for one another."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardstep
from shardstep._src.api import Rewritten


@pytest.fixture
def looked(monkeypatch):
    """How often all arguments of a call were looked at."""
    calls = []
    place = Rewritten.place
    monkeypatch.setattr(Rewritten, "place", lambda self, leaves: calls.append(len(leaves)) or place(self, leaves))
    return calls


def step(state, batch, scale=1.0):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * scale * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}, loss


def create(rows=64):
    params = {"w": jnp.linspace(-1, 1, rows * 32).reshape(rows, 32), "b": jnp.zeros(32)}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "count": 0}


def batches(rows=64, examples=16):
    rng = np.random.default_rng(0)
    while True:
        yield rng.standard_normal((examples, rows), np.float32)


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), 1e-5, 1e-6), a, b)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("rows", [64, 61])  # 61 * 4 KiB: padded
def test_a_loop_is_recognised_and_right(mesh, looked, weights, rows):
    options = shardstep.Options(min_shard_bytes=64)
    ours, plain = shardstep.shard(step, mesh, weights=weights, options=options), jax.jit(step)
    a, b = create(rows), create(rows)
    for _, batch in zip(range(6), batches(rows), strict=False):
        a, la = ours(a, batch)
        b, lb = plain(b, batch)
        same(la, lb)
    same(a, b)
    assert len(looked) == 2  # the first lays out, the second is found in place, the others are like it


def test_another_batch_and_other_arguments_are_not_mistaken(mesh, looked):
    ours, plain = shardstep.shard(step, mesh, batch_argnums=1, static_argnames="scale"), jax.jit(step)
    a, b = create(), create()
    kinds = [(16, 1.0)] * 4 + [(24, 1.0)] * 2 + [(16, 2.0)] * 4 + [(16, 1.0)] * 3
    for examples, scale in kinds:
        batch = next(batches(examples=examples))
        a, la = ours(a, batch, scale=scale)
        b, lb = plain(b, batch, scale=scale)
        same(la, lb)
    same(a, b)
    assert len(looked) < len(kinds)


def test_state_that_was_moved_is_laid_out_again(mesh, looked):
    options = shardstep.Options(min_shard_bytes=64)
    ours, plain = shardstep.shard(step, mesh, weights="sharded", options=options), jax.jit(step)
    a, b, everywhere = create(), create(), NamedSharding(mesh, PartitionSpec())
    for i, batch in zip(range(8), batches(), strict=False):
        a, _ = ours(a, batch)
        b, _ = plain(b, batch)
        if i == 4:
            a = jax.device_put(a, everywhere)
    same(a, b)
    assert len(looked) > 2


def loop(ours, times=4):
    state = create()
    for _, batch in zip(range(times), batches(), strict=False):
        previous = state
        state, _ = ours(state, batch)
    return previous, state


def test_donated_state_is_refused_in_the_middle_of_a_loop(mesh):
    ours = shardstep.shard(step, mesh)
    previous, state = loop(ours)
    with pytest.raises(shardstep.ShardstepError, match="donated to an earlier call"):
        ours(previous, next(batches()))
    ours(state, next(batches()))  # nothing is lost
    with pytest.raises(shardstep.ShardstepError, match="donated to an earlier call"):
        ours(state, next(batches()))


def test_one_array_in_two_places_in_the_middle_of_a_loop(mesh):
    ours, plain = shardstep.shard(step, mesh, weights="replicated"), jax.jit(step)
    _, state = loop(ours)
    state["momentum"]["b"] = state["params"]["b"]
    host, batch = jax.tree.map(np.asarray, state), next(batches())
    same(ours(state, batch), plain(host, batch))


def test_under_a_trace_nothing_is_remembered(mesh):
    ours = shardstep.shard(step, mesh)
    _, state = loop(ours)
    batch = next(batches())
    shapes = jax.eval_shape(ours, state, batch)
    assert shapes[1].shape == ()
    host = jax.tree.map(np.asarray, state)
    same(ours(state, batch), jax.jit(step)(host, batch))


def test_a_step_keeps_nobody_alive(mesh):
    ours = shardstep.shard(step, mesh)
    state, batch = create(), jnp.asarray(next(batches()))
    seen = [weakref.ref(x) for x in jax.tree.leaves((state, batch)) if isinstance(x, jax.Array)]
    for _ in range(4):
        state, _ = ours(state, batch)
    seen += [weakref.ref(x) for x in jax.tree.leaves(state)]
    del state, batch
    gc.collect()
    assert [r() for r in seen] == [None] * len(seen)
