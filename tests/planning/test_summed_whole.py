"""Leaves whose gradients the TPU's compiler would sum, not scatter, rest whole along that axis if memory allows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardstep
from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import REPLICATED, Axis, Split
from shardstep._src.core.tiles import all_reduced
from shardstep._src.machine import replicas
from shardstep._src.planning import summed_whole
from shardstep._src.planning.summed_whole import left_whole

TORUS = (Axis(("y",), 4, Backend(tiled=True)), Axis(("x",), 8, Backend(tiled=True)))
CUBE = tuple(Axis((name,), 4, Backend(tiled=True)) for name in "zyx")


@pytest.mark.parametrize(
    ("block", "dim", "dtype", "expected"),
    [
        ((8, 256), 0, jnp.float32, False),
        ((4, 256), 0, jnp.float32, True),
        ((32, 128), 1, jnp.float32, False),
        ((32, 64), 1, jnp.float32, True),
        ((16, 256), 0, jnp.bfloat16, False),
        ((3, 3, 8, 256), 2, jnp.bfloat16, True),
        ((32, 256), 1, jnp.bfloat16, False),
        ((32, 128), 1, jnp.bfloat16, True),
        ((1, 3, 5), 0, jnp.bfloat16, False),  # neither rows nor lanes
    ],
)
def test_what_the_compiler_does_not_scatter(block, dim, dtype, expected):
    """As seen in programs of libtpu."""
    assert all_reduced(block, dim, range(len(block)), jnp.dtype(dtype).itemsize) is expected


def layout(*dims):
    return tuple(REPLICATED if d is None else Split(d) for d in dims)


@pytest.mark.parametrize(
    ("shape", "axes", "usual", "itemsize", "expected"),
    [
        ((3, 3, 256, 256), TORUS, (3, 2), 2, (None, 2)),  # columns of 64
        ((3, 3, 256, 256), TORUS, (3, 2), 4, (None, 2)),
        ((3, 3, 512, 512), TORUS, (3, 2), 2, (None, 2)),  # columns of 128: half a tile of bfloat16 for each neighbour,
        ((3, 3, 512, 512), TORUS, (3, 2), 4, (3, 2)),  # a tile of float32
        ((1, 1, 256, 64), TORUS, (2, 2), 2, (2, None)),  # 64 rows, then 8
        ((1, 1, 128, 512), CUBE, (2, 3, 2), 2, (2, None, None)),
        ((1024, 1024), CUBE, (0, 0, 1), 2, (0, 0, 1)),
    ],
)
def test_a_leaf_keeps_the_splits_into_which_its_gradient_is_scattered(shape, axes, usual, itemsize, expected):
    assert left_whole(shape, layout(*usual), axes, {(shape, itemsize)}) == layout(*expected)
    assert left_whole(shape, layout(*usual), axes, {((*shape, 1), itemsize)}) == layout(*usual)


def test_padding_stays_where_it_is():
    padded = (Split(0, extent=1008), Split(0))
    assert left_whole((1000, 64), padded, TORUS, {((1000, 64), 2)}) == padded


# -- in a step ------------------------------------------------------------------------------------------------------


def leaves(mesh, monkeypatch, dtype=jnp.bfloat16):
    """Layouts of two weights on a torus of 4 x 2: a block of the first would have 128 columns."""
    monkeypatch.setattr(replicas, "_backend", lambda *_: Backend(tiled=True))

    def step(state, x):
        def loss(w):
            y = jnp.tanh(x.astype(dtype) @ w[0].astype(dtype)) @ w[1].astype(dtype)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state["w"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], momentum), "m": momentum}, value

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 1024), (1024, 2048))]
    options = shardstep.Options(topology="v5e:2x4", min_shard_bytes=1)
    examples = jax.ShapeDtypeStruct((1 << 16, 32), jnp.float32)  # so many that weights go to them
    sharded = shardstep.shard(step, mesh, batch_argnums=1, weights="sharded", options=options)
    plan = sharded.plan({"w": weights, "m": weights}, examples)
    found = {leaf.path: leaf for leaf in plan.leaves}
    return plan, found["state['w'][0]"], found["state['m'][0]"]


def test_such_a_leaf_rests_whole_along_that_axis_and_the_plan_says_why(mesh, monkeypatch):
    plan, weight, momentum = leaves(mesh, monkeypatch)
    assert weight.layout == momentum.layout == "split(1) x replicated"
    assert "end inside of a tile" in weight.reason and "end inside of a tile" in momentum.reason
    assert plan.wire_bytes.sharded <= 1.001 * plan.wire_bytes.replicated


def test_not_where_whole_tiles_are_scattered(mesh, monkeypatch):
    _, weight, _ = leaves(mesh, monkeypatch, dtype=jnp.float32)
    assert "replicated" not in weight.layout


def test_not_where_it_would_take_much_memory(mesh, monkeypatch):
    monkeypatch.setattr(summed_whole, "ROOM", 1e-9)
    _, weight, _ = leaves(mesh, monkeypatch)
    assert "replicated" not in weight.layout
