"""Where the user does not say which values are the examples, the planner takes what sends and computes least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from steps import mesh_of

import shardstep

ALL = shardstep.Options(min_shard_bytes=256)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) / 8


def with_momentum(weights):
    return {"w": weights, "m": jax.tree.map(jnp.zeros_like, weights)}


def update(state, loss):
    value, gradients = jax.value_and_grad(loss)(state["w"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
    return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], moments), "m": moments}, value


def network(x, w):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def layers(inputs, hidden, outputs, seed=0):
    return {"a": normal(inputs, hidden, seed=seed), "b": normal(hidden, outputs, seed=seed + 1)}


# -- the programs: each returns (step, arguments, the leaves that are the examples and their dimension) ----------------


def teacher(examples=48, width=32):
    """A teacher that is passed in and not returned is no batch, even where it has as many rows."""

    def step(state, teacher, x, y):
        def loss(w):
            student = network(x, w)
            return jnp.mean((student - network(x, teacher)) ** 2) + jnp.mean((student - y) ** 2)

        return update(state, loss)

    arguments = with_momentum(layers(width, 32, 32)), layers(width, 32, 32, seed=5)
    return step, (*arguments, normal(examples, width), normal(examples, 32)), {"x": 0, "y": 0}


def teacher_with_as_many_rows_as_the_batch():
    return teacher(32, 32)


def frozen_discriminator():
    """The examples are what the generator's step draws."""

    def step(state, discriminator, key):
        z = jax.random.normal(key, (40, 8))
        return update(state, lambda w: -jnp.mean(jax.nn.log_sigmoid(network(network(z, w), discriminator))))

    return step, (with_momentum(layers(8, 64, 16)), layers(16, 64, 1, seed=3), jax.random.key(0)), {}


def noise_schedule():
    def step(state, x, schedule, key):
        times, noise = jax.random.split(key)
        t = jax.random.randint(times, x.shape[:1], 0, 1000)
        e = jax.random.normal(noise, x.shape)
        noisy = jnp.sqrt(schedule[t])[:, None] * x + jnp.sqrt(1 - schedule[t])[:, None] * e
        return update(state, lambda w: jnp.mean((network(noisy, w) - e) ** 2))

    arguments = with_momentum(layers(16, 64, 16)), normal(48, 16), jnp.linspace(0.1, 0.9, 1000), jax.random.key(0)
    return step, arguments, {"x": 0}


def labelled_and_unlabelled():
    def step(state, labelled, unlabelled):
        def loss(w):
            return jnp.mean((network(labelled["x"], w) - labelled["y"]) ** 2) + jnp.var(network(unlabelled, w))

        return update(state, loss)

    labelled = {"x": normal(16, 32), "y": normal(16, 16)}
    chosen = {"labelled['x']": 0, "labelled['y']": 0, "unlabelled": 0}
    return step, (with_momentum(layers(32, 64, 16)), labelled, normal(56, 32)), chosen


def users_items_and_a_side_table():
    def step(state, batch, side):
        def loss(w):
            items = w["items"][batch["item"]] + side[batch["item"]] @ w["side"]
            return jnp.mean((jnp.sum(w["users"][batch["user"]] * items, -1) - batch["rating"]) ** 2)

        return update(state, loss)

    tables = {"users": normal(200, 16), "items": normal(120, 16), "side": normal(10, 16)}
    batch = {"user": jnp.arange(64) * 3, "item": jnp.arange(64), "rating": normal(64)}
    chosen = {"batch['user']": 0, "batch['item']": 0, "batch['rating']": 0}
    return step, (with_momentum(tables), batch, normal(120, 10)), chosen


def graphs():
    """Nodes, edges and graphs: each leaf with its own size."""

    def step(state, graph):
        def loss(w):
            nodes = jnp.tanh(graph["nodes"] @ w["encode"])
            messages = jnp.tanh(jnp.concatenate([nodes[graph["source"]], graph["edges"]], -1) @ w["message"])
            gathered = jax.ops.segment_sum(messages, graph["target"], nodes.shape[0])
            nodes = jnp.tanh(jnp.concatenate([nodes, gathered], -1) @ w["update"])
            pooled = jax.ops.segment_sum(nodes, graph["graph"], graph["label"].shape[0])
            return jnp.mean((pooled @ w["read"] - graph["label"]) ** 2)

        return update(state, loss)

    weights = {"encode": (12, 32), "message": (40, 32), "update": (64, 32), "read": (32, 4)}
    edges = jnp.arange(320)
    graph = {
        "nodes": normal(96, 12),
        "edges": normal(320, 8),
        "source": edges * 7 % 96,
        "target": edges * 5 % 96,
        "graph": jnp.arange(96) // 12,
        "label": normal(8, 4),
    }
    chosen = {f"graph[{name!r}]": 0 for name in ("nodes", "edges", "source", "target", "graph")}
    return step, (with_momentum({k: normal(*s) for k, s in weights.items()}), graph), chosen


