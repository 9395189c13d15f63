"""More devices or fewer, in the middle of a run and without a file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from steps import adam_state, adam_step, assert_same, batch, mesh_of

import shardstep
from shardstep import ShardstepError

EXAMPLES = 120


def test_eight_to_three_to_seven_devices():
    state, plain = adam_state(), adam_state()
    for n, replicas in enumerate((8, 3, 7)):
        step = shardstep.shard(adam_step, mesh_of(replicas))
        plan = step.plan(adam_state(), batch(0, EXAMPLES))
        state = shardstep.reshape(state, plan)
        wanted = jax.tree.leaves(plan.shardings[0][0])
        held = [x.data if isinstance(x, shardstep.Padded) else x for x in jax.tree.leaves(state)]
        assert all(x.sharding == s for x, s in zip(held, wanted, strict=True))
        assert_same(state, plain)
        state, _ = step(state, batch(n, EXAMPLES))
        plain, _ = jax.jit(adam_step)(plain, batch(n, EXAMPLES))
    assert_same(state, plain)


def test_devices_that_have_none_in_common():
    """A call refuses these, because it cannot know that they are meant."""
    first, second = (Mesh(np.asarray(jax.devices()[part]), ("data",)) for part in (slice(0, 4), slice(4, 8)))
    state, _ = shardstep.shard(adam_step, first)(adam_state(), batch(0, EXAMPLES))
    step = shardstep.shard(adam_step, second)
    moved = shardstep.reshape(state, step.plan(adam_state(), batch(0, EXAMPLES)))
    assert_same(moved, state)
    step(moved, batch(1, EXAMPLES))


def test_what_does_not_fit():
    plan = shardstep.shard(adam_step, mesh_of(4)).plan(adam_state(), batch(0))
    params, moments = adam_state()
    with pytest.raises(ShardstepError, match="another tree than the plan"):
        shardstep.reshape((params, moments, 1), plan)
    with pytest.raises(ShardstepError, match=r"state\[0\]\['b'\] is float32\[65\]"):
        shardstep.reshape((params | {"b": jnp.zeros(65)}, moments), plan)
    with pytest.raises(ShardstepError, match="NoneType is none"):
        shardstep.reshape((params, moments), None)
