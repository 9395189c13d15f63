"""Optimizers that multiply and factorize whole matrices: each replica owns some of the matrices, the numbers are jit's.

The models are tiny, so that owning their matrices would not pay: `owning` makes products look slow.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import matrix_zoo as zoo
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import shardstep
from shardstep._src.machine import links
from shardstep._src.rules import stacked as stacked_rule
from shardstep._src.tools.hlo import collectives, counts

SHAPE = (8, 12)
SPLIT_ALL = shardstep.Options(min_shard_bytes=16)


@pytest.fixture
def owning(monkeypatch):
    slow = links.Peak(*[1e7] * 4)
    monkeypatch.setitem(links.CHIPS, "cpu", links.CHIPS["cpu"]._replace(peak=slow))


def replicas(n):
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def trained(step, state, batch, steps=3):
    for _ in range(steps):
        state, value = step(state, batch)
    return shardstep.logical(state), value


def assert_same_training(step, state, batch, sharded, tolerance=1e-4):
    """Every weight has gone the same way, relative to the longest way that an element of it has gone."""
    (theirs, _), value = trained(jax.jit(step), state, batch)
    (ours, _), our_value = trained(sharded, state, batch)
    for a, b, start in zip(*map(jax.tree.leaves, (ours, theirs, state[0])), strict=True):
        way = np.abs(b - start).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * way)
    np.testing.assert_allclose(our_value, value, rtol=1e-5)


def sent(plan):
    return Counter(c.kind for c in plan.collectives)


def example(name, count=3, stacked=False):
    optimizer = optax.contrib.muon(0.02) if name == "optax" else zoo.transformation(name, vmapped=stacked)
    step, state = zoo.training(optimizer, zoo.layers(count, SHAPE, stacked))
    return step, state, zoo.examples(120, SHAPE[0])


QUICK = {("muon_scan", 8), ("muon_unrolled", 5), ("shampoo_every_2", 8), ("soap", 3), ("kron", 8), ("kfac", 2)}
CASES = [(name, n) for name in ("optax", *zoo.OPTIMIZERS) for n in (2, 3, 5, 8) if name != "muon_bf16"]


@pytest.mark.parametrize(
    ("name", "n"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.thorough) for c in CASES]
)
def test_matrices_are_owned_and_the_numbers_are_those_of_jit(owning, name, n):
    step, state, batch = example(name)
    sharded = shardstep.shard(step, replicas(n), options=SPLIT_ALL)
    plan = sharded.plan(state, batch)
    assert "stacked" in {c.purpose for c in plan.collectives} and not plan.fallbacks
    assert_same_training(step, state, batch, sharded)


def test_six_leaves_of_one_shape_take_one_all_to_all_in_and_one_out(owning):
    step, state, batch = example("muon_fori")
    sharded = shardstep.shard(step, replicas(8), options=SPLIT_ALL)
    found = counts(collectives(sharded.lower(state, batch).compile().as_text()))
    assert found == {"reduce-scatter": 1, "all-reduce": 1, "all-gather": 1, "all-to-all": 2}
    elementwise, state, batch = *zoo.training(optax.sgd(0.1, 0.9), zoo.layers(3, SHAPE)), batch
    before = shardstep.shard(elementwise, replicas(8), options=SPLIT_ALL).plan(state, batch).wire_bytes.sharded
    after = sharded.plan(*example("muon_fori")[1:]).wire_bytes.sharded
    assert after <= (1 + 2 / 8) * before


@pytest.mark.parametrize(("name", "moved"), [("shampoo_eigh", 2), ("kron", 4), ("soap", 4)])
def test_preconditioners_that_are_one_leaf_rest_with_their_owners(owning, name, moved):
    """Layers that the replicas divide: only gradients, momentum and updates move."""
    batch = zoo.examples(16, SHAPE[0])
    sgd = zoo.training(optax.sgd(0.1, 0.9), zoo.layers(8, SHAPE, stacked=True))
    before = shardstep.shard(sgd[0], replicas(8), options=SPLIT_ALL).plan(sgd[1], batch).wire_bytes.sharded
    step, state, _ = example(name, 8, stacked=True)
    sharded = shardstep.shard(step, replicas(8), options=SPLIT_ALL)
    plan = sharded.plan(state, batch)
    assert sent(plan)["all-to-all"] == moved and plan.wire_bytes.sharded <= (1 + 2 / 8) * before
    found = counts(collectives(sharded.lower(state, batch).compile().as_text()))
    assert found["all-to-all"] <= moved and "all-gather" in found


@pytest.mark.parametrize(("name", "entering"), [("muon_scan", 2), ("shampoo_eigh", 6), ("kron", 6), ("soap", 13)])
def test_separate_preconditioners_move_to_their_owners_and_back_once(owning, name, entering):
    """Each value that owners read, and each that they make, as one stack."""
    step, state, batch = example(name, 4)
    plan = shardstep.shard(step, replicas(8), options=SPLIT_ALL).plan(state, batch)
    assert sent(plan)["all-to-all"] == entering and plan.owned[0].who == "1 per replica"


def test_the_plan_says_who_owns_what(owning):
    step, state, batch = example("muon_scan")
    plan = shardstep.shard(step, replicas(4), options=SPLIT_ALL).plan(state, batch)
    (owned,) = plan.owned
    assert (owned.shape, owned.count, owned.held) == (SHAPE, 6, (1, 2)) and not owned.repeated
    assert owned.flops_after == pytest.approx(owned.flops_before / 3) and "matrix_zoo.py" in owned.line
    assert "6 x float32[8,12]: 1 or 2 per replica" in str(plan)


def test_the_plan_says_what_is_repeated_and_why():
    step, state, batch = example("muon_scan")
    plan = shardstep.shard(step, replicas(4), options=SPLIT_ALL).plan(state, batch)
    (owned,) = plan.owned
    assert owned.repeated and owned.flops_after == owned.flops_before
    assert "6 x float32[8,12]: repeated by every replica" in str(plan)


def test_the_work_of_the_update_is_shared(owning):
    """Six matrices on eight replicas: each has one, or a copy that nobody reads."""
    shape = (96, 128)
    step, state = zoo.training(zoo.transformation("muon_unrolled"), zoo.layers(3, shape))
    batch = zoo.examples(16, shape[0])

    def flops(f, *args):
        return f.lower(*args).compile().cost_analysis()["flops"]

    grads = jax.jit(lambda state, batch: jax.grad(zoo.loss)(state[0], batch))
    whole, passes = flops(jax.jit(step), state, batch), flops(grads, state, batch)
    ours = flops(shardstep.shard(step, replicas(8), options=SPLIT_ALL), state, batch)
    assert ours <= (1.4 * (whole - passes) + passes) / 8


@pytest.mark.parametrize(("name", "stacked", "n"), [("muon_unrolled", False, 4), ("muon_unrolled", True, 8)])
def test_what_stands_in_empty_slots_reaches_no_result(owning, monkeypatch, name, stacked, n):
    made = []

    def poison(array):
        made.append(array)
        return jnp.full(array.shape, jnp.nan, array.dtype)

    monkeypatch.setattr(stacked_rule, "_nothing", poison)
    step, state, batch = example(name, stacked=stacked)
    sharded = shardstep.shard(step, replicas(n), options=SPLIT_ALL)
    assert_same_training(step, state, batch, sharded)
    assert made


def single(name, shape):
    """The only matrix of its shape."""

    def loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] - y) ** 2)

    optimizer = zoo.transformation(name)
    params = {"w": 0.3 * jax.random.normal(jax.random.key(1), shape)}

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, slots = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), slots), value

    x, y = (jax.random.normal(jax.random.key(100 + k), (120, width)) for k, width in enumerate(shape))
    return step, (params, optimizer.init(params)), (x, y)


@pytest.mark.parametrize(
    ("name", "shape", "n"),
    [
        ("muon_unrolled", (16, 32), 8),
        ("muon_scan", (32, 16), 2),
        pytest.param("muon_scan", (16, 32), 4, marks=pytest.mark.thorough),
        pytest.param("muon_unrolled", (15, 30), 3, marks=pytest.mark.thorough),
        pytest.param("muon_while", (16, 24), 8, marks=pytest.mark.thorough),
        pytest.param("shampoo_newton", (16, 24), 4, marks=pytest.mark.thorough),
    ],
)
def test_the_only_matrix_of_its_shape_is_split_inside(owning, name, shape, n):
    step, state, batch = single(name, shape)
    sharded = shardstep.shard(step, replicas(n), options=SPLIT_ALL)
    plan = sharded.plan(state, batch)
    (owned,) = plan.owned
    assert "split inside" in owned.who and owned.flops_after <= 0.7 * owned.flops_before and owned.count == 1
    assert_same_training(step, state, batch, sharded)


def test_too_few_matrices_to_go_round_are_split_inside(owning):
    """Two for eight replicas, and little to send beside the products: six would wait."""
    step, state = zoo.training(zoo.transformation("muon_unrolled"), zoo.layers(1, (64, 96)))
    (owned,) = shardstep.shard(step, replicas(8), options=SPLIT_ALL).plan(state, zoo.examples(120, 64)).owned
    assert "split inside" in owned.who and owned.flops_after < owned.flops_before / 4
    assert all(way in owned.why for way in ("owned", "repeated", "split inside"))


def test_gradients_without_momentum_are_scattered_to_the_owners(owning):
    step, state, batch = example("muon_without_momentum")
    plan = shardstep.shard(step, replicas(8), options=SPLIT_ALL).plan(state, batch)
    assert sent(plan)["reduce-scatter"] == 1 and sent(plan)["all-to-all"] <= 1


def test_small_matrices_are_repeated():
    """Messages would take longer than the products."""
    step, state, batch = example("muon_scan")
    plan = shardstep.shard(step, replicas(8), options=SPLIT_ALL).plan(state, batch)
    assert not sent(plan)["all-to-all"]


def test_large_matrices_are_owned():
    """The same, without any help: by the figures of the machine."""
    step, state = zoo.training(zoo.transformation("muon_scan"), zoo.layers(3, (192, 512)))
    plan = shardstep.shard(step, replicas(8)).plan(state, zoo.examples(16, 192))
    assert sent(plan)["all-to-all"] == 2


@pytest.mark.parametrize("how", [{"weights": "sharded"}, {"group": 4}, {"mesh": (2, 4)}, {"mesh": (2, 4), "group": 4}])
def test_owning_goes_with_every_way_of_sharding(owning, how):
    step, state, batch = example("muon_scan")
    how = dict(how)
    shape = how.pop("mesh", (8,))
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    sharded = shardstep.shard(step, mesh, options=SPLIT_ALL, **how)
    plan = sharded.plan(state, batch)
    assert "stacked" in {c.purpose for c in plan.collectives}
    assert sum(c.bytes for c in plan.collectives if c.kind == "all-gather" and c.purpose == "stacked") == 0
    assert_same_training(step, state, batch, sharded)


def test_on_a_torus_whole_stacks_travel(monkeypatch):
    """Blocks of rows along two axes, of columns along the third: of all leaves alike, so that no leaf moves by itself.

    Two all-to-alls in, as the dimensions differ, and two out; weights and gradients move as with any optimizer.
    """
    monkeypatch.setitem(links.CHIPS, "v5p", links.CHIPS["v5p"]._replace(peak=links.Peak(*[1e7] * 4)))
    step, state = zoo.training(zoo.transformation("muon_unrolled"), zoo.layers(4, (64, 512)))
    batch, options = zoo.examples(64, 64), shardstep.Options(topology="v5p:2x2x2", min_shard_bytes=16, bucket_bytes=1)
    sharded = shardstep.shard(step, replicas(8), weights="sharded", options=options)
    plan = sharded.plan(state, batch)
    moved = [c for c in plan.collectives if c.kind == "all-to-all"]
    assert [(c.purpose, c.shape[0]) for c in moved] == [("stacked", 8)] * 2 + [("unstack", 8)] * 2
    assert len({str(leaf.layout) for leaf in plan.leaves if len(leaf.shape) == 2 and leaf.role != "batch"}) == 1
    elementwise, plain = zoo.training(optax.sgd(0.1, 0.9), zoo.layers(4, (64, 512)))
    beside = shardstep.shard(elementwise, replicas(8), weights="sharded", options=options).plan(plain, batch)
    assert sent(plan) - Counter({"all-to-all": 4}) == sent(beside)
    assert_same_training(step, state, batch, sharded)


@pytest.mark.parametrize(
    ("name", "count", "n"),
    [
        ("muon_unrolled", 3, 8),  # two leaves of three matrices: their six rows are one stack
        pytest.param("muon_scan", 4, 4, marks=pytest.mark.thorough),
        pytest.param("shampoo_every_2", 3, 5, marks=pytest.mark.thorough),
        pytest.param("soap", 3, 8, marks=pytest.mark.thorough),
        pytest.param("kron", 3, 2, marks=pytest.mark.thorough),
        pytest.param("shampoo_newton", 3, 8, marks=pytest.mark.thorough),
        pytest.param("kfac", 3, 4, marks=pytest.mark.thorough),
    ],
)
def test_matrices_of_stacked_leaves_are_owned_one_by_one(owning, name, count, n):
    step, state, batch = example(name, count, stacked=True)
    sharded = shardstep.shard(step, replicas(n), options=SPLIT_ALL)
    plan = sharded.plan(state, batch)
    owned = plan.owned[0]
    assert owned.held[1] == -(-owned.count // n) and len(owned.shape) == 2 and not plan.fallbacks
    assert_same_training(step, state, batch, sharded)


def test_all_leaves_in_one_condition(owning):
    """Preconditioners of the whole tree that are recomputed every other step: matrices move only then."""
    init, update = zoo.OPTIMIZERS["spectral_clip"]

    def tree_update(grads, state, params=None):
        def clipped():
            done = [update(g, m, state["count"]) if g.ndim == 2 else (g, m) for g, m in zip(leaves, old, strict=True)]
            return [u for u, _ in done], [m for _, m in done]

        leaves, tree = jax.tree.flatten(grads)
        old = state["leaves"]
        updates, new = lax.cond(state["count"] % 2 == 0, clipped, lambda: (leaves, old))
        updates = jax.tree.unflatten(tree, [-0.1 * u for u in updates])
        return updates, {"count": state["count"] + 1, "leaves": new}

    def tree_init(params):
        return {"count": jnp.zeros((), jnp.int32), "leaves": [init(w) for w in jax.tree.leaves(params)]}

    step, state = zoo.training(optax.GradientTransformation(tree_init, tree_update), zoo.layers(3, SHAPE))
    batch = zoo.examples(120, SHAPE[0])
    sharded = shardstep.shard(step, replicas(8), options=SPLIT_ALL)
    inside = [c for c in sharded.plan(state, batch).collectives if c.purpose == "stacked"]
    assert inside and all(c.loop.startswith("cond") for c in inside)
    assert_same_training(step, state, batch, sharded)


def test_several_steps_in_a_scan(owning):
    step, state, batch = example("muon_scan")

    def steps(state, batches):
        state, values = lax.scan(step, state, batches)
        return state, values[-1]

    batches = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), batch)
    sharded = shardstep.shard(steps, replicas(8), batch_argnums=1, batch_axis=1, options=SPLIT_ALL)
    assert "stacked" in {c.purpose for c in sharded.plan(state, batches).collectives}
    assert_same_training(steps, state, batches, sharded)


def test_two_updates_one_after_the_other_are_two_stacks(owning):
    """Isomorphic pieces that wait for one another cannot run at once."""
    step, state, batch = example("muon_scan")

    def twice(state, batch):
        return step(step(state, batch)[0], batch)

    sharded = shardstep.shard(twice, replicas(8), options=SPLIT_ALL)
    assert sent(sharded.plan(state, batch))["all-to-all"] == 4
    assert_same_training(twice, state, batch, sharded)


def test_repeated_runs_are_bit_equal(owning):
    step, state, batch = example("muon_scan")
    sharded = shardstep.shard(step, replicas(8), options=SPLIT_ALL)
    first, second = (jax.tree.leaves(trained(sharded, state, batch)) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
