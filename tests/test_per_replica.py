"""Steps written for one replica (`axis_name="batch"`), as for `pmap`; the reference is `shard_map`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from steps import EXAMPLES, OPTIMIZER, adam_state, assert_same, batch, loss, mesh_of, split_leaves, update, weights

import shardstep
from shardstep._src.tools.hlo import collectives

STEPS = 3
LARGEST = 96 * 64 * 4  # bytes of a large weight
ALL, MINE = PartitionSpec(), PartitionSpec("batch")

TWO = pytest.param(2, marks=pytest.mark.thorough)  # what two replicas do eight do as well; three pad
REPLICAS, EVEN = (TWO, 3, 8), (TWO, 8)


def reference(step, n, *, inputs=(ALL, MINE), outputs=(ALL, ALL)):
    """What the user runs today: every replica has all of the state and its own examples."""
    mapped = jax.shard_map(step, mesh=mesh_of(n, "batch"), in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped)


def agree(step, n, state=None, *, extra=lambda i: (), metrics=ALL, tolerance=1e-5):
    """Train with both, compare, and return the sharded step with its arguments."""
    state = adam_state() if state is None else state
    sharded = shardstep.shard(step, mesh_of(n), axis_name="batch", batch_argnames="batch")
    plain = reference(step, n, inputs=(ALL, MINE, *(ALL for _ in extra(0))), outputs=(ALL, metrics))
    ours = theirs = state
    for i in range(STEPS):
        theirs, expected = plain(theirs, batch(i), *extra(i))
        ours, found = sharded(ours, batch(i), *extra(i))
        assert_same(found, expected, tolerance)
    assert_same(ours, theirs, tolerance)
    return sharded, (state, batch(0), *extra(0))


def assert_update_is_sharded(sharded, arguments, *, large=4):
    """`large` leaves of optimizer state rest split, and no all-reduce is as large as a weight."""
    plan = sharded.plan(*arguments)
    assert len(split_leaves(plan)) == large, str(plan)
    found = collectives(sharded.lower(*arguments).compile().as_text())
    assert not [c for c in found if c.kind == "all-reduce" and c.bytes >= LARGEST], found
    assert any(c.kind == "reduce-scatter" for c in found)


def step_with(reduce_gradients, objective=loss):
    """Adam on gradients that `reduce_gradients` has made the same on all replicas."""

    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(objective)(params, batch)
        return update(params, moments, reduce_gradients(gradients)), lax.pmean(value, "batch")

    return step


def each(fun):
    return lambda gradients: jax.tree.map(fun, gradients)


# -- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", REPLICAS)
def test_pmean(n):
    sharded, arguments = agree(step_with(lambda g: lax.pmean(g, "batch")), n)
    assert_update_is_sharded(sharded, arguments)


@pytest.mark.parametrize("n", REPLICAS)
def test_psum_over_the_number_of_replicas(n):
    step = step_with(each(lambda g: lax.psum(g, "batch") / lax.axis_size("batch")))
    assert_update_is_sharded(*agree(step, n))


def test_psum_of_a_constant_counts_replicas():
    step = step_with(each(lambda g: lax.psum(g, "batch") / lax.psum(1, "batch")))
    assert_update_is_sharded(*agree(step, 8))


def test_psum_of_a_replicated_value():
    """A weight is the same on all replicas: its psum is n times it."""

    def decayed(params, batch):
        return loss(params, batch) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))

    def step(state, batch):
        state, value = step_with(lambda g: lax.pmean(g, "batch"), decayed)(state, batch)
        return state, value + lax.psum(state[0]["b"].sum(), "batch")

    agree(step, 8)


@pytest.mark.parametrize("reduce", [lax.pmax, lax.pmin], ids=["pmax", "pmin"])
@pytest.mark.parametrize("n", EVEN)
def test_extremes(reduce, n):
    """Clip by the largest (or smallest) gradient of any replica."""

    def clipped(gradients):
        gradients = lax.pmean(gradients, "batch")
        limits = jax.tree.map(lambda g: reduce(jnp.max(jnp.abs(g)), "batch"), gradients)
        return jax.tree.map(lambda g, limit: jnp.clip(g, -limit / 2, limit / 2), gradients, limits)

    assert_update_is_sharded(*agree(step_with(clipped), n))


def test_pmax_of_gradients_elementwise():
    agree(step_with(each(lambda g: lax.pmax(g, "batch"))), 8)


def test_global_norm_of_reduced_gradients():
    def clipped(gradients):
        gradients = lax.pmean(gradients, "batch")
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 0.01), gradients)

    assert_update_is_sharded(*agree(step_with(clipped), 8))


def test_norm_of_each_replicas_own_gradient():
    """Each replica clips its own gradient before they are averaged."""

    def clipped(gradients):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        return lax.pmean(jax.tree.map(lambda g: g / jnp.maximum(norm, 0.01), gradients), "batch")

    assert_update_is_sharded(*agree(step_with(clipped), 8))


def test_reduction_in_lower_precision():
    step = step_with(each(lambda g: lax.pmean(g.astype(jnp.bfloat16), "batch").astype(jnp.float32)))
    agree(step, 8, tolerance=0.02)


def test_groups_of_replicas():
    """Neighbours average first, then everybody."""
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    step = step_with(each(lambda g: lax.pmean(lax.psum(g, "batch", axis_index_groups=pairs) / 2, "batch")))
    agree(step, 8)


# -- who am I ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", REPLICAS)
def test_axis_index(n):
    def weighted(params, batch):
        return loss(params, batch) * (1 + lax.axis_index("batch"))

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), weighted), n))


@pytest.mark.parametrize("n", EVEN)
def test_dropout_with_a_key_for_each_replica(n):
    def step(state, batch, key):
        mine = jax.random.fold_in(key, lax.axis_index("batch"))
        kept = jax.random.bernoulli(mine, 0.8, batch["x"].shape)
        state, value = step_with(lambda g: lax.pmean(g, "batch"))(state, {**batch, "x": batch["x"] * kept / 0.8})
        return state, {"loss": value, "kept": lax.psum(kept.sum(), "batch")}

    assert_update_is_sharded(*agree(step, n, extra=lambda i: (jax.random.key(i),)))


# -- collectives that move examples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("n", REPLICAS)
def test_all_gather_of_activations(n, tiled):
    """A contrastive loss: each replica scores its examples against everybody's."""

    def contrast(params, batch):
        mine = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
        theirs = lax.all_gather(batch["y"] @ params["w2"].T, "batch", tiled=tiled).reshape(EXAMPLES, 64)
        scores = mine @ theirs.T / 8
        own = jnp.arange(len(mine)) + lax.axis_index("batch") * len(mine)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), own[:, None], 1))

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), contrast), n))


