"""The "annotate" engine: the user's own step under `jax.jit`, with the planned shardings; and when it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from steps import adam_state, adam_step, assert_same, batch, mesh_of

import shardstep
from shardstep import Options
from shardstep._src.planning import engines
from shardstep._src.tools.hlo import collectives, wire_bytes

ANNOTATE = Options(engine="annotate")


def moments(state):
    return [x for x in jax.tree.leaves(state[1]) if x.ndim == 2]


@pytest.fixture(scope="module")
def annotated():
    return shardstep.shard(adam_step, mesh_of(8), options=ANNOTATE)


def test_same_numbers(annotated):
    ours, theirs = adam_state(), adam_state()
    for i in range(3):
        ours, value = annotated(ours, batch(i))
        theirs, expected = jax.jit(adam_step)(theirs, batch(i))
    assert_same((ours, value), (theirs, expected))


def test_the_state_rests_sharded_and_is_donated(annotated):
    state, examples = annotated.place(adam_state(), batch())
    assert all(m.sharding.spec == PartitionSpec("data") for m in moments(state))
    new, _ = annotated(state, examples)
    assert all(m.is_deleted() for m in moments(state))
    assert all(m.sharding.spec == PartitionSpec("data") for m in moments(new))
    assert all(w.sharding.is_fully_replicated for w in jax.tree.leaves(new[0]))


def test_weights_may_rest_sharded_too():
    step = shardstep.shard(adam_step, mesh_of(8), weights="sharded", options=ANNOTATE)
    (weights, _), _ = step(adam_state(), batch())
    assert weights["w1"].sharding.spec == PartitionSpec("data")


def test_without_sharded_state_xla_sends_what_it_always_did():
    """A leaf that would have to be padded rests whole under XLA. If all of them do, there is nothing to gather."""
    odd = jnp.ones((13, 11))

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state[0])
        moment = 0.9 * state[1] + gradient
        return state[0] - moment, moment

    options = Options(engine="annotate", min_shard_bytes=64)
    plan = shardstep.shard(step, mesh_of(8), options=options).plan((odd, odd), jnp.ones((16, 13)))
    assert plan.wire_bytes.sharded == plan.wire_bytes.replicated and plan.state_bytes.ratio == 1


def test_the_plan_says_so(annotated):
    plan = annotated.plan(adam_state(), batch())
    assert plan.engine == "annotate" and plan.why_engine == "as asked"
    assert plan.collectives == () and plan.fallbacks == ()
    assert "engine            annotate (as asked)" in str(plan)
    assert plan.state_bytes.sharded < plan.state_bytes.replicated / 2
    assert '"engine": "annotate"' in plan.to_json()


def test_what_it_is_said_to_send_is_what_xla_sends(annotated):
    plan = annotated.plan(adam_state(), batch())
    text = annotated.lower(adam_state(), batch()).compile().as_text()
    assert wire_bytes(collectives(text)) == pytest.approx(plan.wire_bytes.sharded, rel=0.02)


def test_it_can_be_checked(annotated):
    assert shardstep.check(annotated, adam_state(), batch()).within(1e-5)


def test_what_would_be_padded_rests_whole():
    def step(state, batch):
        w, v = state
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        v = 0.9 * v + gradient
        return (w - 0.1 * v, v), value

    state = (jnp.ones((97, 67)), jnp.zeros((97, 67)))
    examples = jax.random.normal(jax.random.key(0), (16, 97))
    sharded = shardstep.shard(step, mesh_of(8), options=ANNOTATE)
    velocity = sharded.plan(state, examples).leaves[1]
    assert velocity.layout == "replicated" and "XLA does not pad" in velocity.reason
    assert_same(sharded(state, examples), jax.jit(step)(state, examples))


@pytest.mark.parametrize(
    ("how", "examples", "message"),
    [({"axis_name": "i"}, 24, "not one for a single replica"), ({}, 23, "does not pad")],
)
def test_what_xla_cannot_partition_is_refused(how, examples, message):
    def step(state, batch):
        value = jnp.mean((batch @ state) ** 2)
        return state * 0.9, jax.lax.pmean(value, "i") if how else value

    sharded = shardstep.shard(step, mesh_of(8), options=ANNOTATE, batch_argnums=1, **how)
    with pytest.raises(shardstep.ShardstepError, match=message):
        sharded.plan(jnp.ones((64, 64)), jnp.ones((examples, 64)))


# -- which engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "replicated", "annotated", "axis_name", "uneven", "engine"),
    [
        (100e6, 100e6, 150e6, None, False, "rewrite"),
        (101.5e6, 100e6, 90e6, None, False, "rewrite"),  # a few norms more
        (200e6, 100e6, 150e6, None, False, "annotate"),
        (200e6, 100e6, 250e6, None, False, "rewrite"),  # XLA would do no better
        (200e6, 100e6, 150e6, "i", False, "rewrite"),
        (200e6, 100e6, 150e6, None, True, "rewrite"),
    ],
)
def test_the_smaller_of_both(ours, replicated, annotated, axis_name, uneven, engine):
    choice = engines.choose("auto", engines.Question(ours, replicated, annotated, axis_name, uneven))
    assert choice.engine == engine
    assert ("times as much" in choice.why) == (ours > 1.02 * replicated)


def test_what_xla_would_not_shard_at_all_is_rewritten():
    assert engines.choose("auto", engines.Question(107e6, 100e6, 100e6, shares=False)).engine == "rewrite"


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_one_replica_runs_the_step_as_it_is(weights):
    step = shardstep.shard(adam_step, mesh_of(1), weights=weights)
    assert not collectives(step.lower(adam_state(), batch()).compile().as_text())
    assert step.plan(adam_state(), batch()).engine == "annotate"
    assert_same(step(adam_state(), batch()), jax.jit(adam_step)(adam_state(), batch()), tolerance=0)


@pytest.mark.parametrize("how", [{"axis_name": "i"}, {"explicit": True}])
def test_one_replica_is_rewritten_where_xla_cannot_have_it(how):
    question = engines.Question(rewritten=0, replicated=0, annotated=0, alone=True, **how)
    assert engines.choose("auto", question).engine == "rewrite"


def test_one_replica_rounds_as_many_do():
    step = shardstep.shard(adam_step, mesh_of(1), weights="sharded", options=Options(gather_dtype=jnp.bfloat16))
    assert step.plan(adam_state(), batch()).engine == "rewrite"


def test_auto_leaves_a_step_to_xla_where_that_sends_less(monkeypatch):
    """If XLA were known to send nothing for a step whose rewriting sends more than replicated, it would get it."""
    monkeypatch.setattr(engines, "estimate", lambda *_: 1.0)
    sharded = shardstep.shard(line_search, mesh_of(8))
    state, examples = searched(), batch()
    plan = sharded.plan(state, examples)
    assert plan.engine == "annotate" and "times as much as replicated; left to XLA" in plan.why_engine
    assert_same(sharded(state, examples), jax.jit(line_search)(state, examples), tolerance=1e-4)


# -- a step that reads its gradient whole -----------------------------------------------------------------------------


def line_search(state, batch):
    """The median of the gradient scales the update: the whole gradient is sorted, by every replica."""
    w, v = state
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2))(w)
    v = 0.9 * v + gradient / (jnp.median(jnp.abs(gradient)) + 1e-3)
    return (w - 0.01 * v, v), value


def searched():
    w = jax.random.normal(jax.random.key(0), (96, 96)) / 10
    return w, jnp.zeros_like(w)


def test_a_plan_that_sends_more_says_so():
    """All-reduce, then a gather of the new weights: with sharded state there is no way to send less."""
    plan = shardstep.shard(line_search, mesh_of(8)).plan(searched(), batch())
    assert plan.wire_bytes.ratio == pytest.approx(1.5, rel=0.01)
    assert plan.engine == "rewrite" and "left to XLA it would not send less" in plan.why_engine
    text = shardstep.shard(line_search, mesh_of(8), options=ANNOTATE).lower(searched(), batch()).compile().as_text()
    assert wire_bytes(collectives(text)) >= plan.wire_bytes.sharded * 0.99


def test_a_gradient_of_which_only_the_norm_is_read_is_scattered():
    """Half the bytes of the all-reduce; and a norm of pieces is as good."""

    def step(state, batch):
        w, v = state
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
        v = 0.9 * v + jnp.sum(gradient**2)
        return (w - 0.1 * v, v), value

    w = jax.random.normal(jax.random.key(0), (96, 96)) / 10
    state = (w, jnp.zeros_like(w))
    sharded = shardstep.shard(step, mesh_of(8))
    plan = sharded.plan(state, batch())
    assert {c.kind for c in plan.collectives if np.prod(c.shape) >= w.size} == {"reduce-scatter", "all-gather"}
    assert plan.wire_bytes.ratio <= 1.001
    assert_same(sharded(state, batch()), jax.jit(step)(state, batch()))


def test_options_reach_the_default():
    assert Options().engine == "auto"
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch())
    assert (plan.engine, plan.why_engine) == ("rewrite", "sends no more than the replicated step")
    forced = shardstep.shard(line_search, mesh_of(8), options=Options(engine="rewrite")).plan(searched(), batch())
    assert (forced.engine, forced.why_engine) == ("rewrite", "as asked")


def test_optax_state_is_kept():
    """Tuples, named tuples and counters come back as they were."""
    step = shardstep.shard(adam_step, mesh_of(8), options=ANNOTATE)
    new, _ = step(adam_state(), batch())
    assert jax.tree.structure(new) == jax.tree.structure(adam_state())
    assert isinstance(new[1][0], optax.ScaleByAdamState) and int(new[1][0].count) == 1
