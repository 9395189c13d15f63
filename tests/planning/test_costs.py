"""What a schedule is predicted to take: flops as XLA counts them, loops as often as they run, and a table of chips."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from steps import estimated, mesh_of

import shardstep
from shardstep._src.core.program import flatten
from shardstep._src.machine.links import CHIPS
from shardstep._src.machine.topology import describe
from shardstep._src.planning.flops import flops, multiplies


def counted(fun, *args):
    """Flops of the products in a function, from shapes."""
    program = flatten(jax.make_jaxpr(fun)(*args))
    found = [e for e in program.walk() if multiplies(e.primitive)]
    assert found
    return sum(flops(e.primitive, e.params, [a.array for a in e.inputs], [v.array for v in e.outputs]) for e in found)


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PRODUCTS = {
    "matrices": (jnp.matmul, shaped(24, 40), shaped(40, 56)),
    "stacked matrices": (jnp.matmul, shaped(3, 24, 40), shaped(3, 40, 56)),
    "two contracted dimensions": (lambda a, b: jnp.einsum("abc,bcd->ad", a, b), shaped(8, 6, 5), shaped(6, 5, 7)),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        shaped(2, 12, 12, 3),
        shaped(3, 3, 3, 8),
    ),
    "convolution in groups": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        ),
        shaped(2, 13, 13, 8),
        shaped(3, 3, 2, 8),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_take_the_flops_that_xla_counts(name):
    fun, *args = PRODUCTS[name]
    expected = jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]
    assert counted(fun, *args) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("fun", "factor"),
    [(jnp.linalg.cholesky, 1 / 3), (lambda a: lax.linalg.eigh(a)[0], 9), (lambda a: lax.linalg.lu(a)[0], 2 / 3)],
)
def test_factorizations_take_a_multiple_of_the_cube(fun, factor):
    assert counted(fun, shaped(5, 32, 32)) == pytest.approx(5 * factor * 32**3)


def test_every_chip_says_what_it_has():
    for name, chip in CHIPS.items():
        assert chip.memory > 0 and chip.source
        assert chip.peak.of(jnp.bfloat16) >= chip.peak.of(jnp.float32) >= chip.peak.of(jnp.float64) > 0
        assert chip.peak.of(jnp.complex64) == chip.peak.of(jnp.float32)
        assert math.isinf(chip.capacity) == (name == "cpu")
    assert describe("v5p:4x4x4").chip.capacity > describe("v5e:4x4").chip.capacity


def step_seconds(layers, scanned, topology="v5e:8"):
    """The predicted seconds of a step through a number of equal layers."""

    def step(state, x):
        def loss(w):
            if scanned:
                out, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            else:
                out = x
                for i in range(layers):
                    out = jnp.tanh(out @ w[i])
            return jnp.mean(out**2)

        grads = jax.grad(loss)(state)
        return state - 0.1 * grads

    options = shardstep.Options(topology=topology)
    sharded = shardstep.shard(step, mesh_of(8), weights="replicated", options=options)
    arguments = shaped(layers, 1024, 1024), shaped(8 * 4096, 1024)
    return estimated(sharded, *arguments).seconds


def test_a_loop_takes_as_long_as_its_iterations():
    few, many = step_seconds(2, True), step_seconds(8, True)
    assert many.products == pytest.approx(4 * few.products)
    assert many.passes == pytest.approx(4 * few.passes, rel=0.3)
    unrolled = step_seconds(8, False).products  # does without one product of 24: nobody reads the gradient of x
    assert many.products == pytest.approx(24 / 23 * unrolled)


def test_products_take_flops_over_peak():
    """Forward, and two products backward for each layer but the first, which needs no gradient of its input."""
    one = 2 * 4096 * 1024 * 1024 / CHIPS["v5e"].peak.of(jnp.float32)
    assert step_seconds(4, False).products == pytest.approx((3 * 4 - 1) * one)


def test_a_plan_carries_predictions():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    options = shardstep.Options(topology="v5e:8")
    plan = shardstep.shard(step, mesh_of(8), options=options).plan(shaped(512, 512), shaped(64, 512))
    assert 0 < plan.wire_seconds.sharded < plan.step_seconds.sharded
    assert plan.memory == CHIPS["v5e"].capacity and plan.fits
    assert "predicted peak" in str(plan) and "predicted step" in str(plan)
