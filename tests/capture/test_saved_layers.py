"""What a loop saves for the backward pass is not what its stacks hold already, and it computes the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import shardstep
from shardstep._src.capture.looked_up_layers import layers_in_turn
from shardstep._src.capture.saved_layers import read_from_their_stacks
from shardstep._src.capture.simplification import simplify
from shardstep._src.core import compat
from shardstep._src.core.pieces import evaluate
from shardstep._src.core.program import flatten

L, M, N = 5, 4, 6
W = jnp.asarray(np.random.default_rng(0).normal(size=(L, M, N)), "float32")
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, M)), "float32")


def there_and_back(w, x):
    return jnp.tanh(x @ w) @ w.T


def through_heads(w, x):
    """As attention does it: a matrix seen as one for each head."""
    heads = jnp.tanh(jnp.einsum("bm,mhk->bhk", x, w.reshape(M, 2, N // 2)))
    return jnp.einsum("bhk,mhk->bm", heads, w.reshape(M, 2, N // 2))


def heads_first(w, x):
    """Turned twice: a batched product, one for each head."""
    heads = w.reshape(M, 2, N // 2).transpose(1, 0, 2)
    return jnp.einsum("hbk,hmk->bm", jnp.tanh(jnp.einsum("bm,hmk->hbk", x, heads)), heads)


def over(layer, **how):
    return lambda w, x: lax.scan(lambda x, w: (layer(w, x), None), x, w, **how)[0]


def of_several(w, x):
    """One loop reads what two others have saved."""
    return over(there_and_back)(w, over(there_and_back)(w, x))


SAVED = {
    "transposed": over(there_and_back),
    "reshaped": over(through_heads),
    "reshaped and transposed": over(heads_first),
    "last first": over(there_and_back, reverse=True),
    "unrolled": over(there_and_back, unroll=2),
    "two loops": of_several,
    "for each example": lambda w, x: jax.vmap(functools.partial(over(there_and_back), w))(x),
    "looked up": lambda w, x: lax.fori_loop(0, L, lambda i, x: there_and_back(w[i], x), x),
}


def returned_too(w, x):
    x, turned = lax.scan(lambda x, w: (there_and_back(w, x), w.T), x, w)
    return x * turned.sum()


def of_another_loop(w, x):
    """The layers are no stack of the loop that reads them: they are made as it goes."""
    return over(lambda w, x: there_and_back(jnp.sin(w), x))(w, x)


def programs(f):
    """The gradient of this loss, before and after, and what both compute."""
    return both(jax.value_and_grad(lambda w, x: jnp.sum(f(w, x) ** 2)))


def both(step):
    before = layers_in_turn(simplify(flatten(jax.make_jaxpr(step)(W, X))))
    after = read_from_their_stacks(before)
    run = [jax.jit(functools.partial(evaluate, p, cast=lambda x: x)) for p in (before, after)]
    return before, after, *(f([W, X]) for f in run)


def slices(program):
    """The stacks as large as W that loops take and make."""
    takes, makes = [], []
    for e in program.walk():
        if str(e.primitive) == "scan":
            consts, carried = compat.scan_counts(e.params)
            takes += [a for a in e.inputs[consts + carried :] if a.array.size == W.size]
            makes += [v for v in e.outputs[carried:] if v.array.size == W.size]
    return takes, makes


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", SAVED)
def test_what_a_stack_holds_already_is_not_saved(form):
    before, after, expected, found = programs(SAVED[form])
    loops = 2 if form == "two loops" else 1
    assert len(slices(before)[1]) > loops  # beside gradients
    takes, makes = slices(after)
    assert len(makes) == loops and len(takes) == 2 * loops  # each loop reads the stack once
    assert_same(found, expected)


@pytest.mark.parametrize("f", [returned_too, of_another_loop])
def test_what_is_read_elsewhere_or_computed_is_still_made(f):
    before, after, expected, found = programs(f)
    assert len(slices(after)[1]) == len(slices(before)[1]) - (f is returned_too)
    assert_same(found, expected)


def test_in_the_body_of_another_loop():
    """Microbatches, each with its forward and backward pass."""

    def step(w, x):
        def add(total, part):
            return total + jax.grad(lambda w: jnp.sum(over(there_and_back)(w, part) ** 2))(w), None

        return lax.scan(add, jnp.zeros_like(w), jnp.stack([x, 2 * x]))

    before, after, expected, found = both(step)
    assert (len(slices(before)[1]), len(slices(after)[1])) == (2, 1)
    assert_same(found, expected)


def test_a_program_without_such_loops_is_left_as_it_is():
    program = simplify(flatten(jax.make_jaxpr(jax.grad(lambda w: jnp.sum((X @ w[0] @ w[1].T) ** 2)))(W)))
    assert read_from_their_stacks(program) is program


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_the_step_computes_the_same_and_keeps_no_second_stack(weights):
    w = jnp.asarray(np.random.default_rng(2).normal(size=(6, 64, 128)) / 16, "float32")
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 64)), "float32")

    def step(state, x):
        grads = jax.grad(lambda w: jnp.mean(over(there_and_back)(w, x) ** 2))(state["w"])
        momentum = 0.9 * state["m"] + grads
        return {"w": state["w"] - 0.1 * momentum, "m": momentum}

    state = {"w": w, "m": jnp.zeros_like(w)}
    sharded = shardstep.shard(step, Mesh(np.array(jax.devices()), ("data",)), weights=weights)
    text = sharded.lower(state, x).compile().as_text()
    assert "f32[6,128,64]" not in text and "f32[6,128,64]" in jax.jit(step).lower(state, x).compile().as_text()
    expected, found = state, state
    for _ in range(3):
        expected, found = jax.jit(step)(expected, x), sharded(found, x)
    found, expected = jax.tree.leaves(shardstep.logical(found)), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
