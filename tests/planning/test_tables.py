"""Tables that are read more than once: each use adds a term to the gradient.

Where all terms can be made where the table rests, and that sends less than their sum, the gradient never moves. Where
one of them cannot, it is reduced for that one in any case, and the others do not visit in vain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import F32, assert_agree
from jax.sharding import Mesh
from steps import mesh_of

import shardstep
from shardstep._src.planning import visits
from shardstep._src.tools.hlo import collectives

TOKENS, WIDTH = 16381, 256  # no count of replicas divides a prime: the table is split by features
TABLE = TOKENS * WIDTH * 4
OPTIMIZER = optax.sgd(1.0, momentum=0.9)  # Adam would make full-size steps of rounding noise


def read_and_scored(table, tokens):
    """A language model that writes with the table that it reads with."""
    logits = jnp.tanh(table[tokens]) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, ::-1]).mean()


def cast(table, tokens):
    """Between the table and its gradient lie casts."""
    low = table.astype(jnp.bfloat16)
    return jnp.mean((jnp.tanh(low[tokens]) @ low.T).astype(jnp.float32) ** 2)


def looked_up_twice(table, tokens):
    """Source and target language share a table."""
    return jnp.mean((jnp.tanh(table[tokens]) - jnp.sin(table[tokens[:, ::-1]])) ** 2)


def three_times(table, tokens):
    return looked_up_twice(table, tokens) + read_and_scored(table, tokens)


def also_in_a_loop(table, tokens):
    """A loop adds up its lookups, and reduces them once."""

    def body(total, column):
        return total + jnp.sum(jnp.sin(table[column])), None

    total, _ = jax.lax.scan(body, jnp.zeros(()), tokens.T)
    return looked_up_twice(table, tokens) + total / tokens.size


def step_of(loss):
    def step(state, tokens):
        table, moments = state
        value, gradient = jax.value_and_grad(loss)(table, tokens)
        update, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(table, update), moments), value

    return step


def start():
    table = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH)) / WIDTH**0.5
    return table, OPTIMIZER.init(table)


def tokens(examples):
    return jax.random.randint(jax.random.key(1), (examples, 2), 0, TOKENS)


FEW = 8
READ = [read_and_scored, cast, looked_up_twice, three_times]


@pytest.fixture
def always(monkeypatch):
    """Examples go to the table, whatever it costs."""
    for name in ("may_pay", "may_pay_in_loops"):
        monkeypatch.setattr(visits, name, lambda schedule: True)
    for name in ("worth", "worth_in_loops"):
        monkeypatch.setattr(visits, name, lambda visited, otherwise: True)


def visiting(sharded, *args):
    return [s for s in sharded.program(args, {})[0].decided.schedule.steps if s.ruling.visit]


# ------------------------------------------------------ the choice ----------------------------------------------------


@pytest.mark.parametrize("loss", READ)
def test_with_few_examples_the_gradient_of_a_table_never_moves(mesh, loss, monkeypatch):
    monkeypatch.setattr(visits, "may_pay", lambda schedule: True)
    sharded = shardstep.shard(step_of(loss), mesh, weights="sharded")
    plan = sharded.plan(start(), tokens(FEW))
    assert plan.wire_bytes.sharded < 0.2 * plan.wire_bytes.replicated
    found = collectives(sharded.lower(start(), tokens(FEW)).compile().as_text())
    assert max(c.bytes for c in found) < TABLE / 8


def test_auto_shards_a_table_that_then_need_not_move(mesh):
    plan = shardstep.shard(step_of(read_and_scored), mesh).plan(start(), tokens(FEW))
    assert plan.weights == "sharded" and "examples are few" in plan.why_weights


def test_with_many_examples_it_is_reduced_once(mesh):
    """There are more logits than numbers in the table."""
    sharded = shardstep.shard(step_of(read_and_scored), mesh, weights="sharded")
    plan = sharded.plan(start(), tokens(2048))
    kinds = [c.kind for c in plan.collectives if c.shapes in [((TOKENS, WIDTH),), ((WIDTH, TOKENS),)]]
    assert kinds == ["all-gather", "reduce-scatter"]


def test_no_term_visits_where_another_one_cannot(mesh):
    sharded = shardstep.shard(step_of(also_in_a_loop), mesh, weights="replicated")
    plan = sharded.plan(start(), tokens(FEW))
    assert not visiting(sharded, start(), tokens(FEW))
    assert sorted(c.kind for c in plan.collectives if (TOKENS, WIDTH) in c.shapes) == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("asked", [{"reduce_dtype": jnp.bfloat16}, {"deterministic": True}])
def test_products_do_not_visit_where_the_user_says_how_gradients_travel(mesh, asked):
    sharded = shardstep.shard(step_of(read_and_scored), mesh, weights="replicated", options=shardstep.Options(**asked))
    assert not any(s.ruling.visit.on_trial for s in visiting(sharded, start(), tokens(FEW)))


def in_microbatches(loss):
    """Each of them adds to the gradient of the table."""

    def total(table, tokens):
        def add(total, part):
            value, gradient = jax.value_and_grad(loss)(table, part)
            return (total[0] + value / 2, total[1] + gradient / 2), None

        return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(table)), tokens.reshape(2, -1, 2))[0]

    def step(state, tokens):
        table, moments = state
        value, gradient = total(table, tokens)
        update, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(table, update), moments), value

    return step


def test_in_loops_that_are_visited_no_term_moves_either(mesh, always):
    sharded = shardstep.shard(in_microbatches(read_and_scored), mesh, weights="sharded")
    found = collectives(sharded.lower(start(), tokens(2 * FEW)).compile().as_text())
    assert max(c.bytes for c in found) < TABLE / 8
    agree_for_two_steps(in_microbatches(read_and_scored), mesh, 2 * FEW, "sharded")


# ----------------------------------------------------- the numbers ----------------------------------------------------


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("loss", [read_and_scored, three_times, also_in_a_loop])
@pytest.mark.parametrize(("n", "count"), [(8, 8), (3, 5), pytest.param(2, 1, marks=pytest.mark.thorough)])
def test_same_numbers(loss, n, count, weights, always):
    agree_for_two_steps(step_of(loss), mesh_of(n), count, weights)


def test_same_numbers_on_two_axes(always):
    grid = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "chips"))
    agree_for_two_steps(step_of(three_times), grid, 8, "sharded")


def agree_for_two_steps(step, mesh, count, weights):
    sharded, plain = shardstep.shard(step, mesh, weights=weights), jax.jit(step)
    ours, theirs, states = start(), start(), [start()]
    for _ in range(2):
        theirs, value = plain(theirs, tokens(count))
        states.append(theirs)
        ours, found = sharded(ours, tokens(count))
        np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_agree(states, shardstep.logical(ours), F32)
