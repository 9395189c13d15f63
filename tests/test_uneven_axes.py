"""Batches that the replicas do not divide, on meshes with several data axes: what comes back is what `jit` returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import shardstep
from shardstep import Options, ShardstepError
from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import REPLICATED, Axis, Split
from shardstep._src.planning import placement
from shardstep._src.planning.propagation import forward, loops

DEVICES = np.asarray(jax.devices()[:8])
EVERYTHING = Options(min_shard_bytes=0)
LINE = Mesh(DEVICES, ("data",))
MESHES = {  # a mesh, and the size of the groups
    "group": (LINE, 4),
    "4x2": (Mesh(DEVICES.reshape(4, 2), ("x", "y")), None),
    "2x2x2": (Mesh(DEVICES.reshape(2, 2, 2), ("x", "y", "z")), None),
}


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_as_jit(step, *args, mesh=LINE, group=None, tolerance=1e-5, **how):
    theirs = jax.jit(step)(*args)
    ours = shardstep.shard(step, mesh, group=group, options=EVERYTHING, **how)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def per_example(w, x):
    """Values for each example: plain, transposed, with dimensions of size one, merged, and stacked by three steps."""

    def loss(w):
        y = jnp.tanh(x @ w)
        return jnp.sum(y**2), y

    gradient, y = jax.grad(loss, has_aux=True)(w)
    _, stacked = jax.lax.scan(lambda c, _: (c * 0.9, ((x @ c).sum(1), (x @ c).T)), w, None, length=3)
    return w - 0.01 * gradient, y.sum(1), y.T, y[:, None], y.reshape(-1), stacked


@pytest.mark.parametrize("examples", [1, 3, 13, 20])
@pytest.mark.parametrize("name", MESHES)
def test_outputs_per_example_keep_all_their_rows(name, examples):
    mesh, group = MESHES[name]
    assert_as_jit(per_example, normal(8, 16), normal(examples, 8), mesh=mesh, group=group, batch_argnums=1)


def test_an_output_of_another_shape_than_the_steps_is_never_returned(monkeypatch):
    def axis_by_axis(shape, layout, axes):
        return tuple(p if forward._rests(p) else REPLICATED for p in layout)

    monkeypatch.setattr(forward, "at_rest", axis_by_axis)  # as each axis would decide alone
    alone = Options(min_shard_bytes=0, bucket_bytes=0)  # packing would notice first
    step = shardstep.shard(lambda w, x: (w, (x @ w).sum(1)), LINE, group=4, batch_argnums=1, options=alone)
    args = normal(8, 16), normal(13, 8)
    with pytest.raises(ShardstepError, match=r"internal error: output 1 .* float32\[12\] where .* float32\[13\]"):
        step(*args)
    with pytest.raises(ShardstepError, match="internal error"):
        step.lower(*args)


@pytest.mark.parametrize("start", [-20, 3, 9, 15, np.uint8(200)])
@pytest.mark.parametrize("name", MESHES)
def test_a_window_of_the_examples_that_starts_outside_is_moved_inside(name, start):
    """Replicas cut blocks out of a window that one axis divides: XLA made one slice of the two, and clamped it once."""

    def step(w, x, z):
        start = (jnp.sum(z) // 300).astype(z.dtype)
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, jax.lax.dynamic_slice(x, (start, jnp.zeros_like(start)), (10, 8))

    mesh, group = MESHES[name]
    z = jnp.full(300, start)
    assert_as_jit(step, normal(8, 8), normal(16, 8), z, mesh=mesh, group=group, batch_argnums=1)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (128, 0), (0, 128, 128)])
def test_state_of_no_elements_is_not_cut_on_tiled_memory(shape):
    axes = tuple(Axis((name,), 4, Backend(tiled=True)) for name in "xy")
    found = placement._whole_tiles(shape, axes, [0, 1])
    assert found == {}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("features", [(0, 8), (8, 0), (0,)])
def test_examples_of_no_elements_come_back_as_they_are(features, name):
    """Repeated examples are cut in blocks of each repetition, and those were joined by dividing by no elements."""

    def step(w, x, z):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, jnp.tile(z, (2, *(1 for _ in features))), jnp.concatenate([z, z])

    mesh, group = MESHES[name]
    z = jnp.zeros((8, *features), jnp.int32)
    assert_as_jit(step, normal(8, 8), normal(8, 8, seed=1), z, mesh=mesh, group=group, batch_argnums=(1, 2))


@pytest.mark.parametrize("examples", [1, 7])
@pytest.mark.parametrize("name", MESHES)
def test_rows_of_a_table_whose_columns_are_examples(name, examples):
    """The inner axis divides only the padded block of the outer one: where that holds the table whole, so must it."""

    def step(w, x, table):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - gradient, jnp.take(table, table, axis=0, mode="wrap").sum(), table[jnp.arange(3)]

    mesh, group = MESHES[name]
    table = jnp.arange(8 * examples).reshape(8, examples) % 8
    how = {"batch_argnums": (1, 2), "batch_axis": (0, 1)}
    assert_as_jit(step, normal(8, 8), normal(examples, 8, seed=1), table, mesh=mesh, group=group, **how)


def test_a_block_that_is_padded_is_not_padded_again():
    """An example that is padded along the outer axis meets a weight that rests padded along the inner one."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x * w) ** 2))(w), {}

    assert_as_jit(step, normal(3), jnp.ones(1), group=2, weights="sharded", batch_argnums=1)


def test_layouts_of_branches_that_do_not_nest_are_not_joined():
    axes = (Axis(("x",), 4), Axis(("y",), 2))
    outer, inner = Split(0, extent=4), Split(0, extent=4)
    assert loops._fitting((outer, inner), (3,), axes) == (outer, REPLICATED)
    assert loops._fitting((Split(0), Split(0)), (4,), axes) == (Split(0), REPLICATED)
    assert loops._fitting((Split(0), Split(0)), (8,), axes) == (Split(0), Split(0))
