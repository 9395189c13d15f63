"""What readers want of a value reaches the equation that makes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from steps import mesh_of

import shardstep
from shardstep._src.core.layout import Split

WIDTH, EXAMPLES = 64, 512


def behind_a_barrier(make):
    """A step whose examples stand in one barrier with what `make` fills from a weight."""

    def loss(weight, x):
        x, made = lax.optimization_barrier((x, make(weight, x)))
        return jnp.mean(jnp.tanh(x @ weight) ** 2) + jnp.mean(made.sum(1) * x[:, 0])

    def step(weight, x):
        value, gradient = jax.value_and_grad(loss)(weight, x)
        return weight - gradient, value

    return step


@pytest.mark.parametrize(
    "make",
    [
        lambda weight, x: jnp.full((EXAMPLES, 4 * WIDTH), weight[0, 0]),
        lambda weight, x: jnp.broadcast_to(jnp.tile(weight[0], 4), (EXAMPLES, 4 * WIDTH)),
        lambda weight, x: jnp.tanh(jnp.zeros((EXAMPLES, WIDTH)) + weight[1]),
    ],
    ids=["filled", "broadcast", "computed"],
)
def test_what_stands_beside_examples_in_a_barrier_is_made_for_each_replica_s_own(make):
    """Under remat, constants and cotangents do: made whole, each replica held them for the examples of all."""
    sharded = shardstep.shard(behind_a_barrier(make), mesh_of(8), batch_argnums=1)
    shapes = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)
    planned, _ = sharded.program(shapes, {})
    barriers = [s for s in planned.decided.schedule.steps if s.equation.primitive.name == "optimization_barrier"]
    assert barriers
    for step in barriers:
        assert all(isinstance(layout[0], Split) and layout[0].dim == 0 for layout in step.operands), step
