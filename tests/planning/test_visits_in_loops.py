"""Few examples in each iteration of a loop: they go to the weights, which then stay where they are.

Microbatches of few examples read all weights and write all gradients in every iteration, though they need little of
either. The same loop is scheduled both ways, as outside of loops (`test_visits.py`); numbers are right either way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import F32, assert_agree
from jax import lax
from jax.sharding import Mesh
from steps import mesh_of

import shardstep
from shardstep._src.planning import visits
from shardstep._src.tools.hlo import collectives

WIDTH, LAYERS, MICROBATCHES, ENTRIES = 256, 3, 4, 512
OPTIMIZER = optax.sgd(1.0, momentum=0.9)  # Adam would make full-size steps of rounding noise


def through_layers(weights, x):
    for w in weights["layers"]:
        x = jnp.tanh(x @ w)
    return x


def scanned(weights, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(weights["layers"]))[0]


def looked_up(weights, x):
    ids = (jnp.abs(x[:, 0]) * 1000).astype(jnp.int32) % ENTRIES
    return through_layers(weights, x + weights["table"][ids])


def again(weights, x):
    return jax.checkpoint(through_layers)(weights, x)


def repeated(weights, x):
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ weights["layers"][0]), x)


def until_small(weights, x):
    """As many rounds as the largest example needs; and the gradient of what comes after them."""
    w = lax.stop_gradient(weights["layers"][0])
    x, _ = lax.while_loop(
        lambda c: (jnp.max(c[0]) > 0.5) & (c[1] < 5), lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0)
    )
    return through_layers(weights, x)


MODELS = {f.__name__: f for f in (through_layers, scanned, looked_up, again, repeated, until_small)}


def accumulating(model, dtype=jnp.float32):
    """Gradients added up over microbatches."""

    def step(state, x):
        weights, moments = state
        parts = x.reshape(MICROBATCHES, -1, x.shape[-1])

        def add(total, part):
            half = jax.tree.map(lambda w: w.astype(dtype), weights)
            loss = lambda w: jnp.mean(model(w, part.astype(dtype)).astype(jnp.float32) ** 2)  # noqa: E731
            return jax.tree.map(lambda t, g: t + g / MICROBATCHES, total, jax.value_and_grad(loss)(half)), None

        zeros = (0.0, jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), weights))
        (value, gradient), _ = lax.scan(add, zeros, parts)
        update, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(weights, update), moments), value

    return step


def at_once(model):
    """Loops over layers, none over microbatches."""

    def step(state, x):
        weights, moments = state
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(model(w, x) ** 2))(weights)
        update, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(weights, update), moments), value

    return step


def start(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    weights = {"layers": [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]}
    weights["table"] = 0.1 * jax.random.normal(keys[0], (ENTRIES, width))
    return weights, OPTIMIZER.init(weights)


def rows(count, width=WIDTH):
    return jax.random.normal(jax.random.key(1), (count, width))


@pytest.fixture
def always(monkeypatch):
    """Whatever it costs."""
    for name in ("may_pay", "may_pay_in_loops"):
        monkeypatch.setattr(visits, name, lambda schedule: True)
    for name in ("worth", "worth_in_loops"):
        monkeypatch.setattr(visits, name, lambda visited, otherwise: True)


def on_visit(sharded, *args):
    """The products of loops that examples go to weights for."""
    schedule = sharded.program(args, {})[0].decided.schedule
    found = [step for step, _ in visits.in_loops(schedule)]
    return [step for step in found if step.ruling.visit and step.ruling.visit.on_trial]


# ------------------------------------------------------ the choice ----------------------------------------------------


LARGE = 1024


def large(examples):
    """The state, and so many examples per microbatch."""
    return start(LARGE), rows(examples * MICROBATCHES, LARGE)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_nothing_of_a_weights_size_moves_or_is_held_in_the_loop(mesh, weights):
    sharded = shardstep.shard(accumulating(through_layers), mesh, weights=weights)
    plan = sharded.plan(*large(8))
    assert "few examples per replica" in plan.why_weights and "products of loops" in plan.why_weights
    # forward, the gradient of the weight, and (not for the first layer) that of the input
    assert len(on_visit(sharded, *large(8))) == (3 * LAYERS - 1 if weights == "sharded" else LAYERS)
    assert plan.wire_bytes.sharded <= plan.wire_bytes.replicated
    compiled = sharded.lower(*large(8)).compile()
    inside = [c for c in collectives(compiled.as_text()) if c.in_loop]
    assert inside and max(c.bytes for c in inside) < LARGE * LARGE * 4 / 8
    visiting = compiled.memory_analysis().temp_size_in_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "WORTH", 0.0)
        sharded = shardstep.shard(accumulating(through_layers), mesh, weights=weights)
        assert not on_visit(sharded, *large(8))
        staying = sharded.lower(*large(8)).compile().memory_analysis().temp_size_in_bytes
    gradients = LAYERS * LARGE * LARGE * 4
    assert staying - visiting > gradients / 2


def test_many_examples_stay(mesh):
    sharded = shardstep.shard(accumulating(through_layers), mesh, weights="sharded")
    assert not on_visit(sharded, *large(2048))
    assert not any(c.loop for c in sharded.plan(*large(2048)).collectives)


def test_small_weights_stay_too(mesh):
    sharded = shardstep.shard(accumulating(through_layers), mesh, weights="sharded")
    assert not on_visit(sharded, start(), rows(8 * MICROBATCHES))


def test_more_is_not_sent_for_it(mesh, monkeypatch):
    """Fewer passes over memory may be faster even so. But what is sent in all iterations must not be more."""
    monkeypatch.setattr(visits, "WORTH", float("inf"))
    sharded = shardstep.shard(accumulating(through_layers), mesh, weights="sharded")
    assert on_visit(sharded, *large(8))
    assert visits.may_pay_in_loops(sharded.program(large(256), {})[0].decided.schedule)
    assert not on_visit(sharded, *large(256))


@pytest.mark.parametrize(
    "asked", [{"reduce_dtype": jnp.bfloat16}, {"deterministic": True}, {"layers": "once"}, {"layers": "each"}]
)
def test_who_says_how_weights_travel_has_them_travel(mesh, asked):
    options = shardstep.Options(**asked)
    sharded = shardstep.shard(accumulating(through_layers), mesh, weights="sharded", options=options)
    assert not on_visit(sharded, *large(8))


def test_auto_shards_weights_that_loops_then_never_hold(mesh):
    half = accumulating(through_layers, jnp.bfloat16)
    assert shardstep.shard(half, mesh).plan(*large(8)).weights == "sharded"
    assert shardstep.shard(half, mesh).plan(*large(2048)).weights == "replicated"


# ----------------------------------------------------- the numbers ----------------------------------------------------


def agree_for_three_steps(step, mesh, x, weights):
    sharded, plain = shardstep.shard(step, mesh, weights=weights), jax.jit(step)
    ours, theirs = start(), start()
    states = [theirs]
    assert on_visit(sharded, ours, x)
    for _ in range(3):
        theirs, value = plain(theirs, x)
        states.append(theirs)
        ours, found = sharded(ours, x)
        np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_agree(states, shardstep.logical(ours), F32)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("n", "weights"),
    [(8, "sharded"), (3, "sharded"), (2, "replicated"), pytest.param(5, "sharded", marks=pytest.mark.thorough)],
)
def test_same_numbers_of_microbatches(model, n, weights):
    agree_for_three_steps(accumulating(MODELS[model]), mesh_of(n), rows(2 * n * MICROBATCHES), weights)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("model", ["scanned", "repeated", "until_small"])
@pytest.mark.parametrize(("n", "count"), [(8, 8), (3, 7), pytest.param(5, 10, marks=pytest.mark.thorough)])
def test_same_numbers_of_loops_over_layers(model, n, count):
    agree_for_three_steps(at_once(MODELS[model]), mesh_of(n), rows(count), "sharded")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("model", ["through_layers", "looked_up"])
def test_same_numbers_on_two_axes(model):
    grid = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "chips"))
    agree_for_three_steps(accumulating(MODELS[model]), grid, rows(8 * MICROBATCHES), "sharded")
