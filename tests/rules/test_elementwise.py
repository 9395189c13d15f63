"""Elementwise rules, the whole table: splits pass through, sums wait where they may, and padding spoils nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from simulate import check_decision, verify

from shardstep._src.core import compat
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split
from shardstep._src.rules import Site, contract, elementwise, rule_for

R, S, P = REPLICATED, Split, PARTIAL
SHAPE = (4, 6)  # two replicas divide both dimensions, and halves of them
MAX, MIN = Partial("max"), Partial("min")


def draw(kind: str, seed: int) -> jax.Array:
    """Operands inside the domain of (almost) everything: a NaN agrees with any NaN."""
    random = np.random.default_rng(seed)
    match kind:
        case "float":
            return jnp.asarray(random.uniform(0.1, 0.9, SHAPE), np.float32)
        case "above one":
            return jnp.asarray(random.uniform(1.1, 3, SHAPE), np.float32)
        case "half":
            return jnp.asarray(random.integers(1, 9, SHAPE), jnp.bfloat16)
        case "complex":
            return jnp.asarray(random.normal(size=SHAPE) + 1j * random.normal(size=SHAPE), np.complex64)
        case "bool":
            return jnp.asarray(random.integers(0, 2, SHAPE), np.bool_)
        case "unsigned":
            return jnp.asarray(random.integers(0, 30, SHAPE), np.uint32)
        case "int":
            return jnp.asarray(random.integers(1, 30, SHAPE), np.int32)
    raise ValueError(kind)


# Read before any test runs: a rule that one of them teaches is none of the table's.
TABLE = {p.name: p for p, rule in contract._RULES.items() if rule.__module__ == elementwise.__name__}


def of(name: str, *kinds: str):
    """The primitive itself: for those that no public function stands for, or that not every JAX has."""
    return (lambda *args: TABLE[name].bind(*args)), [draw(k, i) for i, k in enumerate(kinds)]


def calling(fun, *kinds: str):
    return fun, [draw(k, i) for i, k in enumerate(kinds)]


F, Z, U, C = "float", "int", "unsigned", "complex"

ONE_FLOAT = [
    "abs",
    "asin",
    "asinh",
    "acos",
    "atan",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "is_finite",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "neg",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
TWO_FLOATS = [
    "add",
    "atan2",
    "div",
    "eq",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "nextafter",
    "polygamma",
    "pow",
    "rem",
    "sub",
    "zeta",
]
TWO_INTEGERS = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
]

CASES = {
    **{name: calling(getattr(lax, name), F) for name in ONE_FLOAT},
    **{name: calling(getattr(lax, name), F, F) for name in TWO_FLOATS},
    **{name.removeprefix("bitwise_"): calling(getattr(lax, name), Z, Z) for name in TWO_INTEGERS},
    **{name: of(name, F, F) for name in ("add_any", "eq_to", "le_to", "lt_to")},
    **{name: of(name, F) for name in ("copy", "one_minus_square")},
    "acosh": calling(lax.acosh, "above one"),
    "bitcast_convert_type": calling(lambda x: lax.bitcast_convert_type(x, np.int32), F),
    "clamp": calling(lax.clamp, F, F, F),
    "clz": calling(lax.clz, Z),
    "complex": calling(lax.complex, F, F),
    "conj": calling(lax.conj, C),
    "convert_element_type": calling(lambda x: lax.convert_element_type(x, np.float32), "half"),
    "imag": calling(lax.imag, C),
    "integer_pow": calling(lambda x: lax.integer_pow(x, 3), F),
    "log2": calling(jnp.log2, F),  # (an older JAX makes a quotient of it, which has its own case)
    "mulhi": of("mulhi", U, U),
    "name": calling(lambda x: checkpoint_name(x, "x"), F),
    "not": calling(lax.bitwise_not, Z),
    "polynomial": of("polynomial", F, F, F, F),
    "population_count": calling(lax.population_count, U),
    "real": calling(lax.real, C),
    "reduce_precision": calling(lambda x: lax.reduce_precision(x, 8, 7), F),
    "regularized_incomplete_beta": calling(lax.betainc, F, F, F),
    "select_n": calling(lax.select_n, "bool", F, F),
    "threefry2x32": of("threefry2x32", U, U, U, U),
}

# In which operands a function is linear is mathematics: the table must say neither more nor less.
SUMS_MAY_WAIT = {
    *("add", "add_any", "sub", "neg", "real", "imag", "conj", "complex", "copy", "name"),
    *("mul", "div", "select_n", "convert_element_type"),
}


def test_every_primitive_of_the_table_is_tested_here():
    assert not set(TABLE) - set(CASES)


# They take seconds to compile, and obey the very rule of a hundred others.
SLOW_TO_COMPILE = {"igamma", "igamma_grad_a", "igammac", "regularized_incomplete_beta"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.thorough) if n in SLOW_TO_COMPILE else n for n in sorted(TABLE)]
)
def test_every_decision_is_right(name):
    fun, args = CASES[name]
    offered = verify(fun, *args, n=2, only={name})
    decisions = offered[name]
    for split in (S(0), S(1), S(0, 2)):
        assert any(set(operands) == {split} and set(results) == {split} for operands, results in decisions)
    waits = any(P in results for _, results in decisions)
    assert waits == (name in SUMS_MAY_WAIT)
    if name != "bitcast_convert_type":
        assert f"{name}, padded" in offered


def site(name, *arrays, result=None, n=2, **params):
    arrays = tuple(Array(*a) for a in arrays)
    return Site(compat.primitive(name), params, arrays, (result or arrays[0],), n, ())


def offers(site, *placements):
    return [(d.operands, d.results) for d in rule_for(site.primitive)(site, placements)]


FLOATS = (SHAPE, np.dtype(np.float32))


def test_the_state_yields_to_the_batch():
    batch = Split(0, batch=True)
    found = rule_for(lax.mul_p)(site("mul", FLOATS, FLOATS), (S(1), batch))
    assert [d.results for d in found] == [(S(0),), (S(1),)]
    assert found[0].results[0].batch


def test_a_scalar_operand_is_never_sliced():
    predicate = ((), np.dtype(np.bool_))
    where = site("select_n", predicate, FLOATS, FLOATS, result=Array(*FLOATS))
    assert offers(where, R, S(1), R) == [((R, S(1), S(1)), (S(1),))]
    verify(lambda p, x, y: lax.select_n(p, x, y), jnp.bool_(True), draw(F, 0), draw(F, 1), n=2)
    verify(lambda low, x, high: lax.clamp(low, x, high), jnp.float32(0.3), draw(F, 0), jnp.float32(0.6), n=2)


def test_a_replicated_term_joins_a_sum_as_the_term_of_one_replica():
    assert offers(site("add", FLOATS, FLOATS), P, R) == [((R, R), (R,)), ((P, P), (P,))]


def test_a_product_of_two_sums_is_reduced_first():
    assert offers(site("mul", FLOATS, FLOATS), P, P) == [((R, R), (R,))]
    assert offers(site("mul", FLOATS, FLOATS), R, P) == [((R, R), (R,)), ((R, P), (P,))]


def test_only_the_numerator_of_a_quotient_may_be_a_sum_and_only_where_nothing_is_rounded_off():
    integers = (SHAPE, np.dtype(np.int32))
    assert offers(site("div", FLOATS, FLOATS), P, R) == [((R, R), (R,)), ((P, R), (P,))]
    assert offers(site("div", FLOATS, FLOATS), R, P) == [((R, R), (R,))]
    assert offers(site("div", integers, integers), P, R) == [((R, R), (R,))]


def test_a_choice_between_sums_waits_only_if_every_replica_knows_which():
    predicate = (SHAPE, np.dtype(np.bool_))
    where = site("select_n", predicate, FLOATS, FLOATS, result=Array(*FLOATS))
    assert ((R, P, P), (P,)) in offers(where, R, P, R)
    assert offers(where, P, P, R) == [((R, R, R), (R,))]


@pytest.mark.parametrize(
    ("old", "new", "waits"),
    [
        (jnp.bfloat16, np.float32, True),
        (np.float32, jnp.bfloat16, False),
        (np.float32, np.int32, False),
        (np.float32, np.float32, True),
        (np.bool_, np.float32, False),  # true and true is true: not the sum of the two
    ],
    ids=str,
)
def test_a_cast_waits_unless_it_rounds(old, new, waits):
    result = Array(SHAPE, jnp.dtype(new))
    cast = site("convert_element_type", (SHAPE, jnp.dtype(old)), result=result, new_dtype=result.dtype)
    assert (((P,), (P,)) in offers(cast, P)) == waits


@pytest.mark.parametrize(("name", "own", "other"), [("max", MAX, MIN), ("min", MIN, MAX)])
def test_a_maximum_of_maxima_waits_and_of_nothing_else(name, own, other):
    """A replicated operand takes part on every replica: once or eight times makes no difference."""
    where = site(name, FLOATS, FLOATS)
    assert offers(where, own, R) == [((R, R), (R,)), ((own, own), (own,))]
    for wrong in (other, P):
        assert offers(where, wrong, R) == [((R, R), (R,))]
        assert offers(where, wrong, own) == [((R, R), (R,))]
    values = [draw(F, 0), draw(F, 1)]
    equation = jax.make_jaxpr(getattr(lax, name))(*values).eqns[0]
    expected = [getattr(lax, name)(*values)]
    for decision in rule_for(where.primitive)(where, (own, R)):
        check_decision(equation, where, decision, values, expected, np.random.default_rng(0), 2)


@pytest.mark.parametrize("op", [MAX, MIN])
def test_a_maximum_does_not_commute_with_a_sum_or_a_sign(op):
    assert offers(site("add", FLOATS, FLOATS), op, op) == [((R, R), (R,))]
    assert offers(site("neg", FLOATS), op) == [((R,), (R,))]
