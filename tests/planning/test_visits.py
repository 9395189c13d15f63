"""Few examples per replica: they go to the weights, where that is faster, instead of the weights to them.

The same step is scheduled both ways and the predicted seconds decide. So the numbers must be right either way, whatever
decides. With few examples nothing of a weight's size may move; with many, each weight is gathered and scattered once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo
from agreement import F32, assert_agree
from jax.sharding import Mesh
from steps import mesh_of

import shardstep
from shardstep._src.planning import visits
from shardstep._src.tools.hlo import collectives

WIDTH, LAYERS = 1024, 3
OPTIMIZER = optax.sgd(1.0, momentum=0.9)  # Adam would make full-size steps of rounding noise


def step(state, x):
    weights, moments = state

    def loss(weights):
        h = x
        for w, b in weights:
            h = jnp.tanh(h @ w + b)
        return jnp.mean(h**2)

    value, gradient = jax.value_and_grad(loss)(weights)
    update, moments = OPTIMIZER.update(gradient, moments)
    return (optax.apply_updates(weights, update), moments), value


def start():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, jnp.zeros(WIDTH)) for key in keys]
    return weights, OPTIMIZER.init(weights)


def rows(count):
    return jax.random.normal(jax.random.key(1), (count, WIDTH))


@pytest.fixture
def always(monkeypatch):
    """Whatever it costs."""
    monkeypatch.setattr(visits, "may_pay", lambda schedule: True)
    monkeypatch.setattr(visits, "WORTH", float("inf"))


def on_visit(sharded, *args):
    return [
        s for s in sharded.program(args, {})[0].decided.schedule.steps if s.ruling.visit and s.ruling.visit.on_trial
    ]


# ------------------------------------------------------ the choice ----------------------------------------------------


def test_few_examples_go_to_the_weights(mesh):
    sharded = shardstep.shard(step, mesh, weights="sharded")
    plan = sharded.plan(start(), rows(16))
    # forward, the gradient of the weight, and (not for the first layer) that of the input
    assert len(on_visit(sharded, start(), rows(16))) == 3 * LAYERS - 1
    assert "few examples per replica" in plan.why_weights
    assert plan.wire_bytes.sharded < 0.2 * plan.wire_bytes.replicated
    found = collectives(sharded.lower(start(), rows(16)).compile().as_text())
    assert max(c.bytes for c in found) < WIDTH * WIDTH * 4 / 8


def test_many_examples_stay_and_each_weight_moves_once(mesh):
    many = rows(8192)
    sharded = shardstep.shard(step, mesh, weights="sharded")
    plan = sharded.plan(start(), many)
    large = [c for c in plan.collectives if max(c.shapes) == (WIDTH, WIDTH)]
    assert sorted(c.kind for c in large) == ["all-gather"] * LAYERS + ["reduce-scatter"] * LAYERS
    assert not on_visit(sharded, start(), many) and "few examples" not in plan.why_weights


def test_whole_weights_still_have_their_gradients_made_where_they_are_kept(mesh):
    sharded = shardstep.shard(step, mesh, weights="replicated")
    plan = sharded.plan(start(), rows(16))
    assert len(on_visit(sharded, start(), rows(16))) == LAYERS
    assert not any(c.kind == "reduce-scatter" and max(c.shapes) == (WIDTH, WIDTH) for c in plan.collectives)


def test_auto_shards_weights_that_then_need_not_move(mesh):
    plan = shardstep.shard(step, mesh).plan(start(), rows(16))
    assert plan.weights == "sharded" and "examples are few" in plan.why_weights
    assert shardstep.shard(step, mesh).plan(start(), rows(8192)).weights == "replicated"


def test_neither_few_nor_many_examples_go_where_the_time_of_products_leaves_it_to_the_wire(mesh):
    """Ninety-six examples per replica of a weight of 2048 x 2048: products take less time than bytes on CPU, too."""
    like = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    weights = [(like, jax.ShapeDtypeStruct((2048,), jnp.float32))] * LAYERS
    state = weights, jax.eval_shape(OPTIMIZER.init, weights)
    plan = shardstep.shard(step, mesh).plan(state, jax.ShapeDtypeStruct((8 * 96, 2048), jnp.float32))
    assert plan.weights == "sharded" and plan.wire_bytes.sharded < 0.5 * plan.wire_bytes.replicated


def test_small_weights_move_however_few_the_examples(mesh):
    def start():
        weights = [(jnp.ones((512, 512)), jnp.zeros(512))] * LAYERS
        return weights, OPTIMIZER.init(weights)

    sharded = shardstep.shard(step, mesh, weights="sharded")
    assert not on_visit(sharded, start(), jnp.ones((16, 512)))


@pytest.mark.parametrize("asked", [{"reduce_dtype": jnp.bfloat16}, {"wire": "int8"}, {"deterministic": True}])
def test_who_says_how_weights_travel_has_them_travel(mesh, asked):
    sharded = shardstep.shard(step, mesh, weights="sharded", options=shardstep.Options(**asked))
    assert not on_visit(sharded, start(), rows(16))


def test_what_is_slower_is_not_taken(mesh, monkeypatch):
    monkeypatch.setattr(visits, "WORTH", 0.0)
    sharded = shardstep.shard(step, mesh, weights="sharded")
    assert not on_visit(sharded, start(), rows(16))


# ----------------------------------------------------- the numbers ----------------------------------------------------


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("n", "count"), [(8, 16), (3, 16), (2, 1), pytest.param(5, 7, marks=pytest.mark.thorough), (8, 3)]
)
def test_same_numbers_for_any_examples_on_any_replicas(n, count, weights):
    agree_for_three_steps(mesh_of(n), rows(count), weights)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("count", [16, 13])
def test_same_numbers_on_two_axes(count):
    grid = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "chips"))
    agree_for_three_steps(grid, rows(count), "sharded")


def agree_for_three_steps(mesh, x, weights):
    sharded, plain = shardstep.shard(step, mesh, weights=weights), jax.jit(step)
    ours, theirs = start(), start()
    states, values = [theirs], []
    assert on_visit(sharded, ours, x)
    for _ in range(3):
        theirs, value = plain(theirs, x)
        states.append(theirs)
        values.append(value)
        ours, found = sharded(ours, x)
        np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_agree(states, shardstep.logical(ours), F32)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("resnet", 8),
        ("handwritten", 8),
        ("clip", 8),
        *(pytest.param(name, 3, marks=pytest.mark.thorough) for name in ("handwritten", "clip")),
    ],
)
def test_programs_of_the_zoo(name, n):
    p = zoo.ZOO[name](batch=2 * n)
    sharded = shardstep.shard(p.step, mesh_of(n), weights="sharded", batch_argnums=p.batch_argnums)
    assert on_visit(sharded, *p.state, *p.batches[0])
    run, state, states, expected = p.jit(p.step), p.state, [p.state], []
    for arguments in p.batches:
        *state, metrics = run(*state, *arguments)
        states.append(tuple(state))
        expected.append(metrics)
    ours, history = zoo.run(p, sharded)
    assert_agree(states, ours, F32)
    assert_agree([expected, expected], history, F32)
