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


# -- microbatches that the replicas do not divide ----------------------------------------------------------------------


def reshaped(w, x, count):
    def one(total, part):
        value, gradient = jax.value_and_grad(plain)(w, part)
        return total + gradient, value

    total, values = jax.lax.scan(one, jnp.zeros_like(w), x.reshape(count, -1, x.shape[1]))
    return total, values.mean()


def sliced(w, x, count):
    def one(i, sums):
        part = jax.lax.dynamic_slice_in_dim(x, i * (len(x) // count), len(x) // count)
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(plain)(w, part)[::-1])

    return jax.lax.fori_loop(0, count, one, (jnp.zeros_like(w), 0.0))


@pytest.mark.parametrize("accumulated", [reshaped, sliced])
@pytest.mark.parametrize(("examples", "count", "replicas"), [(24, 2, 8), (6, 3, 3)])
def test_microbatches_that_replicas_do_not_divide_are_shared_with_padding(accumulated, examples, count, replicas):
    """The examples move once, in front of the loop; where they are gathered for it, the plan says so first."""

    def step(state, x):
        w, momentum = state
        gradient, value = accumulated(w, x, count)
        momentum = 0.9 * momentum + gradient
        return (w - 0.1 * momentum, momentum), value

    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(64, 96)) * 0.1, jnp.float32)
    x = draw.normal(size=(examples, 64)).astype("f")
    sharded = shardstep.shard(step, jax.sharding.Mesh(np.asarray(jax.devices()[:replicas]), ("data",)))
    arguments = (w, jnp.zeros_like(w)), x
    found = shardstep.check(sharded, *arguments)
    assert found.within(1e-5), str(found)
    plan = sharded.plan(*arguments)
    for fallback in plan.fallbacks:
        assert fallback.bytes == x.nbytes * (replicas - 1) / replicas
        assert "not sharded" in str(plan).partition("leaf")[0]
    moved = [c for c in plan.collectives if c.shape == x.shape or c.shape[:1] == (count,)]
    assert len(moved) == 1 and moved[0].times == 1
    assert moved[0].kind == "all-to-all" or plan.fallbacks
    share = -(-examples // count // replicas)
    schedule = sharded.program(arguments, {})[0].decided.schedule
    products = [s for body in bodies(schedule) for s in body.steps if str(s.equation.primitive) == "dot_general"]
    assert products and all(any(str(p[0]).startswith("split") for p in s.operands) for s in products)
    assert any(block.shape == (share, 96) for s in products for block in s.ruling.blocks)


def bodies(schedule):
    for step in schedule.steps:
        for body in step.bodies:
            yield body
            yield from bodies(body)
