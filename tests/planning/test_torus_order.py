"""Torus axes take turns: tensors are scattered along different axes first, and what meets in the update lies alike."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from steps import OPTIMIZER, assert_same

import shardstep
from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import PARTIAL, REPLICATED, Axis, Split, block_shape
from shardstep._src.core.moves import moves
from shardstep._src.planning import visits
from shardstep._src.planning.placement import beginning_with
from shardstep._src.planning.torus_order import first_axis
from shardstep._src.tools.hlo import collectives

WIDTH, LAYERS, EXAMPLES = 1024, 4, 16
TORUS = (Axis(("y",), 4), Axis(("x",), 4))
CUBE = (Axis(("z",), 4), Axis(("y",), 4), Axis(("x",), 4))


def layout(*dims):
    return tuple(map(Split, dims))


# -- which orders cost nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes", "usual", "first", "expected"),
    [
        ((2048, 2048), TORUS, (0, 1), 0, (1, 0)),  # the other axis on the last dimension
        ((2048, 8192), TORUS, (1, 1), 1, (0, 1)),  # x cannot come before y in one dimension: y takes the other
        ((2048, 2048), CUBE, (0, 0, 1), 1, (0, 1, 0)),
        ((2048, 2048), CUBE, (0, 0, 1), 0, (1, 0, 0)),
        ((4096, 512), TORUS, (0, 0), 1, None),  # columns of 128: those would cut tiles of a bfloat16 gradient
        ((2048, 1000), TORUS, (0, 0), 1, None),
        ((4096,), TORUS, (0, 0), 1, None),
    ],
)
def test_another_axis_first_if_it_costs_nothing(shape, axes, usual, first, expected):
    found = beginning_with(first, shape, layout(*usual), axes)
    if expected is None:
        assert found is None or first_axis(shape, found, axes) == first_axis(shape, layout(*usual), axes)
    else:
        assert found == layout(*expected) and first_axis(shape, found, axes) == first
        assert len(block_shape(shape, found, axes)) == len(shape)


def test_a_cut_tile_is_scattered_last_and_many_replicas_are_gathered_axis_by_axis():
    """What the TPU's compiler makes all-reduces of: a scatter into part of a tile, a joint gather over 256 replicas."""
    torus = (Axis(("y",), 16, Backend(tiled=True)), Axis(("x",), 16, Backend(tiled=True)))
    split, summed, whole = layout(2, 0), (PARTIAL,) * 2, (REPLICATED,) * 2
    assert [m.axes for m in moves(summed, split, (16, 64, 1024), torus)] == [(1,), (0,)]  # columns of 64
    assert [m.axes for m in moves(summed, split, (16, 64, 4096), torus)] == [(0,), (1,)]  # columns of 256
    cube = tuple(Axis((name,), 4, Backend(tiled=True)) for name in "zyx")
    order = [m.axes for m in moves((PARTIAL,) * 3, layout(0, 1, 0), (128, 512), cube)]
    assert order == [(0,), (1,), (2,)]  # 32 rows cut no tile; then columns of 128 do, and 8 rows
    assert [m.axes for m in moves(layout(0, 0), whole, (4096, 1024), torus)] == [(1,), (0,)]
    small = tuple(axis._replace(size=4) for axis in torus)
    assert [m.axes for m in moves(layout(0, 0), whole, (4096, 1024), small)] == [(0, 1)]


# -- in a step ------------------------------------------------------------------------------------------------------


def train_step(state, x):
    def loss(params):
        y = x
        for w in params["w"]:
            y = jnp.tanh(y @ w + params["b"])
        return jnp.mean(y**2)

    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), value


def train_state():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {"w": [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in keys], "b": jnp.zeros(WIDTH)}
    return params, OPTIMIZER.init(params)


def examples(i=0):
    return jax.random.normal(jax.random.key(10 + i), (EXAMPLES, WIDTH))


MANY = jax.ShapeDtypeStruct((1024 * EXAMPLES, WIDTH), jnp.float32)  # so many that weights go to them


def sharded(machine, mesh, weights="sharded", step=train_step, bucket_bytes=64 * 1024):
    options = shardstep.Options(topology=machine, bucket_bytes=bucket_bytes)
    return shardstep.shard(step, mesh, batch_argnums=1, weights=weights, options=options)


SPECS = {  # how each of the four weights rests, and all that belongs to it
    # x has 2 chips, y 4: with x first, x carries 1/2 and y 3/8 of a tensor; with y first, 1/8 and 3/4.
    "v5e:2x4": [("data_y", "data_x"), ("data_y", "data_x"), ("data_y", "data_x"), ("data_x", "data_y")],
    # y first, z first, x first, y first: 1/2, then 1/4, then 1/8 of a tensor
    "v5p:2x2x2": [
        ("data_z", ("data_y", "data_x")),
        ("data_y", ("data_z", "data_x")),
        (("data_z", "data_y"), "data_x"),
        ("data_z", ("data_y", "data_x")),
    ],
}


def specs(plan, index):
    """Of one weight and all of its moments."""
    return {tuple(leaf.spec) for leaf in plan.leaves if leaf.path.endswith(f"['w'][{index}]")}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("machine", SPECS)
