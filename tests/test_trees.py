"""Trees of every kind: nodes that look at their children, empty ones, aliased leaves, deep ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import shardstep

X = jax.random.normal(jax.random.key(1), (16, 8))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Strict:
    """Takes arrays only, whoever makes it."""

    w: Any
    scale: Any
    nothing: None = None
    empty: tuple[()] = ()
    name: str = dataclasses.field(default="strict", metadata={"static": True})

    def __post_init__(self):
        assert isinstance(self.w, jax.Array | jax.ShapeDtypeStruct) and self.w.ndim == 2
        assert jnp.issubdtype(self.scale.dtype, jnp.floating)


def update(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def strict_step(state, x):
    w, loss = update(state.w, x)
    return dataclasses.replace(state, w=w, scale=state.scale * 2), loss


def strict():
    return Strict(jnp.ones((8, 16)), jnp.float32(1.0))


def test_nodes_that_look_at_their_children():
    sharded = shardstep.shard(strict_step)
    plan = sharded.plan(strict(), X)
    assert [x.mesh.size for x in jax.tree.leaves(plan.shardings)] == [8, 8, 8]
    assert shardstep.check(sharded, strict(), X).within(1e-5)
    born = plan.init(strict)
    state, _ = sharded(born, X)
    assert isinstance(state, Strict) and float(state.scale) == 2


def test_loss_scale_objects():
    def step(w, scale, x):
        w, loss = update(w, x)
        return w, scale.adjust(jnp.isfinite(loss)), loss

    scale = jmp.DynamicLossScale(jnp.float32(2.0**15))
    _, scale, _ = shardstep.shard(step)(jnp.ones((8, 16)), scale, X)
    assert isinstance(scale, jmp.DynamicLossScale) and float(scale.loss_scale) == 2.0**15 and int(scale.counter) == 1


def test_the_same_array_twice():
    def step(state, x):
        w, loss = update(state["w"], x)
        return {"w": w, "target": 0.9 * state["target"] + 0.1 * w}, loss

    w = jnp.ones((8, 16))
    sharded, expected = shardstep.shard(step), step({"w": w, "target": w}, X)[0]
    for _ in range(2):  # what the user holds is not given away
        state, _ = sharded({"w": w, "target": w}, X)
        np.testing.assert_allclose(np.asarray(state["target"]), np.asarray(expected["target"]), rtol=1e-5)
    again, _ = sharded({"w": state["w"], "target": state["w"]}, X)
    assert np.isfinite(np.asarray(again["target"])).all()


@pytest.mark.parametrize("depth", [3, 300])
def test_deep_trees(depth):
    def step(state, x):
        w, loss = update(jax.tree.leaves(state)[0], x)
        return jax.tree.unflatten(jax.tree.structure(state), [w]), loss

    state = jnp.ones((8, 16))
    for i in range(depth):
        state = {"inner": state} if i % 2 else [state, None, ()]
    out, _ = shardstep.shard(step)(state, X)
    assert jax.tree.structure(out) == jax.tree.structure(state)
