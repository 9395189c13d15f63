"""Which loops that look something up are scans over a stack, and that such a scan computes the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardstep._src.capture.looked_up_layers import layers_in_turn
from shardstep._src.capture.simplification import simplify
from shardstep._src.core import compat
from shardstep._src.core.pieces import evaluate
from shardstep._src.core.program import flatten

L, M = 5, 4
STACKS = {(L, M, M), (L, M)}


def params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(L, M, M)), "float32"),
        "b": jnp.asarray(rng.normal(size=(L, M)), "float32"),
    }


X = jnp.asarray(np.random.default_rng(1).normal(size=(3, M)), "float32")


def layer(w, x):
    return jnp.tanh(x @ w["w"] + w["b"])


def scanned(p, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, p)[0]


def over(indices, body=lambda p, i, x: layer(jax.tree.map(lambda w: w[i], p), x), **how):
    """A scan over the numbers of layers."""
    return lambda p, x: lax.scan(lambda x, i: (body(p, i, x), None), x, indices(), **how)[0]


def fori(lookup, start=0, stop=L):
    return lambda p, x: lax.fori_loop(start, stop, lambda i, x: layer(jax.tree.map(lambda w: lookup(w, i), p), x), x)


def at(w, i):
    return lax.dynamic_index_in_dim(w, i, keepdims=False)


def counter_in_the_carry(p, x):
    def body(carry, _):
        i, x = carry
        return (i - 1, layer(jax.tree.map(lambda w: w[i], p), x)), None

    return lax.scan(body, (jnp.int32(L - 1), x), None, length=L, reverse=True)[0][1]


def in_microbatches(p, x):
    loop = fori(at)
    return lax.scan(lambda total, part: (total + loop(p, part).sum(), None), 0.0, jnp.stack([x, 2 * x]))[0]


def twice_a_layer(p, i, x):
    """A layer is looked up twice: its gradient is a sum."""
    return layer(jax.tree.map(lambda w: w[i], p), layer(jax.tree.map(lambda w: at(w, i), p), x))


counted = functools.partial(jnp.arange, L)
IN_TURN = {
    "fori_loop, dynamic_index_in_dim": fori(at),
    "fori_loop, dynamic_slice": fori(lambda w, i: lax.dynamic_slice_in_dim(w, i, 1)[0]),
    "fori_loop, take": fori(lambda w, i: jnp.take(w, i, axis=0)),
    "fori_loop, take that clips": fori(lambda w, i: jnp.take(w, i, axis=0, mode="clip")),
    "fori_loop, at.get": fori(lambda w, i: w.at[i].get(mode="promise_in_bounds")),
    "fori_loop that starts elsewhere": fori(lambda w, i: at(w, i - 3), 3, L + 3),
    "scan over a range": over(counted),
    "scan over a range, unrolled": over(counted, unroll=2),
    "scan over a range, last first": over(counted, reverse=True),
    "scan over unsigned numbers": over(lambda: jnp.arange(L, dtype="uint8")),
    "checkpointed": over(counted, jax.checkpoint(lambda p, i, x: layer(jax.tree.map(lambda w: w[i], p), x))),
    "a counter in the carry": counter_in_the_carry,
    "in microbatches": in_microbatches,
    "for each example": lambda p, x: jax.vmap(functools.partial(fori(at), p))(x),
    "twice a layer": over(counted, twice_a_layer),
    "negative numbers": over(lambda: jnp.arange(-L, 0)),
}
NOT = {
    "the last layer first": over(lambda: jnp.arange(L)[::-1]),
    "one layer again and again": fori(lambda w, i: w[2]),
    "every layer but the last, and that again": fori(lambda w, i: at(w, jnp.minimum(i, L - 2))),
    "a layer that the data chooses": lambda p, x: over(lambda: jnp.argsort(x[0, 0] * jnp.arange(L)))(p, x),
    "all layers but one": fori(at, 1),
    "beside all layers": over(
        counted, lambda p, i, x: layer(jax.tree.map(lambda w: w[i] + (x.sum() * w).sum(0), p), x)
    ),
    "the layer before": fori(lambda w, i: at(w, i - 1)),
    "columns": lambda p, x: lax.fori_loop(
        0, M, lambda i, x: x + lax.dynamic_index_in_dim(p["w"][0], i, 1, keepdims=False) * p["b"].sum(), x
    ),
}


def programs(f):
    """The gradient of this loss, before and after, and what both compute."""
    step = jax.value_and_grad(lambda p, x: jnp.sum(f(p, x) ** 2))
    args = params(), X
    before = simplify(flatten(jax.make_jaxpr(step)(*args)))
    after = layers_in_turn(before)
    leaves = jax.tree.leaves(args)
    run = [jax.jit(functools.partial(_run, program)) for program in (before, after)]
    return before, after, *(f(*leaves) for f in run)


def _run(program, *arrays):
    return evaluate(program, arrays, lambda x: x)


def stacks_inside(program):
    """The whole stacks that innermost loops share between iterations, carry or make."""
    found = []
    for e in program.walk():
        if e.bodies and not any(i.bodies for i in e.bodies[0].equations):
            shared = e.bodies[0].inputs[: sum(compat.scan_counts(e.params))]
            made = [v for i in e.bodies[0].equations for v in i.outputs]
            found += [v.array.shape for v in (*shared, *made) if v.array.shape in STACKS]
    return found


def scans(program):
    """Of each loop, the shapes that it takes and makes slice by slice."""
    found = []
    for e in program.walk():
        if str(e.primitive) == "scan":
            consts, carried = compat.scan_counts(e.params)
            takes, makes = e.inputs[consts + carried :], e.outputs[carried:]
            found.append([sorted(a.array.shape for a in each if a.array.shape in STACKS) for each in (takes, makes)])
    return found


@pytest.mark.parametrize("form", IN_TURN)
def test_a_loop_that_looks_up_each_layer_in_turn_is_a_scan_over_layers(form):
    before, after, expected, found = programs(IN_TURN[form])
    assert stacks_inside(before) and not stacks_inside(after)
    takes, makes = zip(*scans(after), strict=True)
    assert {s for each in takes for s in each} == STACKS  # forward
    assert (L, M, M) in takes[-1] and makes[-1] == sorted(STACKS)  # backward
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_it_is_the_scan_that_one_would_write():
    """Equation by equation, but for the counter."""
    _, after, *_ = programs(over(counted))
    _, by_hand, *_ = programs(scanned)
    primitives = [[str(e.primitive) for e in p.walk() if e.outputs[0].array.shape] for p in (after, by_hand)]
    assert sorted(primitives[0]) == sorted(primitives[1]) and scans(after) == scans(by_hand)


@pytest.mark.parametrize("form", NOT)
def test_any_other_loop_is_left_as_it_is(form):
    before, after, *_ = programs(NOT[form])
    assert after is before


def test_a_sum_that_does_not_start_at_zero_is_left_as_it_is():
    def f(p, x):
        def body(i, total):
            return total + jnp.zeros_like(total).at[i].set(x.sum() * i)

        return lax.fori_loop(0, L, body, p["b"])

    program = simplify(flatten(jax.make_jaxpr(f)(params(), X)))
    assert layers_in_turn(program) is program
