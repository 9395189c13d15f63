"""A piece on each row of a stack: as many products as rows need, and none with a batch of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardstep._src.core.pieces import Piece, run_stacked
from shardstep._src.core.program import Program, flatten


def newton(x):
    """As a row of stacked leaves may meet it: with dimensions of size 1 in front, which products take for batches."""
    gram = jnp.einsum("...ij,...kj->...ik", x, x)
    return jnp.einsum("...ij,...jk->...ik", gram / 2, x) + x


def groups(x):
    """A batch of its own beside the row's."""
    parts = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return jnp.einsum("...igk,...jgk->...gij", parts, parts)


def turning(x):
    """Transposes between products; the last one exchanges dimensions that a product keeps."""
    product = "...ij,...jk->...ik"
    y = jnp.einsum(product, x.swapaxes(-1, -2), x)
    z = jnp.einsum(product, x, y).swapaxes(-1, -2)
    four = x.reshape(*x.shape[:-2], 2, 2, x.shape[-1]).swapaxes(-3, -2)
    return jnp.einsum("...abk,...kc->...abc", four, jnp.einsum(product, z, x))


def piece_of(f, shape, joined) -> Piece:
    row = (1, *shape) if joined else shape
    program = flatten(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(row, jnp.float32)))
    return Piece(Program(program.inputs, program.outputs, program.equations), (True,), 3, joined=joined)


def batches(jaxpr):
    """The batch sizes of all products."""
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            _, (left, _) = e.params["dimension_numbers"]
            yield tuple(e.invars[0].aval.shape[d] for d in left)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("f", [newton, groups])
def test_no_product_has_a_batch_of_one(f, joined, rows):
    piece = piece_of(f, (4, 6), joined)
    x = jax.random.normal(jax.random.key(0), (rows, 4, 6))

    def run(x):
        return run_stacked(piece, [x], lambda v: v)[0]

    found = list(batches(jax.make_jaxpr(run)(x).jaxpr))
    assert found and all(size > 1 for sizes in found for size in sizes)
    assert all(len(sizes) >= 1 for sizes in found) == (rows > 1 or f is groups)
    np.testing.assert_allclose(run(x), jnp.stack([f(row) for row in x]), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("joined", [False, True])
def test_products_read_their_factors_as_they_lie(joined, rows):
    piece = piece_of(turning, (4, 6), joined)
    x = jax.random.normal(jax.random.key(0), (rows, 4, 6))

    def run(x):
        return run_stacked(piece, [x], lambda v: v)[0]

    made = {v: e for e in jax.make_jaxpr(run)(x).jaxpr.eqns for v in e.outvars}

    def is_transposed(v):
        e = made.get(v)
        return e is not None and (
            e.primitive.name == "transpose" or (e.primitive.name == "squeeze" and is_transposed(e.invars[0]))
        )

    products = {e for e in made.values() if e.primitive.name == "dot_general"}
    assert sum(is_transposed(v) for e in products for v in e.invars) == 1
    np.testing.assert_allclose(run(x), jnp.stack([turning(row) for row in x]), rtol=1e-4)
