"""What newer JAX keeps as one primitive until it is lowered is read as what it stands for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from steps import mesh_of

import shardstep


def test_unique_with_a_size_is_known_by_its_parts():
    def step(table, x, ids):
        def loss(table):
            found, back = jnp.unique(ids, return_inverse=True, size=32, fill_value=0)
            return jnp.mean((x - table[found][back]) ** 2)

        value, gradient = jax.value_and_grad(loss)(table)
        return table - gradient, value

    arguments = jnp.cos(jnp.arange(640.0)).reshape(40, 16), jnp.ones((48, 16)), jnp.arange(48) * 7 % 10
    sharded = shardstep.shard(step, mesh_of(8), batch_argnums=(1, 2))
    plan = sharded.plan(*arguments)
    assert all("no rule" not in f.why and __file__ in f.line for f in plan.fallbacks)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        jax.jit(step)(*arguments),
        shardstep.logical(sharded(*arguments)),
    )
