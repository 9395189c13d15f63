"""Reductions, scans, sorting, pooling: every decision is right (simulated), and the useful ones are offered."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from simulate import check_decision, verify

from shardstep._src.core import compat
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split
from shardstep._src.rules import Site, rule_for

R, P = REPLICATED, PARTIAL
MAX, MIN = Partial("max"), Partial("min")
S0, S1, S2, S3 = map(Split, range(4))


def draw(*shape, dtype=jnp.float32):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.permutation(np.prod(shape)).reshape(shape) % 17 - 8, dtype)


X = draw(4, 6, 8)


def ask(fun, *args, placements, n=2):
    """What the rule of the only equation of `fun` offers: [(operands, results), ...]."""
    (eqn,) = jax.make_jaxpr(fun)(*args).eqns
    inputs, outputs = (tuple(Array(v.aval.shape, v.aval.dtype) for v in vs) for vs in (eqn.invars, eqn.outvars))
    decisions = rule_for(eqn.primitive)(Site(eqn.primitive, eqn.params, inputs, outputs, n), placements)
    return decisions if decisions is None else [(d.operands, d.results) for d in decisions]


# --- over axes -------------------------------------------------------------------------------------------------------

#                fun                                  placement   offered
REDUCTIONS = {
    "sum, split reduced": (lambda x: lax.reduce_sum(x, (0,)), S0, [((S0,), (P,))]),
    "sum, outer split reduced": (lambda x: lax.reduce_sum(x, (0,)), Split(0, 2), [((Split(0, 2),), (P,))]),
    "sum, split kept": (lambda x: lax.reduce_sum(x, (0,)), S2, [((S2,), (S1,))]),
    "sum, outer split kept": (lambda x: lax.reduce_sum(x, (0,)), Split(2, 2), [((Split(2, 2),), (Split(1, 2),))]),
    "sum of everything": (lambda x: lax.reduce_sum(x, (0, 1, 2)), S1, [((S1,), (P,))]),
    "sum is linear": (lambda x: lax.reduce_sum(x, (0,)), P, [((P,), (P,)), ((R,), (R,))]),
    "sum, replicated": (lambda x: lax.reduce_sum(x, (0,)), R, [((R,), (R,))]),
    "sum of a partial maximum": (lambda x: lax.reduce_sum(x, (0,)), MAX, [((R,), (R,))]),
    "max, split reduced": (lambda x: lax.reduce_max(x, (0,)), S0, [((S0,), (MAX,))]),
    "max of a partial maximum": (lambda x: lax.reduce_max(x, (0,)), MAX, [((MAX,), (MAX,)), ((R,), (R,))]),
    "max of a partial sum": (lambda x: lax.reduce_max(x, (0,)), P, [((R,), (R,))]),
    "min, split reduced": (lambda x: lax.reduce_min(x, (0, 1)), S1, [((S1,), (MIN,))]),
    "prod, split kept": (lambda x: lax.reduce_prod(x, (1,)), S0, [((S0,), (S0,))]),
    "prod, split reduced": (lambda x: lax.reduce_prod(x, (1,)), S1, None),
    "prod of a partial": (lambda x: lax.reduce_prod(x, (1,)), P, [((R,), (R,))]),
    "argmax, split kept": (lambda x: lax.argmax(x, 1, jnp.int32), S2, [((S2,), (S1,))]),
    "argmax, split reduced": (lambda x: lax.argmax(x, 1, jnp.int32), S1, None),
    "cumsum beside the split": (lambda x: lax.cumsum(x, 1), S0, [((S0,), (S0,))]),
    "cumsum along the split": (lambda x: lax.cumsum(x, 1), S1, None),
    "cumsum is linear": (lambda x: lax.cumsum(x, 1), P, [((P,), (P,)), ((R,), (R,))]),
    "cumprod is not": (lambda x: lax.cumprod(x, 1), P, [((R,), (R,))]),
    "top_k beside the split": (lambda x: lax.top_k(x, 2), S0, [((S0,), (S0, S0))]),
    "top_k along the split": (lambda x: lax.top_k(x, 2), S2, None),
    "sort beside the split": (lambda x: lax.sort(x, dimension=1), S0, [((S0,), (S0,))]),
    "sort along the split": (lambda x: lax.sort(x, dimension=1), S1, None),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_offers(case):
    fun, placement, expected = REDUCTIONS[case]
    assert ask(fun, X, placements=(placement,)) == expected


def test_the_examples_stay_marked():
    (eqn,) = jax.make_jaxpr(lambda x: lax.reduce_sum(x, (0,)))(X).eqns
    site = Site(eqn.primitive, eqn.params, (Array(X.shape, X.dtype),), (Array(X.shape[1:], X.dtype),), 2)
    assert rule_for(eqn.primitive)(site, (Split(1, batch=True),))[0].results[0].batch


AXES = [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()]


FUNCTIONS = [jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean]


def every_function_and_all_axes():
    """All axes for the sum, an inner one and two at once for the others; the full product is thorough."""
    for fun in FUNCTIONS:
        for axes in AXES:
            kept = fun is jnp.sum or axes in ((1,), (0, 2))
            yield pytest.param(fun, axes, marks=[] if kept else pytest.mark.thorough, id=f"{fun.__name__}-{axes}")


@pytest.mark.parametrize(("fun", "axes"), every_function_and_all_axes())
def test_reductions(fun, axes):
    verify(lambda x: fun(x, axis=axes), X, n=2)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bfloat16, jnp.complex64])
def test_sums_of_other_dtypes(dtype):
    x = draw(6, 4, dtype=dtype)
    assert ((S0,), (P,)) in verify(lambda x: lax.reduce_sum(x, (0,)), x, n=2)["reduce_sum"]


def test_complex_numbers_have_no_partial_maximum():
    assert ask(lambda x: lax.reduce_max(x, (0,)), draw(6, 4, dtype=jnp.complex64), placements=(S0,)) is None


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_is_every_gradient_finite(axes):
    """`all` and `any` over split state must not gather it: loss scaling asks at every step."""
    flags = draw(4, 6) > -8
    assert ((S0,), (MIN,)) in verify(lambda x: jnp.all(x, axes), flags, n=2)["reduce_and"]
    assert ((S0,), (MAX,)) in verify(lambda x: jnp.any(~x, axes), flags, n=2)["reduce_or"]


def test_bitwise_reductions_of_integers_gather():
    bits = draw(4, 6, dtype=jnp.int32)
    for fun in (lax.reduce_and, lax.reduce_or, lax.reduce_xor):
        verify(lambda x, fun=fun: fun(x, (0,)), bits, n=2)
        assert ask(lambda x, fun=fun: fun(x, (0,)), bits, placements=(S0,)) is None
        assert ask(lambda x, fun=fun: fun(x, (0,)), bits, placements=(S1,)) == [((S1,), (S0,))]


def test_reduce_with_a_function():
    """Pairs of (value, index) reduced by the user's own function; the initial values are replicated."""

    def larger(x, y):
        keep = x[0] > y[0]
        return jnp.where(keep, x[0], y[0]), jnp.where(keep, x[1], y[1])

    def fun(x, i):
        return lax.reduce((x, i), (-jnp.inf, jnp.int32(-1)), larger, (1,))

    offered = verify(fun, draw(4, 6), draw(4, 6, dtype=jnp.int32), n=2)["reduce"]
    assert ((S0, S0, R, R), (S0, S0)) in offered


