"""Examples may change microbatches only where the loop cannot tell: each case here can, in its own way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardstep

EXAMPLES, MICROBATCHES = 64, 4
TELLS = {
    "statistics": lambda w, x: jnp.mean((((x - x.mean(0)) / (x.std(0) + 0.1)) @ w) ** 2),  # of a microbatch
    "mask": lambda w, x: jnp.mean(((x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)) @ w) ** 2),
    "place": lambda w, x: jnp.mean(((x * jnp.arange(x.shape[0])[:, None]) @ w) ** 2),
}


def plain(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def accumulate(loss, add=jnp.add):
    def step(state, x):
        w, momentum = state

        def microbatch(total, part):
            return add(total, jax.grad(loss)(w, part)), None

        parts = x.reshape(MICROBATCHES, -1, x.shape[1])
        total, _ = jax.lax.scan(microbatch, jnp.zeros_like(w), parts)
        momentum = 0.9 * momentum + total
        return (w - 0.1 * momentum, momentum), jnp.sum(w)

    return step


def examined(step):
    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(64, 96)) * 0.1, jnp.float32)
    x = draw.normal(size=(EXAMPLES, 64)).astype("f")
    sharded = shardstep.shard(step)
    found = shardstep.check(sharded, (w, jnp.zeros_like(w)), x)
    assert found.within(1e-5), str(found)
    plan = sharded.plan((w, jnp.zeros_like(w)), x)
    return [c for c in plan.collectives if EXAMPLES in c.shape and c.shape != w.shape]


def test_a_plain_sum_moves_no_examples():
    assert examined(accumulate(plain)) == []


@pytest.mark.parametrize("name", TELLS)
def test_a_loss_that_can_tell_moves_them(name):
    assert examined(accumulate(TELLS[name]))


SUMS_THAT_TELL = {
    "decay": lambda a, b: 0.9 * a + b,
    "doubling": lambda a, b: (a + a) + b,  # sums only, and yet the first microbatch counts eight times
    "nonlinear": lambda a, b: a + b * jnp.abs(b),
}


@pytest.mark.parametrize("name", SUMS_THAT_TELL)
def test_a_sum_that_can_tell_moves_them(name):
    assert examined(accumulate(plain, SUMS_THAT_TELL[name]))