@pytest.mark.parametrize("n", REPLICAS)
def test_ppermute(n):
    def shifted(params, batch):
        ring = [(i, (i + 1) % n) for i in range(n)]
        return loss(params, {**batch, "x": batch["x"] + lax.ppermute(jnp.sin(batch["x"]), "batch", ring)})

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), shifted), n))


@pytest.mark.parametrize("n", REPLICAS)
def test_all_to_all(n):
    def exchanged(params, batch):
        columns = lax.all_to_all(batch["x"], "batch", split_axis=1, concat_axis=0, tiled=True)
        columns = columns / jnp.sqrt(jnp.mean(columns**2, axis=0))  # normalised over all the examples
        rows = lax.all_to_all(columns, "batch", split_axis=0, concat_axis=1, tiled=True)
        return loss(params, {**batch, "x": rows})

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), exchanged), n))


@pytest.mark.parametrize("n", EVEN)
def test_a_step_that_is_sharded_by_hand(n):
    """Reduce-scatter and all-gather as the user wrote them: they run as they were written."""

    def by_hand(g):
        if g.shape[0] % n:
            return lax.pmean(g, "batch")
        mine = lax.psum_scatter(g, "batch", scatter_dimension=0, tiled=True) / n
        return lax.all_gather(mine, "batch", tiled=True)

    sharded, arguments = agree(step_with(each(by_hand)), n)
    found = collectives(sharded.lower(*arguments).compile().as_text())
    assert not [c for c in found if c.kind == "all-reduce" and c.bytes >= LARGEST], found


# -- normalisation over all replicas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", REPLICAS)
def test_batch_statistics_by_pmean(n):
    def normalised(params, batch):
        mean = lax.pmean(batch["x"].mean(0), "batch")
        variance = lax.pmean((batch["x"] ** 2).mean(0), "batch") - mean**2
        return loss(params, {**batch, "x": (batch["x"] - mean) * lax.rsqrt(variance + 1e-5)})

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), normalised), n))


class Normalised(nn.Module):
    axis_name: str | None = None  # None outside any mapped function, to initialise

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return nn.Dense(96)(nn.relu(x))