# --- losses and metrics ----------------------------------------------------------------------------------------------

LOSSES = {
    "softmax": lambda x: jax.nn.softmax(x),
    "softmax over the batch": lambda x: jax.nn.softmax(x, axis=0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "cross entropy": lambda x: -jnp.mean(jax.nn.log_softmax(x)[:, 0]),
    "gradient of cross entropy": jax.grad(lambda x: -jnp.mean(jax.nn.log_softmax(x)[:, 0])),
    "gradient of max": jax.grad(lambda x: jnp.max(x)),
    "variance": lambda x: jnp.var(x, axis=0),
    "accuracy": lambda x: jnp.mean(jnp.argmax(x, -1) == 1),
    "largest loss": lambda x: jnp.max(jnp.abs(x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    verify(LOSSES[name], draw(6, 4), n=2)


# --- scans and sorting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "fun", [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp], ids=lambda f: f.__name__
)
def test_cumulative(fun, axis):
    offered = verify(lambda x: fun(x, axis, reverse=axis == 1), draw(4, 4, 2), n=2)[fun.__name__]
    kept = (axis + 1) % 3
    assert ((Split(kept),), (Split(kept),)) in offered
    assert ((Split(axis),), (Split(axis),)) not in offered


@pytest.mark.parametrize("dimension", [0, 1])
def test_sort_several_operands(dimension):
    values = draw(4, 6, dtype=jnp.int32)
    fun = lambda x, i: lax.sort((x, i), dimension=dimension, num_keys=1)  # noqa: E731
    kept = Split(1 - dimension)
    offered = verify(fun, draw(4, 6), values, n=2)["sort"]
    assert ((kept, kept), (kept, kept)) in offered
    assert ask(fun, draw(4, 6), values, placements=(Split(dimension), R)) is None


def test_median_top_k_and_argsort():
    verify(lambda x: jnp.sort(x, axis=0)[2], draw(4, 6), n=2)
    verify(lambda x: jnp.argsort(x), draw(4, 6), n=2)
    verify(lambda x: lax.top_k(x, 3), X, n=2)
    verify(lambda x: lax.approx_max_k(x, 2), draw(4, 6), n=2)
    verify(lambda x: lax.approx_max_k(x, 2, reduction_dimension=0), draw(4, 6), n=2)


def test_top_k_along_another_axis():
    offered = verify(lambda x: lax.top_k(x, 2, axis=0), draw(4, 6), n=2)["top_k"]
    assert ((S1,), (S1, S1)) in offered


# --- pooling ---------------------------------------------------------------------------------------------------------

IMAGES = draw(4, 6, 6, 2)
POOLS = {
    "max": lambda x: nn.max_pool(x, (2, 2), (2, 2)),
    "max, overlapping": lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"),
    "avg": lambda x: nn.avg_pool(x, (2, 2), (2, 2)),
    "avg, overlapping": lambda x: nn.avg_pool(x, (3, 3), (2, 2), "SAME"),
    "min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling_keeps_the_batch_forward_and_back(name):
    def forward_and_back(x):
        out, pull = jax.vjp(POOLS[name], x)
        return out, pull(jnp.cos(out))

    offered = verify(forward_and_back, IMAGES, n=2, outers=(1,))
    pools = {k: v for k, v in offered.items() if k.startswith(("reduce_window", "select_and"))}
    assert pools
    for name, decisions in pools.items():
        split = [d for d in decisions if {p.dim for p in d[0] + d[1] if isinstance(p, Split)} == {0}]
        assert split, f"{name} gathers the batch"
        along = {p.dim for d in decisions for p in d[0] if isinstance(p, Split)}
        assert 1 not in along, f"{name} cannot slide over a cut"


def test_tangents_of_max_pool():
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")  # noqa: E731
    offered = verify(lambda x: jax.jvp(pool, (x,), (jnp.sin(x),)), IMAGES, n=2, outers=(1,))
    assert ((S0, S0), (S0,)) in offered["select_and_gather_add"]
    assert ((P, R), (P,)) in offered["select_and_gather_add"]


def test_window_with_a_function():
    fun = lambda x: lax.reduce_window(x, 0.5, lambda a, b: a * b + 1.0, (1, 2), (1, 2), "VALID")  # noqa: E731
    offered = verify(fun, draw(4, 6), n=2)["reduce_window"]
    assert ((S0, R), (S0,)) in offered and ((S1, R), (S1,)) not in offered


def test_scatter_with_a_function():
    """The general form of a pooling gradient; JAX has no public function for it."""
    scalar = jnp.float32(0)
    add, ge = (jax.make_jaxpr(f)(scalar, scalar) for f in (lax.add, lax.ge))
    (add, _), (ge, _) = compat.open_jaxpr(add), compat.open_jaxpr(ge)

    def scatter(operand, source, start):
        return compat.primitive("select_and_scatter").bind(
            *(operand, source, start),
            **dict(select_jaxpr=ge, select_consts=(), scatter_jaxpr=add, scatter_consts=()),
            **dict(window_dimensions=(1, 2), window_strides=(1, 2), padding=((0, 0), (0, 0))),
        )

    offered = verify(scatter, draw(4, 6), draw(4, 3), scalar, n=2)["select_and_scatter"]
    assert offered == {((S0, S0, R), (S0,)), ((R, R, R), (R,)), ((Split(0, 2), Split(0, 2), R), (Split(0, 2),))}


@pytest.mark.parametrize("padding, base_dilation", [(((0, 0), (0, 0)), (2, 1)), (((1, 0), (0, 0)), (1, 1))])
def test_a_window_of_one_that_still_moves(padding, base_dilation):
    window = lambda x: lax.reduce_window(  # noqa: E731
        x, 0.0, lax.add, (1, 2), (1, 1), padding, base_dilation=base_dilation, window_dilation=(1, 2)
    )
    offered = verify(window, draw(4, 6), n=2)["reduce_window_sum"]
    assert offered == {((R,), (R,)), ((P,), (P,))}


# --- partial maxima --------------------------------------------------------------------------------------------------

IDEMPOTENT = {
    "reduce_max": (MAX, lambda x: lax.reduce_max(x, (0,))),
    "reduce_min": (MIN, lambda x: lax.reduce_min(x, (0,))),
    "cummax": (MAX, lambda x: lax.cummax(x, 0)),
    "cummin": (MIN, lambda x: lax.cummin(x, 0)),
    "max pool": (MAX, lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")),
    "min pool": (MIN, lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 2), "VALID")),
}


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_a_maximum_of_partial_maxima(name):
    placement, fun = IDEMPOTENT[name]
    x = draw(4, 6)
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    expected = [fun(x)]
    site = Site(eqn.primitive, eqn.params, (Array(x.shape, x.dtype),), (Array(expected[0].shape, x.dtype),), 3)
    decision, whole = rule_for(eqn.primitive)(site, (placement,))
    assert (decision.operands, decision.results) == ((placement,), (placement,))
    assert (whole.operands, whole.results) == ((R,), (R,))
    check_decision(eqn, site, decision, [x], expected, np.random.default_rng(0), 3)