def test_tensors_take_turns_and_families_agree(machine, weights, mesh):
    plan = sharded(machine, mesh, weights).plan(train_state(), examples())
    found = [specs(plan, i) - {()} for i in range(LAYERS)]  # replicated weights have an empty spec
    assert all(len(spec) == 1 for spec in found)  # a weight and its moments lie alike
    assert [spec for (spec,) in found] == SPECS[machine]


@pytest.mark.parametrize("machine", SPECS)
def test_first_scatters_run_along_different_axes(machine, mesh):
    plan = sharded(machine, mesh).plan(train_state(), MANY)
    scattered = [c for c in plan.collectives if c.kind == "reduce-scatter" and c.shape == (WIDTH, WIDTH)]
    sent = Counter()
    for c in scattered:
        sent[c.axis] += c.bytes
    names = {"v5e:2x4": ["data_y", "data_x"], "v5p:2x2x2": ["data_z", "data_y", "data_x"]}[machine]
    assert sorted(sent) == sorted(names)
    share = {axis: sent[axis] / (4 * WIDTH * WIDTH) for axis in names}
    assert (
        share
        == {
            "v5e:2x4": {"data_y": 3 * 3 / 8 + 3 / 4, "data_x": 3 * 1 / 2 + 1 / 8},
            "v5p:2x2x2": {
                "data_z": 1 / 8 + 1 / 2 + 1 / 4 + 1 / 8,
                "data_y": 1 / 2 + 1 / 8 + 1 / 8 + 1 / 2,
                "data_x": 1.25,
            },
        }[machine]
    )
    busy = dict(plan.axis_seconds)
    assert sorted(busy) == sorted(names)
    assert max(busy.values()) < plan.wire_seconds.sharded <= sum(busy.values())
    assert "links busy" in str(plan) and "first, so that all links work" in str(plan)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("machine", [*SPECS, "v3:2x2"])
def test_numbers_equal_the_plain_run(machine, weights, mesh):
    step, plain = sharded(machine, mesh, weights), jax.jit(train_step)
    ours = theirs = train_state()
    for i in range(2):
        theirs, expected = plain(theirs, examples(i))
        ours, found = step(ours, examples(i))
        assert_same(found, expected)
    assert_same(ours, theirs)


def test_the_compiled_program_scatters_each_tensor_once_along_each_axis(mesh):
    text = sharded("v5e:2x4", mesh).lower(train_state(), MANY).compile().as_text()
    large = [c for c in collectives(text) if c.bytes > 64 * 1024]
    assert {c.kind for c in large} == {"reduce-scatter", "all-gather"}
    assert sum(c.wire_bytes for c in large) == pytest.approx(2 * LAYERS * 4 * WIDTH * WIDTH * 7 / 8)


def test_what_travels_together_keeps_one_order(mesh):
    """Small tensors share collectives, for which they must make the same moves."""
    plan = sharded("v5e:2x4", mesh, bucket_bytes=4 * WIDTH * WIDTH).plan(train_state(), examples())
    assert len(set.union(*(specs(plan, i) for i in range(LAYERS)))) == 1


def test_families_are_found_inside_of_a_loop(mesh, monkeypatch):
    """Three steps in a scan: the update is in its body, and what it carries must lie there as it rests."""
    monkeypatch.setattr(visits, "WORTH", 0.0)  # few as the examples are, weights are to move

    def several(state, batches):
        return jax.lax.scan(train_step, state, batches)

    def stacked(i=0):
        return jnp.stack([examples(3 * i + k) for k in range(3)])

    options = shardstep.Options(topology="v5e:2x4", bucket_bytes=64 * 1024)
    step = shardstep.shard(several, mesh, batch_argnums=1, batch_axis=1, weights="sharded", options=options)
    plan = step.plan(train_state(), stacked())
    found = [specs(plan, i) for i in range(LAYERS)]
    assert all(len(spec) == 1 for spec in found) and len(set.union(*found)) == 2
    assert plan.wire_bytes.sharded <= 1.001 * plan.wire_bytes.replicated
    assert not [c for c in plan.collectives if c.kind == "all-to-all"]
    assert_same(step(train_state(), stacked()), jax.jit(several)(train_state(), stacked()))


def test_weights_that_meet_are_one_family(mesh):
    """A penalty on the difference of two weights: their gradients add up, so they must lie alike."""

    def step(state, x):
        def loss(w):
            apart = jnp.sum((w[0] - w[1]) ** 2)
            return jnp.mean((x @ w[0] @ w[1] @ w[2]) ** 2) + 1e-3 * apart

        value, grads = jax.value_and_grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], m), "m": m}, value

    w = [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in jax.random.split(jax.random.key(0), 3)]
    state = {"w": w, "m": jax.tree.map(jnp.zeros_like, w)}
    program = sharded("v5p:2x2x2", mesh, step=step)
    plan = program.plan(state, examples())
    found = {leaf.path: tuple(leaf.spec) for leaf in plan.leaves if leaf.role != "batch"}
    together = {spec for path, spec in found.items() if path[-3:] in ("[0]", "[1]")}
    alone = {spec for path, spec in found.items() if path[-3:] == "[2]"}
    assert len(together) == len(alone) == 1 and together != alone
    assert_same(program(state, examples()), jax.jit(step)(state, examples()))