@pytest.mark.parametrize("n", REPLICAS)
def test_flax_batch_norm_with_an_axis_name(n):
    model = Normalised(axis_name="batch")

    def step(state, batch):
        params, statistics, moments = state

        def objective(params):
            out, changed = model.apply(
                {"params": params, "batch_stats": statistics}, batch["x"], mutable=["batch_stats"]
            )
            return jnp.mean((out - batch["y"]) ** 2), changed["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        params, moments = update(params, moments, lax.pmean(gradients, "batch"))
        return (params, statistics, moments), lax.pmean(value, "batch")

    initial = Normalised().init(jax.random.key(0), batch(0)["x"])
    state = (initial["params"], initial["batch_stats"], OPTIMIZER.init(initial["params"]))
    assert_update_is_sharded(*agree(step, n, state))


# -- loops ------------------------------------------------------------------------------------------------------------


def microbatches(batch, count):
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


@pytest.mark.parametrize("n", EVEN)
def test_gradient_accumulation_then_one_pmean(n):
    def step(state, batch):
        params, moments = state

        def accumulate(total, part):
            value, gradients = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, gradients), value

        total, values = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), microbatches(batch, 3))
        gradients = lax.pmean(jax.tree.map(lambda g: g / 3, total), "batch")
        return update(params, moments, gradients), lax.pmean(values.mean(), "batch")

    sharded, arguments = agree(step, n)
    assert_update_is_sharded(sharded, arguments)
    assert not [c for c in collectives(sharded.lower(*arguments).compile().as_text()) if c.in_loop]


@pytest.mark.parametrize("n", EVEN)
def test_several_steps_in_a_scan_with_psum_inside(n):
    def step(state, batch):
        one = step_with(lambda g: lax.pmean(g, "batch"))
        state, values = lax.scan(one, state, microbatches(batch, 3))
        return state, values.mean()

    assert_update_is_sharded(*agree(step, n))


def test_a_scan_whose_carry_is_reduced_each_time():
    def normalised(params, batch):
        def relax(center, part):
            return 0.5 * center + 0.5 * lax.pmean(part.mean(0), "batch"), None

        center, _ = lax.scan(relax, jnp.zeros(96), batch["x"].reshape(3, -1, 96))
        return loss(params, {**batch, "x": batch["x"] - center})

    assert_update_is_sharded(*agree(step_with(lambda g: lax.pmean(g, "batch"), normalised), 8))


LOOPS = {
    "scan": lambda body, init: lax.scan(lambda c, _: (body(c), None), init, None, length=3)[0],
    "fori": lambda body, init: lax.fori_loop(0, 3, lambda i, c: body(c), init),
    "while": lambda body, init: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1])), (0, init))[1],
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_shared_sum_that_a_loop_makes_each_replicas_own(loop):
    """The loop carries it as a replica's own; to its other readers it stays what all replicas share."""

    def step(state, batch):
        state, _ = step_with(lambda g: lax.pmean(g, "batch"))(state, batch)
        shared = lax.pmean(batch["x"][:3], "batch")
        own = loop(lambda c: 0.5 * c + batch["x"][:3], shared)
        params, moments = state
        return (jax.tree.map(lambda w: w + 0.01 * jnp.mean(shared), params), moments), own

    agree(step, 4, metrics=MINE)


def test_a_branch_on_a_reduced_condition():
    def skip_bad(gradients):
        gradients = lax.pmean(gradients, "batch")
        finite = lax.pmin(jnp.isfinite(gradients["w1"]).all().astype(jnp.int32), "batch")
        return lax.cond(finite == 1, lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), gradients)

    agree(step_with(skip_bad), 8)


# -- what comes back --------------------------------------------------------------------------------------------------


def test_a_key_of_two_words_is_no_example():
    """Nobody says which argument is the batch: that of two rows, or that of as many as there are examples?"""

    def step(state, batch, key):
        params, moments = state
        noise = jax.random.normal(key, (64,)) / 10
        value, gradients = jax.value_and_grad(lambda p: loss({**p, "b": p["b"] + noise}, batch))(params)
        return update(params, moments, lax.pmean(gradients, "batch")), lax.pmean(value, "batch")

    key = jax.random.key_data(jax.random.key(3))
    assert key.shape == (2,)
    ours = shardstep.shard(step, mesh_of(8), axis_name="batch")(adam_state(), batch(), key)
    assert_same(ours, reference(step, 8, inputs=(ALL, MINE, ALL))(adam_state(), batch(), key))


