"""Contractions: every decision is right (simulated), and those that training lives on are offered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulate import verify

from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split
from shardstep._src.rules import Site, rule_for

R, P = REPLICATED, PARTIAL
S0, S1, S2, S3 = map(Split, range(4))


def batch(dim, outer=1):
    return Split(dim, outer, batch=True)


def draw(*shape, dtype=jnp.float32):
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.integers(-3, 4, shape), dtype)  # small integers: sums are exact in any order


def contractions(fun, *args):
    eqns = jax.make_jaxpr(fun)(*args).eqns
    return [e for e in eqns if e.primitive.name in ("dot_general", "conv_general_dilated")]


def decide(eqn, placements, n=2, wants=()):
    inputs, outputs = (tuple(Array(v.aval.shape, v.aval.dtype) for v in vs) for vs in (eqn.invars, eqn.outvars))
    return rule_for(eqn.primitive)(Site(eqn.primitive, eqn.params, inputs, outputs, n, wants), placements)


def offers(eqn, placements):
    """[(operands, result), ...] or None, for examples that stay where they are."""
    decisions = decide(eqn, placements)
    return decisions if decisions is None else [(d.operands, *d.results) for d in decisions if not d.visit]


def visits(eqn, placements, want=None):
    """[(operands, result, home), ...] for examples that go to the weight; without a home, the result stays."""
    decisions = [d for d in decide(eqn, placements, wants=(want,)) if d.visit]
    assert all(d.visit.on_trial for d in decisions)
    return [(d.operands, *d.results, *d.visit.homes) for d in decisions]


# --- dot_general -----------------------------------------------------------------------------------------------------

X, W = draw(6, 4), draw(4, 8)
MATMUL = {
    "batch stays split": ((batch(0), R), [((S0, R), S0)]),
    "weight split on its output": ((R, S1), [((R, S1), S1)]),
    "contracted: the replicated side is sliced": ((R, S0), [((S1, S0), P)]),
    "both contracted": ((S1, S0), [((S1, S0), P)]),
    "free x free: one is gathered": ((S0, S1), [((S0, R), S0), ((R, S1), S1)]),
    "free x contracted": ((S0, S0), [((S0, R), S0), ((S1, S0), P)]),
    "the state yields (free)": ((batch(0), S1), [((S0, R), S0)]),
    "the state yields (contracted)": ((batch(0), S0), [((S0, R), S0)]),
    "the state yields (on the left)": ((S0, batch(1)), [((R, S1), S1)]),
    "two batches": ((batch(0), batch(1)), [((S0, R), S0), ((R, S1), S1)]),
    "outer splits are carried": ((batch(0, 3), R), [((Split(0, 3), R), Split(0, 3))]),
    "outer splits are contracted": ((Split(1, 2), Split(0, 2)), [((Split(1, 2), Split(0, 2)), P)]),
    "linear on the left": ((P, R), [((P, R), P), ((R, R), R)]),
    "linear on the right": ((R, P), [((R, P), P), ((R, R), R)]),
    "a partial meets the batch": ((batch(0), P), [((S0, R), S0)]),
    "a partial meets the state": ((P, S1), [((R, S1), S1), ((P, R), P)]),
    "both partial": ((P, P), [((P, R), P), ((R, P), P), ((S1, S0), P), ((R, R), R)]),
    "a partial maximum is reduced": ((Partial("max"), R), [((R, R), R)]),
    "nothing to decide": ((R, R), [((R, R), R)]),
}


@pytest.mark.parametrize("case", MATMUL)
def test_matmul_offers(case):
    placements, expected = MATMUL[case]
    assert offers(*contractions(jnp.matmul, X, W), placements) == expected


VISITS = {
    "every replica makes its columns": ((batch(0), S1), [((R, S1), S1, S0)]),
    "every replica makes a term": ((batch(0), S0), [((S1, S0), P, S0)]),
    "the weight is on the left": ((S0, batch(1)), [((S0, R), S0, S1)]),
    "no weight that is split": ((batch(0), R), []),
    "nobody is an example": ((S0, S1), []),
    "all are examples": ((batch(0), batch(1)), []),
}


@pytest.mark.parametrize("case", VISITS)
def test_examples_visit_weights(case):
    placements, expected = VISITS[case]
    found = visits(*contractions(jnp.matmul, X, W), placements)
    assert found == expected
    assert all(home.batch for *_, home in found)


@pytest.mark.parametrize(("want", "operands"), [(S0, (S1, R)), (S1, (R, S1))])
def test_weight_gradients_are_made_where_they_are_wanted(want, operands):
    (eqn,) = contractions(lambda x, y: jnp.einsum("bi,bj->ij", x, y), X, draw(6, 8))
    assert offers(eqn, (batch(0), batch(0))) == [((S0, S0), P)]
    assert visits(eqn, (batch(0), batch(0)), want) == [(operands, want)]
    assert visits(eqn, (batch(0), batch(0)), batch(0)) == []  # that is how examples are wanted


@pytest.mark.parametrize("how", ["free", "contracted", "gradient"])
def test_visits_are_right(how):
    spec = {"free": "bi,ij->bj", "contracted": "bj,ij->bi", "gradient": "bi,bj->ij"}[how]
    shapes = {"free": [(6, 4), (4, 8)], "contracted": [(6, 8), (4, 8)], "gradient": [(6, 4), (6, 8)]}[how]
    arrays = [draw(*shape) for shape in shapes]
    verify(lambda x, y: jnp.einsum(spec, x, y), *arrays, n=2, only=["dot_general"], wants=True)


def test_results_remember_the_batch():
    (eqn,) = contractions(jnp.matmul, X, W)
    assert decide(eqn, (batch(0), S1))[0].results[0].batch
    assert not decide(eqn, (R, S1))[0].results[0].batch


EINSUMS = {
    "dense": ("bi,ij->bj", (6, 4), (4, 8), {((S0, R), (S0,)), ((S1, S0), (P,))}),
    "sequence dense": ("bti,ij->btj", (4, 2, 6), (6, 4), {((S0, R), (S0,)), ((S1, R), (S1,))}),
    "scores": ("bthd,bshd->bhts", (4, 2, 2, 4), (4, 6, 2, 4), {((S0, S0), (S0,)), ((S3, S3), (P,))}),
    "mix": ("bhts,bshd->bthd", (4, 2, 2, 4), (4, 4, 2, 4), {((S0, S0), (S0,))}),
    "batched matmul": ("bij,bjk->bik", (4, 2, 6), (4, 6, 2), {((S0, S0), (S0,)), ((S2, S1), (P,))}),
    "outer product": ("i,j->ij", (4,), (6,), {((S0, R), (S0,)), ((R, S0), (S1,))}),
    "inner product": ("ij,ij->", (4, 6), (4, 6), {((S0, S0), (P,)), ((S1, S1), (P,))}),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum(name):
    spec, x, y, expected = EINSUMS[name]
    offered = verify(lambda x, y: jnp.einsum(spec, x, y), draw(*x), draw(*y), n=2, outers=(1,))["dot_general"]
    assert expected <= offered


@pytest.mark.parametrize("name", ["scores", "mix", "sequence dense"])
def test_einsum_gradients(name):
    spec, x, y, _ = EINSUMS[name]

    def gradients(x, y):
        out, pull = jax.vjp(lambda x, y: jnp.einsum(spec, x, y), x, y)
        return pull(out)

    verify(gradients, draw(*x), draw(*y), n=2, outers=(1,), only=["dot_general"])


def test_training_step_of_a_dense_net():
    """Three replicas; forward keeps the batch split, the weight gradients are contractions over it."""

    def loss(weights, x, y):
        hidden = jnp.tanh(x @ weights[0])
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    offered = verify(jax.grad(loss), [draw(3, 6), draw(6, 3)], draw(6, 3), draw(6, 3), n=3, only=["dot_general"])
    assert ((S0, R), (S0,)) in offered["dot_general"]
    assert ((S0, S0), (P,)) in offered["dot_general"]


def test_time_major_batch_is_carried_inside_a_merged_dimension():
    """(T, B) -> (T*B): the split is inside; forward and weight gradient both follow it."""
    merged = batch(0, outer=3)
    loss = lambda w, x: jnp.sum((x @ w) ** 2)  # noqa: E731
    forward, back = contractions(jax.grad(loss), draw(4, 6), draw(12, 4))
    assert offers(forward, (merged, R)) == [((merged, R), merged)]
    assert offers(back, (merged, merged)) == [((merged, merged), P)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.complex64])
def test_dtypes(dtype):
    offered = verify(jnp.matmul, draw(4, 4, dtype=dtype), draw(4, 2, dtype=dtype), n=2, outers=(1,))
    assert ((S1, S0), (P,)) in offered["dot_general"]


def test_preferred_element_type():
    matmul = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32)  # noqa: E731
    verify(matmul, draw(4, 4, dtype=jnp.bfloat16), draw(4, 2, dtype=jnp.bfloat16), n=2)


# --- conv_general_dilated --------------------------------------------------------------------------------------------


def conv(strides=(1, 1), padding="SAME", layout=("NHWC", "HWIO", "NHWC"), **options):
    return lambda x, w: jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **options)


def conv_transpose(x, w):
    return jax.lax.conv_transpose(x, w, (2, 2), "SAME")


# the convolution, the shape of x, the shape of w
CONVS = {
    "plain": (conv(), (4, 5, 5, 2), (3, 3, 2, 4)),
    "pointwise": (conv(), (4, 4, 4, 2), (1, 1, 2, 4)),
    "strided": (conv((2, 2)), (4, 6, 6, 2), (3, 3, 2, 4)),
    "valid": (conv(padding="VALID"), (4, 5, 5, 2), (3, 3, 2, 4)),
    "dilated": (conv(rhs_dilation=(2, 2)), (4, 6, 6, 2), (3, 3, 2, 4)),
    "upsampling": (conv(lhs_dilation=(2, 2), padding=((1, 1), (1, 1))), (4, 4, 4, 2), (3, 3, 2, 4)),
    "transposed": (conv_transpose, (4, 4, 4, 2), (3, 3, 2, 4)),
    "grouped": (conv(feature_group_count=2), (4, 5, 5, 4), (3, 3, 2, 8)),
    "grouped, strided": (conv((2, 2), feature_group_count=4), (4, 5, 5, 8), (3, 3, 2, 8)),
    "depthwise": (conv(feature_group_count=4), (4, 5, 5, 4), (3, 3, 1, 4)),
    "depthwise, multiplier": (conv(feature_group_count=2), (4, 5, 5, 2), (3, 3, 1, 8)),
    "batch grouped": (conv(batch_group_count=2), (4, 5, 5, 2), (3, 3, 2, 4)),
    "channels first": (conv(layout=("NCHW", "OIHW", "NCHW")), (4, 2, 5, 5), (4, 2, 3, 3)),
    "text": (conv((1,), "VALID", ("NWC", "WIO", "NWC")), (4, 6, 2), (3, 2, 4)),
}


def gradients(fun):
    def pull(x, w):
        out, vjp = jax.vjp(fun, x, w)
        return vjp(out)

    return pull


# What they add to the others is geometry, which the rule does not read (and the next test, which is fast, has all).
SAME_INDICES = ("pointwise", "valid", "dilated", "transposed", "grouped, strided", "depthwise", "text")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) if n in SAME_INDICES else n for n in CONVS]
)
def test_conv_and_both_gradients(name):
    fun, x, w = CONVS[name]
    outers = (1, 2) if "grouped" in name else (1,)
    verify(gradients(fun), draw(*x), draw(*w), n=2, outers=outers, only=["conv_general_dilated"])


@pytest.mark.parametrize("name", [name for name in CONVS if name != "batch grouped"])
def test_conv_keeps_the_batch_split_forward_and_back(name):
    """Forward and dx stay split on the examples; dw is a sum over them, also when the groups move about."""
    fun, x, w = CONVS[name]
    forward, *backward = contractions(gradients(fun), draw(*x), draw(*w))
    (weight_gradient,) = [e for e in backward if is_weight_gradient(e)]
    (input_gradient,) = [e for e in backward if not is_weight_gradient(e)]
    for eqn in (forward, input_gradient):
        assert offers(eqn, (batch(0), R)) == [((S0, R), S0)]
        for state in map(Split, range(len(w))):
            assert offers(eqn, (batch(0), state)) == [((S0, R), S0)], "the state yields"
    assert offers(weight_gradient, (batch(0), batch(0))) == [((S0, S0), P)]


def is_weight_gradient(eqn):
    """The examples, dimension 0 of both operands, are the contracted features."""
    spec = eqn.params["dimension_numbers"]
    return spec.lhs_spec[1] == spec.rhs_spec[1] == 0


CONV_OFFERS = {
    "output features": ("plain", (R, S3), [((R, S3), S3)]),
    "input features": ("plain", (R, S2), [((S3, S2), P)]),
    "linear in the input": ("plain", (P, R), [((P, R), P), ((R, R), R)]),
    "linear in the weight": ("plain", (R, P), [((R, P), P), ((R, R), R)]),
    "a window needs its neighbours": ("strided", (S1, R), None),
    "a window of one does not": ("pointwise", (S1, R), [((S1, R), S1)]),
    "whole groups": ("depthwise", (S3, R), [((S3, S3), S3)]),
    "whole groups, from the weight": ("grouped", (R, S3), [((S3, S3), S3)]),
    "inside every group": ("grouped", (R, Split(3, 2)), [((R, Split(3, 2)), Split(3, 2))]),
    "contracted inside every group": ("grouped", (R, S2), [((Split(3, 2), S2), P)]),
    "examples inside every batch group": ("batch grouped", (Split(0, 2), R), [((Split(0, 2), R), S0)]),
    "whole batch groups": ("batch grouped", (S0, R), [((S0, S3), S3)]),
}


@pytest.mark.parametrize("case", CONV_OFFERS)
def test_conv_offers(case):
    name, placements, expected = CONV_OFFERS[case]
    fun, x, w = CONVS[name]
    assert offers(*contractions(fun, draw(*x), draw(*w)), placements) == expected


def test_whole_groups_change_the_group_count():
    fun, x, w = CONVS["depthwise"]
    (decision,) = decide(*contractions(fun, draw(*x), draw(*w)), (R, S3))
    assert decision.params["feature_group_count"] == 2


def test_an_ensemble_of_convolutions():
    """vmap over x and w puts the members into groups: a split of the members is a split of whole groups."""
    fun, x, w = CONVS["plain"]
    offered = verify(jax.vmap(fun), draw(4, *x), draw(4, *w), n=2, only=["conv_general_dilated"])
    assert ((S3, S3), (S3,)) in offered["conv_general_dilated"]


# --- ragged_dot_general ----------------------------------------------------------------------------------------------


def test_ragged_dot():
    offered = verify(jax.lax.ragged_dot, draw(6, 4), draw(2, 4, 2), jnp.array([4, 2], jnp.int32), n=2)
    assert set(offered["ragged_dot_general"]) == {((R, R, R), (R,)), ((P, R, R), (P,)), ((R, P, R), (P,))}
