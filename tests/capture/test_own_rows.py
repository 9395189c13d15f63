"""`x[arange(B), i]`: rows that look into themselves send no indices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import mesh_of

import shardstep

B, T, C = 24, 3, 10

LOOKUPS = {
    "a class of each example": lambda h, i: h[:, 0][jnp.arange(B), i[:, 0]],
    "a token of each example": lambda h, i: h[jnp.arange(B), i[:, 0] % T],
    "a class of each token": lambda h, i: h[jnp.arange(B)[:, None], jnp.arange(T)[None], i],
    "the columns the other way round": lambda h, i: h.transpose(2, 0, 1)[i[:, 0], jnp.arange(B)],
    "numbers that count from the end, or too far": lambda h, i: h[:, 0][jnp.arange(B), i[:, 0] * 7 - 30],
    "a change": lambda h, i: h[:, 0].at[jnp.arange(B), i[:, 0]].set(2.0),
    "an addition": lambda h, i: h[:, 0].at[jnp.arange(B), i[:, 0]].add(h[:, 1, 0]),
}
ELSEWHERE = {
    "fewer rows than there are": lambda h, i: h[:, 0][jnp.arange(B // 2), i[: B // 2, 0]],
    "the next row": lambda h, i: h[:, 0][jnp.arange(B) - 1, i[:, 0]],
}


def planned(look):
    def step(w, x, i):
        def loss(w):
            return jnp.mean(jnp.sin(look((x @ w).reshape(B, T, C), i)) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    arguments = jnp.sin(jnp.arange(16.0 * T * C)).reshape(16, T * C), jnp.cos(jnp.arange(B * 16.0)).reshape(B, 16)
    arguments = *arguments, (jnp.arange(B * T) * 7 % C).reshape(B, T)
    sharded = shardstep.shard(step, mesh_of(8), batch_argnums=(1, 2), options=shardstep.Options(min_shard_bytes=256))
    wanted, found = jax.jit(step)(*arguments), shardstep.logical(sharded(*arguments))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), wanted, found)
    return sharded.plan(*arguments), arguments[0].nbytes


@pytest.mark.parametrize("name", LOOKUPS)
def test_no_index_and_no_row_is_sent(name):
    """The gradient is reduced, the weights and the loss: nothing else."""
    plan, weights = planned(LOOKUPS[name])
    assert not plan.fallbacks
    assert sum(c.total for c in plan.collectives) <= 2 * weights * 7 / 8 + 64


@pytest.mark.parametrize("name", ELSEWHERE)
def test_rows_that_look_elsewhere_are_left_alone(name):
    """The numbers are right because what others hold is sent: it is more than the gradient and the weights."""
    plan, weights = planned(ELSEWHERE[name])
    assert sum(c.total for c in plan.collectives) > 2 * weights * 7 / 8 + 64