def time_major():
    """`[T, B]`: splitting time would have to move it."""

    def step(state, x, lengths, y):
        def loss(w):
            def cell(carry, x):
                h, t = carry
                new = jnp.where((t < lengths)[:, None], jnp.tanh(x @ w["x"] + h @ w["h"]), h)
                return (new, t + 1), new @ w["out"]

            _, outputs = lax.scan(cell, (jnp.zeros((x.shape[1], 32)), 0), x)
            return jnp.mean((outputs - y) ** 2)

        return update(state, loss)

    weights = {"x": normal(8, 32), "h": normal(32, 32), "out": normal(32, 4)}
    arguments = with_momentum(weights), normal(24, 16, 8), jnp.arange(16) + 3, normal(24, 16, 4)
    return step, arguments, {"x": 1, "lengths": 0, "y": 1}


def uneven_batch():
    def step(state, x, table):
        return update(state, lambda w: jnp.var(network(x + table.mean(0), w)))

    return step, (with_momentum(layers(16, 64, 16)), normal(21, 16), normal(5, 16)), {"x": 0}


def draws_its_data():
    def step(state, key):
        key, drawn = jax.random.split(key)
        x = jax.random.normal(drawn, (64, 16))
        state, loss = update(state, lambda w: jnp.mean((network(x, w) - jnp.sin(x)) ** 2))
        return state, key, loss

    return step, (with_momentum(layers(16, 64, 16)), jax.random.key(0)), {}


def draws_rows_of_a_constant():
    data = normal(500, 16)

    def step(state, key):
        x = data[jax.random.randint(key, (64,), 0, 500)]
        return update(state, lambda w: jnp.mean((network(x, w) - jnp.sin(x)) ** 2))

    return step, (with_momentum(layers(16, 64, 16)), jax.random.key(0)), {}


def draws_in_a_loop():
    def step(state, key):
        def one(state, key):
            x = jax.random.normal(key, (64, 16))
            return update(state, lambda w: jnp.mean((network(x, w) - jnp.sin(x)) ** 2))

        return lax.scan(one, state, jax.random.split(key, 3))

    return step, (with_momentum(layers(16, 64, 16)), jax.random.key(0)), {}


def holds_its_data():
    data = normal(64, 16)

    def step(state):
        return update(state, lambda w: jnp.mean((network(data, w) - jnp.sin(data)) ** 2))

    return step, (with_momentum(layers(16, 64, 16)),), {}


PROGRAMS = [
    teacher,
    teacher_with_as_many_rows_as_the_batch,
    frozen_discriminator,
    noise_schedule,
    labelled_and_unlabelled,
    users_items_and_a_side_table,
    graphs,
    time_major,
    uneven_batch,
    draws_its_data,
    draws_rows_of_a_constant,
    draws_in_a_loop,
    holds_its_data,
]


def second_order(update):
    """A matrix optimizer, with few examples of many features."""

    def step(state, x, y):
        grads = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(state["w"])
        new, slots = update(grads, state["slots"])
        return {"w": state["w"] - 0.1 * new, "slots": slots}

    slots = {"left": jnp.eye(256), "right": jnp.eye(320), "v": jnp.ones((256, 320))}
    return step, ({"w": normal(256, 320), "slots": slots}, normal(16, 256), normal(16, 320)), {"x": 0, "y": 0}


def products_of_gradients():
    """As Shampoo's preconditioners."""

    def update(g, s):
        left, right = s["left"] + g @ g.T, s["right"] + g.T @ g
        return left @ g @ right, {**s, "left": left, "right": right}

    return second_order(update)


def a_basis_that_gradients_are_turned_into():
    """As SOAP: products of state and gradient, and factorizations."""

    def update(g, s):
        v = s["v"] + (s["left"].T @ g @ s["right"]) ** 2
        u = s["left"] @ ((s["left"].T @ g @ s["right"]) / jnp.sqrt(v)) @ s["right"].T
        left, right = jnp.linalg.qr(g @ g.T @ s["left"])[0], jnp.linalg.qr(g.T @ g @ s["right"])[0]
        return u, {"left": left, "right": right, "v": v}

    return second_order(update)


def an_update_in_a_loop():
    def update(g, s):
        u = lax.fori_loop(0, 5, lambda _, u: jnp.tanh(s["left"].T @ u @ s["right"]), g)
        return u, {**s, "v": s["v"] + u**2}

    return second_order(update)


def several_steps_in_a_loop():
    """What is made of the last gradients is differentiated again, and then it is not the update."""
    step, (state, x, y), chosen = a_basis_that_gradients_are_turned_into()

    def steps(state, x, y):
        return lax.scan(lambda s, _: (step(s, x, y), None), state, length=3)[0]

    return steps, (state, x, y), chosen


