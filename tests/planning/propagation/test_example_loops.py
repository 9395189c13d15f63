"""While loops with a predicate per example (`while_loop` under `vmap`): each replica runs until its own are done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import shardstep
from shardstep import Options

DEVICES = np.asarray(jax.devices()[:8])
MESHES = {
    "3": Mesh(DEVICES[:3], ("data",)),
    "8": Mesh(DEVICES, ("data",)),
    "4x2": Mesh(DEVICES.reshape(4, 2), ("x", "y")),
}


def root(x):
    """Newton's method, and how many iterations it took."""
    return lax.while_loop(
        lambda c: jnp.abs(c[0] * c[0] - x) > 1e-3, lambda c: ((c[0] + x / c[0]) / 2, c[1] + 1), (x + 1, 0)
    )


def mixed_root(x):
    """The same with a body that looks at all examples: replicas have to go on together."""
    return lax.while_loop(
        lambda c: jnp.abs(c * c - x) > 1e-3,
        lambda c: (c + x / c) / 2 + 1e-6 * lax.pmean(c, "examples"),
        x + 1,
    )


def compare(find, mesh, examples):
    def step(w, x):
        found = find(jnp.abs(x).sum(1))
        loss, g = jax.value_and_grad(lambda w: (((x @ w).sum(1) - jax.tree.leaves(found)[0]) ** 2).mean())(w)
        return w - 0.01 * g, (loss, found)

    x = jax.random.normal(jax.random.key(1), (examples, 6)) * jnp.arange(1, examples + 1)[:, None]
    w = jnp.ones((6, 24))
    sharded = shardstep.shard(step, mesh, options=Options(min_shard_bytes=0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        jax.jit(step)(w, x),
        shardstep.logical(sharded(w, x)),
    )
    return sharded.plan(w, x)


@pytest.mark.parametrize("examples", [24, 13])
@pytest.mark.parametrize("mesh", MESHES)
def test_each_replica_runs_until_its_own_examples_are_done(mesh, examples):
    """Counts are exact, padding (13 examples) never keeps a loop alive, and no example moves before the end."""
    plan = compare(jax.vmap(root), MESHES[mesh], examples)
    assert not plan.fallbacks
    assert all(c.kind != "all-gather" or c.purpose in ("output", "w") for c in plan.collectives), plan.collectives


@pytest.mark.parametrize("mesh", ["3", "8"])
def test_replicas_go_on_together_where_the_body_mixes_examples(mesh):
    compare(jax.vmap(mixed_root, axis_name="examples"), MESHES[mesh], 24)