def test_a_leaf_of_another_size_in_the_batch_is_no_example():
    def step(state, batch):
        params, moments = state
        scaled = {"x": batch["x"] * jnp.mean(batch["scales"]), "y": batch["y"]}
        value, gradients = jax.value_and_grad(loss)(params, scaled)
        return update(params, moments, lax.pmean(gradients, "batch")), lax.pmean(value, "batch")

    given = {**batch(), "scales": jnp.arange(5.0)}
    ours = shardstep.shard(step, mesh_of(8), axis_name="batch", batch_argnames="batch")(adam_state(), given)
    apart = {"x": MINE, "y": MINE, "scales": ALL}
    assert_same(ours, reference(step, 8, inputs=(ALL, apart))(adam_state(), given))


def test_metrics_of_each_example_come_back_side_by_side():
    def step(state, batch):
        state, _ = step_with(lambda g: lax.pmean(g, "batch"))(state, batch)
        return state, batch["x"].sum(1)

    agree(step, 8, metrics=MINE)


def test_a_scalar_of_each_replica_comes_back_as_a_row():
    def step(state, batch):
        state, _ = step_with(lambda g: lax.pmean(g, "batch"))(state, batch)
        return state, batch["x"].sum()

    sharded = shardstep.shard(step, mesh_of(8), axis_name="batch")
    _, sums = sharded(adam_state(), batch())
    np.testing.assert_allclose(sums, batch()["x"].reshape(8, -1).sum(1), rtol=1e-4, atol=1e-4)


def test_on_a_mesh_of_two_axes():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(2, 4), ("host", "chip"))
    step = step_with(lambda g: lax.pmean(g, "batch"))
    sharded = shardstep.shard(step, mesh, axis_name="batch")
    assert_same(sharded(adam_state(), batch()), reference(step, 8)(adam_state(), batch()))


@pytest.mark.parametrize("weights_rest", ["replicated", "sharded"])
def test_weights_at_rest(weights_rest):
    step = step_with(lambda g: lax.pmean(g, "batch"))
    sharded = shardstep.shard(step, mesh_of(8), axis_name="batch", weights=weights_rest)
    plan = sharded.plan(adam_state(), batch())
    assert len(split_leaves(plan)) == (4 if weights_rest == "replicated" else 6)
    assert_same(sharded(adam_state(), batch()), reference(step, 8)(adam_state(), batch()))


def test_check_uses_shard_map_as_its_reference():
    step = step_with(lambda g: lax.pmean(g, "batch"))
    found = shardstep.check(shardstep.shard(step, mesh_of(8), axis_name="batch"), adam_state(), batch())
    assert found.within(1e-5)


def test_weights_without_an_optimizer():
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        gradients = lax.pmean(gradients, "batch")
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), lax.pmean(value, "batch")

    agree(step, 8, weights())


@pytest.mark.parametrize("tiled", [False, True])
def test_what_all_replicas_share_is_shared_when_it_is_gathered(tiled):
    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        gradients = lax.pmean(gradients, "batch")
        nothing = lax.all_gather(jnp.zeros(3), "batch", axis=0, tiled=tiled).sum()
        copies = jax.tree.map(lambda g: lax.all_gather(g, "batch", axis=0, tiled=tiled), gradients)
        first = jax.tree.map(lambda c, g: c[: len(g)] if tiled else c[0], copies, gradients)
        return update(params, moments, first), lax.pmean(value, "batch") + nothing

    agree(step, 4)


def test_a_ring_sum_is_refused_for_what_it_is():
    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        total = moving = gradients
        for _ in range(3):
            moving = jax.tree.map(lambda g: lax.ppermute(g, "batch", ring), moving)
            total = jax.tree.map(jnp.add, total, moving)
        return update(params, moments, finish(total)), lax.pmean(value, "batch")

    finish = lambda g: jax.tree.map(lambda x: x / 4, g)  # noqa: E731
    sharded = shardstep.shard(step, mesh_of(4), axis_name="batch", batch_argnames="batch")
    with pytest.raises(shardstep.ShardstepError, match=r"comes out of ppermute at .*test_per_replica.*lax\.pmean\("):
        sharded(adam_state(), batch(0))
    finish = lambda g: lax.pmean(jax.tree.map(lambda x: x / 4, g), "batch")  # noqa: E731  the way out
    agree(step, 4)
