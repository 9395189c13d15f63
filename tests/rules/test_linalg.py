"""Linear algebra: stacked problems stay split, matrices are gathered, solutions are linear in the right-hand side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg
from simulate import verify

from shardstep._src.core import compat
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Split
from shardstep._src.rules import Site, rule_for

R, P = REPLICATED, PARTIAL
S0, S1, S2, S3 = map(Split, range(4))


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def positive(*shape):
    x = draw(*shape)
    return x @ jnp.swapaxes(x, -1, -2) / 9 + jnp.eye(shape[-1])  # well conditioned: terms of a sum may cancel


A = positive(4, 2, 4, 4)
TAUS = draw(4, 2, 4) / 9

FACTORIZATIONS = {
    "cholesky": (lambda a: jnp.linalg.cholesky(a), (A,)),
    "eigh": (lambda a: jnp.linalg.eigh(a), (A,)),
    "eig": (lambda a: jnp.linalg.eig(a), (A,)),
    "svd": (lambda a: jnp.linalg.svd(a), (A,)),
    "qr": (lambda a: jnp.linalg.qr(a), (A,)),
    "lu": (lambda a: linalg.lu(a), (A,)),
    "schur": (lambda a: linalg.schur(a), (A,)),
    "hessenberg": (lambda a: linalg.hessenberg(a), (A,)),
    "tridiagonal": (lambda a: linalg.tridiagonal(a), (A,)),
    "householder_product": (lambda a, taus: linalg.householder_product(a, taus), (A, TAUS)),
    "symmetric_product": (lambda a, c: linalg.symmetric_product(a, c, symmetrize_output=False), (A, A)),
    "geqrf": (lambda a: compat.primitive("geqrf").bind(a), (A,)),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_stacked_matrices_stay_split(name):
    fun, args = FACTORIZATIONS[name]
    offered = verify(fun, *args, n=2, only=[name])[name]
    for split in (S0, S1, Split(0, 2)):
        assert any(set(operands + results) == {split} for operands, results in offered), f"{split} is gathered"
    whole = {S2, S3}
    assert not any(whole & set(operands) for operands, _ in offered), "a matrix was cut"


def test_values_only_and_pivots():
    """Results of other ranks: singular values, pivots, permutations."""
    assert ((S0,), (S0,)) in verify(lambda a: jnp.linalg.svd(a, compute_uv=False), A, n=2)["svd"]
    offered = verify(lambda a: linalg.lu_pivots_to_permutation(linalg.lu(a)[1], 4), A, n=2)
    assert ((S1,), (S1,)) in offered["lu_pivots_to_permutation"]
    pivoted = verify(lambda a: linalg.qr(a, pivoting=True), A, n=2)
    assert ((S0,), (S0, S0, S0)) in pivoted["qr"]


def test_one_split_matrix_is_gathered_and_the_user_hears_of_it():
    a = positive(4, 4)
    (eqn,) = jax.make_jaxpr(lambda a: compat.primitive("cholesky").bind(a))(a).eqns
    site = Site(eqn.primitive, eqn.params, (Array(a.shape, a.dtype),), (Array(a.shape, a.dtype),), 2)
    rule = rule_for(eqn.primitive)
    assert rule(site, (S0,)) is None and rule(site, (S1,)) is None
    for whole in (R, P):
        assert [(d.operands, d.results) for d in rule(site, (whole,))] == [((R,), (R,))]


@pytest.mark.parametrize("left_side", [True, False])
@pytest.mark.parametrize("transpose_a", [True, False])
def test_triangular_solve(left_side, transpose_a):
    solve = lambda a, b: linalg.triangular_solve(  # noqa: E731
        a, b, left_side=left_side, transpose_a=transpose_a, lower=True
    )
    b = draw(4, 4, 2) if left_side else draw(4, 2, 4)
    offered = verify(solve, A[:, 0], b, n=2)["triangular_solve"]
    free, solved = (S2, S1) if left_side else (S1, S2)
    assert ((S0, S0), (S0,)) in offered
    assert ((R, free), (free,)) in offered
    assert ((R, P), (P,)) in offered
    assert not any(operands[1] == solved for operands, _ in offered)


def test_tridiagonal_solve():
    lower, upper = draw(4, 4).at[:, 0].set(0), draw(4, 4).at[:, -1].set(0)
    args = (lower, 5 + draw(4, 4) ** 2, upper, draw(4, 4, 2))
    offered = verify(linalg.tridiagonal_solve, *args, n=2, only=["tridiagonal_solve"])["tridiagonal_solve"]
    assert ((S0, S0, S0, S0), (S0,)) in offered
    assert ((R, R, R, S2), (S2,)) in offered
    assert ((R, R, R, P), (P,)) in offered


def test_ormqr():
    ormqr = compat.primitive("ormqr")
    a, taus = compat.primitive("geqrf").bind(A[:, 0])
    fun = lambda a, taus, c: ormqr.bind(a, taus, c, left=True, transpose=False)  # noqa: E731
    offered = verify(fun, a, taus, draw(4, 4, 2), n=2)["ormqr"]
    assert ((S0, S0, S0), (S0,)) in offered
    assert ((R, R, P), (P,)) in offered


def test_gradient_of_a_gaussian_likelihood():
    """One covariance per example: cholesky, triangular solves, and their gradients."""

    def loss(a, b):
        factor = jnp.linalg.cholesky(a)
        white = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
        return jnp.sum(white**2) + 2 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)))

    verify(jax.grad(loss), A[:, 0], draw(4, 4, 2), n=2, outers=(1,), only=["cholesky", "triangular_solve"])


X = draw(4, 6, 8)
TRANSFORMS = {
    "fft": lambda x: jnp.fft.fft(x),
    "ifft": lambda x: jnp.fft.ifft(x),
    "rfft": lambda x: jnp.fft.rfft(x),
    "irfft": lambda x: jnp.fft.irfft(x + 1j * x),
    "rfft2": lambda x: jnp.fft.rfft2(x),
    "gradient": jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.rfft(x)) ** 2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_fft(name):
    offered = verify(TRANSFORMS[name], X, n=2, only=["fft"])["fft"]
    assert ((S0,), (S0,)) in offered
    assert ((P,), (P,)) in offered
    assert not any(S2 in operands for operands, _ in offered)
    assert (((S1,), (S1,)) in offered) == (name != "rfft2")