OPTIMIZERS = [
    products_of_gradients,
    a_basis_that_gradients_are_turned_into,
    an_update_in_a_loop,
    several_steps_in_a_loop,
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_products_of_the_update_have_no_say(monkeypatch, make):
    """Splitting features would split gradients, and the update with them."""
    from shardstep._src.planning import batch_choice

    tried = []
    costs = batch_choice.cost_of
    monkeypatch.setattr(batch_choice, "cost_of", lambda *a: tried.append(a) or costs(*a))
    step, arguments, chosen = make()
    plan = shardstep.shard(step, mesh_of(8)).plan(*arguments)
    found = {leaf.path: leaf.layout for leaf in plan.leaves if leaf.role == "batch"}
    assert {path: int(layout[len("split(")]) for path, layout in found.items()} == chosen
    assert not tried and not any("examples" in note for note in plan.notes)


def products(schedule):
    """Every product with its operands' layouts, in loops too."""
    for step in schedule.steps:
        for body in step.bodies:
            yield from products(body)
        if str(step.equation.primitive) == "dot_general":
            yield step


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_the_examples_are_found_without_a_hint(make):
    step, arguments, chosen = make()
    sharded = shardstep.shard(step, mesh_of(8), options=ALL)
    plan = sharded.plan(*arguments)
    found = {leaf.path: leaf.layout for leaf in plan.leaves if leaf.role == "batch"}
    assert {path: int(layout[len("split(")]) for path, layout in found.items()} == chosen
    assert not plan.fallbacks


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_whatever_is_chosen_the_numbers_are_those_of_jit(make):
    step, arguments, _ = make()
    wanted = jax.jit(step)(*arguments)
    found = shardstep.logical(shardstep.shard(step, mesh_of(8), options=ALL)(*arguments))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make", [draws_its_data, draws_rows_of_a_constant, draws_in_a_loop, holds_its_data, frozen_discriminator]
)
def test_data_that_a_step_makes_itself_is_shared(make):
    step, arguments, _ = make()
    sharded = shardstep.shard(step, mesh_of(8), options=ALL)
    schedule = sharded.program(arguments, {})[0].decided.baseline
    assert all(any(str(p) != "replicated" for p, *_ in s.operands) for s in products(schedule))
    plan = sharded.plan(*arguments)
    assert {leaf.role for leaf in plan.leaves if leaf.path.startswith("state['w']")} == {"weight"}
    assert any("what the step draws" in note and "batch_argnums=" in note for note in plan.notes)


def test_no_batch_argument_can_be_said():
    step, arguments, _ = draws_its_data()
    asked = shardstep.shard(step, mesh_of(8), options=ALL, batch_argnums=())
    unasked = shardstep.shard(step, mesh_of(8), options=ALL)
    assert asked.plan(*arguments).collectives == unasked.plan(*arguments).collectives


def test_a_step_without_examples_runs_and_says_so():
    def step(state, rate):
        return jax.tree.map(lambda w: w * (1 - rate), state), rate

    arguments = layers(16, 64, 16), jnp.float32(0.1)
    sharded = shardstep.shard(step, mesh_of(8), options=ALL)
    assert any("no examples found" in note for note in sharded.plan(*arguments).notes)
    np.testing.assert_allclose(sharded(*arguments)[0]["a"], step(*arguments)[0]["a"])


def test_the_plan_tells_what_was_chosen_and_how_to_say_otherwise():
    step, arguments, _ = teacher()
    plan = shardstep.shard(step, mesh_of(8), options=ALL).plan(*arguments)
    (note,) = plan.notes
    assert "x on dimension 0" in note and "batch_argnums=" in note and note in str(plan)
    assert {leaf.reason for leaf in plan.leaves if leaf.role == "batch"} == {"the examples (chosen by cost)"}


def test_what_the_user_says_is_not_questioned():
    step, arguments, _ = teacher()
    named = shardstep.shard(step, mesh_of(8), options=ALL, batch_argnames="teacher").plan(*arguments)
    assert all(leaf.path.startswith("teacher") for leaf in named.leaves if leaf.role == "batch")
    mesh = mesh_of(8)
    placed = (
        *arguments[:2],
        jax.device_put(arguments[2], NamedSharding(mesh, PartitionSpec(None, "data"))),
        arguments[3],
    )
    plan = shardstep.shard(step, mesh, options=ALL).plan(*placed)
    assert [(leaf.path, leaf.layout) for leaf in plan.leaves if leaf.role == "batch"] == [("x", "split(1)")]


def test_a_plain_batch_is_planned_once(monkeypatch):
    """Nothing is compared where one leading size shares every product."""
    from shardstep._src.planning import batch_choice

    tried = []
    monkeypatch.setattr(batch_choice, "cost_of", lambda *a: tried.append(a))

    def step(state, x, y):
        return update(state, lambda w: jnp.mean((network(x, w) - y) ** 2))

    plan = shardstep.shard(step, mesh_of(8), options=ALL).plan(
        with_momentum(layers(16, 64, 16)), normal(32, 16), normal(32, 16)
    )
    assert not tried and not plan.notes


def test_the_last_layer_of_a_network_over_graphs_is_a_weight():
    """It is read after the examples were summed up, but its error goes back to them."""
    step, arguments, _ = graphs()
    plan = shardstep.shard(step, mesh_of(8), options=ALL).plan(*arguments)
    roles = {leaf.path: leaf.role for leaf in plan.leaves}
    assert {role for path, role in roles.items() if path.startswith("state['w']")} == {"weight"}
    assert {role for path, role in roles.items() if path.startswith("state['m']")} == {"auxiliary"}
