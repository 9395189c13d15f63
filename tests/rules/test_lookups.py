"""Embedding tables of which the examples read few rows: the indices travel, the table does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from simulate import verify
from sites import indices, site_of, values
from steps import assert_same, mesh_of

import shardstep
from shardstep import Options
from shardstep._src.core.layout import PARTIAL, REPLICATED, Split
from shardstep._src.rules import rule_for
from shardstep._src.tools.hlo import collectives

R, S, P = REPLICATED, Split, PARTIAL
B = Split(0, batch=True)
OPTIMIZER = optax.adam(1e-2, eps=1e-3)
ALONE = Options(bucket_bytes=0)
FEATURES, EXAMPLES, WORDS = 32, 16, 3


def step_of(loss):
    def step(state, batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


def mean_of_words(params, batch):
    x = jnp.tanh(params["table"][batch["words"]]).mean(axis=1)
    return jnp.mean((x @ params["w"] - batch["y"]) ** 2)


def start(rows):
    k1, k2 = jax.random.split(jax.random.key(0))
    params = {"table": jax.random.normal(k1, (rows, FEATURES)), "w": jax.random.normal(k2, (FEATURES, 8)) / 8}
    return params, OPTIMIZER.init(params)


def examples(rows, count=EXAMPLES):
    rng = np.random.default_rng(1)
    words = rng.integers(-rows, rows, (count, WORDS), np.int32)
    words[0] = 5  # one row, several times
    return {"words": words, "y": rng.standard_normal((count, 8), np.float32)}


def agree(step, state, batch, mesh, **how):
    """The plan, once some steps gave what plain jit gives."""
    ours, theirs, plain = state, state, jax.jit(step)
    sharded = shardstep.shard(step, mesh, options=ALONE, **how)
    plan = sharded.plan(state, batch)
    for _ in range(3):
        theirs, expected = plain(theirs, batch)
        ours, value = sharded(ours, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_same(shardstep.logical(ours), theirs)
    return plan


def moving(plan, shape):
    return [c.kind for c in plan.collectives if c.shape == shape]


ROWS = {"by row": 4096, "by feature": 4099, "padded": 4099}  # 4099 is prime; 5 replicas do not divide 32 features


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_the_table_stays_where_it_is(case, weights):
    rows, replicas = ROWS[case], 5 if case == "padded" else 8
    batch = examples(rows, 15 if case == "padded" else EXAMPLES)
    plan = agree(step_of(mean_of_words), start(rows), batch, mesh_of(replicas), weights=weights)
    resting = {leaf.layout for leaf in plan.leaves if "mu['table']" in leaf.path}
    assert resting == {{"by row": "split(0)", "by feature": "split(1)", "padded": "split(0, padded to 4100)"}[case]}
    assert moving(plan, (rows, FEATURES)) == (["all-gather"] if weights == "replicated" else [])
    looked_up = moving(plan, (len(batch["words"]), WORDS, FEATURES))
    visits = {"by feature": ["all-to-all"]}.get(case, ["all-gather"])
    back = {"by feature": ["all-to-all"]}.get(case, ["reduce-scatter"])
    assert looked_up == (visits if weights == "replicated" else back + visits)


def test_the_compiled_step_sends_what_the_plan_says(mesh):
    sharded = shardstep.shard(step_of(mean_of_words), mesh, weights="sharded", options=ALONE)
    state, batch = start(4096), examples(4096)
    found = collectives(sharded.lower(state, batch).compile().as_text())
    assert max(c.bytes for c in found) == EXAMPLES * WORDS * FEATURES * 4
    assert sharded.plan(state, batch).wire_bytes.sharded < sharded.plan(state, batch).wire_bytes.replicated / 10


def test_two_axes_own_the_rows_together():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for group in (8, 2):  # between groups, what each has added to its rows is summed
        plan = agree(step_of(mean_of_words), start(4096), examples(4096), mesh, weights="sharded", group=group)
        assert moving(plan, (4096, FEATURES)) == ([] if group == 8 else ["all-reduce"])


def test_a_batch_that_the_replicas_do_not_divide(mesh):
    plan = agree(step_of(mean_of_words), start(4096), examples(4096, 13), mesh, weights="sharded")
    assert not moving(plan, (4096, FEATURES))


def test_many_rows_are_gathered_as_ever(mesh):
    """More rows than a block of the table has: every replica would look at more than it owns."""
    rows = EXAMPLES * WORDS * 8
    for fewer, kinds in ((0, []), (8, ["all-gather", "reduce-scatter"])):
        plan = agree(step_of(mean_of_words), start(rows - fewer), examples(rows - fewer), mesh, weights="sharded")
        assert moving(plan, (rows - fewer, FEATURES)) == kinds


def test_a_table_that_is_read_as_a_matrix_too_is_reduced_once(mesh):
    """Tied weights: the sum is scattered for the product's sake, and the lookup's gradient joins it on the way."""

    def tied(params, batch):
        x = params["table"][batch["words"]].mean(axis=1)
        return mean_of_words(params, batch) + jnp.mean(jax.nn.logsumexp(x @ params["table"].T, axis=-1))

    plan = agree(step_of(tied), start(4096), examples(4096), mesh, weights="replicated")
    assert moving(plan, (4096, FEATURES)) == ["reduce-scatter", "all-gather"]
    assert not moving(plan, (EXAMPLES, WORDS, FEATURES))
    assert plan.wire_bytes.sharded <= plan.wire_bytes.replicated


def test_a_loop_gathers_the_table_once(mesh):
    def by_word(params, batch):
        def read(total, words):
            return total + jnp.tanh(params["table"][words]), None

        x, _ = lax.scan(read, jnp.zeros((len(batch["y"]), FEATURES)), batch["words"].T)
        return jnp.mean((x @ params["w"] - batch["y"]) ** 2)

    plan = agree(step_of(by_word), start(4096), examples(4096), mesh, weights="sharded")
    assert not [c for c in plan.collectives if c.loop]
    assert moving(plan, (4096, FEATURES)).count("all-gather") == 1


def test_auto_shards_weights_that_then_need_not_move(mesh):
    step, small = step_of(mean_of_words), EXAMPLES * WORDS * 4
    plan = shardstep.shard(step, mesh).plan(start(4096), examples(4096))
    assert plan.weights == "sharded" and "examples are few" in plan.why_weights
    assert shardstep.shard(step, mesh).plan(start(small), examples(small)).weights == "replicated"


# ------------------------------------------------------- the rules ----------------------------------------------------


def offered(site, *placements):
    return {(d.operands, d.results, d.visit.homes) for d in rule_for(site.primitive)(site, placements) if d.visit}


def test_what_is_looked_up_goes_home():
    def look_up(t, i):
        return t[i]

    args = values(64, 4), indices(4, 2, below=64)
    site = site_of("gather", look_up, *args)
    assert offered(site, S(0), B) == {((S(0), R), (P,), (B,))}
    assert offered(site, S(1), B) == {((S(1), R), (S(2),), (B,))}
    assert offered(site, S(0), R) == set()  # no examples, no visit
    assert offered(site_of("gather", look_up, values(12, 4), indices(4, 2, below=12)), S(0), B) == set()
    verify(look_up, *args, n=2, outers=(1,), only={"gather"})


def test_what_is_to_be_added_comes_from_the_examples():
    def grad(t, i):
        return jax.grad(lambda t: (t[i] ** 2).sum())(t)

    args = values(64, 4), indices(4, 2, below=64)
    for want, decision in ((S(0), ((S(0), R, R), (S(0),))), (S(1), ((S(1), R, S(2)), (S(1),)))):
        assert offered(site_of("scatter_add", grad, *args, wants=(want,)), R, B, B) == {(*decision, ())}
        few = values(12, 4), indices(4, 2, below=12)
        assert offered(site_of("scatter_add", grad, *few, wants=(want,)), R, B, B) == set()
    verify(grad, *args, n=2, outers=(1,), only={"scatter-add"}, wants=True)
