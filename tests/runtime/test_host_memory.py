"""Optimizer state in host memory. CPU devices have both kinds of memory, and are read here as a machine with a bus."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_same, mesh_of

import shardstep
from shardstep import Options
from shardstep._src.core.execution import AHEAD, HOST

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
MACHINE = functools.partial(Options, topology="h200:8", donate=False)
AWAY = MACHINE(offload=True)


def loss(params, x):
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]
    return jnp.mean((x @ params["out"]) ** 2)


def step(state, x):
    params, moments = state
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def state(width=64, hidden=128, layers=5, outputs=96):
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 1))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) / 8  # noqa: E731
    each = [
        {"up": matrix(width, hidden), "bias": jnp.zeros(hidden), "down": matrix(hidden, width)} for _ in range(layers)
    ]
    params = {"layers": each, "out": matrix(width, outputs)}
    return params, OPTIMIZER.init(params)


def examples(width=64):
    return jax.random.normal(jax.random.key(1), (24, width))


def in_host_memory(tree):
    """The large leaves of the optimizer, and whether they are in host memory."""
    leaves = [x.data if isinstance(x, shardstep.Padded) else x for x in jax.tree.leaves(tree) if x.size > 1000]
    return {leaf.sharding.memory_kind == HOST for leaf in leaves}


@pytest.mark.parametrize("weights", ("replicated", "sharded"))
@pytest.mark.parametrize("sizes", [{}, {"width": 67, "hidden": 131}], ids=["even", "padded"])
def test_numbers_are_those_of_the_plain_step(weights, sizes):
    sharded = shardstep.shard(step, mesh_of(8), weights=weights, options=AWAY)
    ours = theirs = state(**sizes)
    for i in range(3):
        x = jnp.roll(examples(sizes.get("width", 64)), i, axis=0)
        (ours, value), (theirs, expected) = sharded(ours, x), jax.jit(step)(theirs, x)
        assert_same(value, expected)
    assert_same(jax.tree.map(np.asarray, ours), jax.tree.map(np.asarray, theirs))
    assert in_host_memory(ours[1]) == {True} and in_host_memory(ours[0]) == {False}


def test_memory_kinds_are_stable_and_nothing_is_compiled_again():
    sharded = shardstep.shard(step, mesh_of(8), options=Options(topology="h200:8", offload=True))
    now = sharded.plan(state(), examples()).init(state)
    assert in_host_memory(now[1]) == {True}
    kinds = jax.tree.map(lambda x: x.sharding, now)
    for _ in range(3):
        now, _ = sharded(now, examples())
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, now, kinds))
    assert sharded._latest._run._cache_size() == 1


def test_only_a_few_leaves_are_on_the_device_at_once():
    traced = shardstep.shard(step, mesh_of(8), options=AWAY).trace(state(layers=8), examples())
    moves = [e.params["devices"][0] for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "device_put"]
    there, most = 0, 0
    for where in moves:
        there += 1 if where == jax.memory.Space.Device else -1
        most = max(most, there)
    assert len(moves) == 2 * 2 * (2 * 8 + 1) and there == 0
    assert most == AHEAD


def test_nothing_is_fetched_before_the_gradients_are_there():
    """The first leaves wait for what the model makes last: a barrier holds them back."""
    traced = shardstep.shard(step, mesh_of(8), options=AWAY).trace(state(), examples())
    names = [e.primitive.name for e in equations(traced.jaxpr.jaxpr)]
    first = names.index("device_put")
    assert names[first - 1] == "optimization_barrier"
    assert "dot_general" not in names[first:]


def equations(jaxpr):
    for e in jaxpr.eqns:
        if e.primitive.name in ("jit", "pjit", "shard_map"):
            inner = e.params["jaxpr"]
            yield from equations(getattr(inner, "jaxpr", inner))
        else:
            yield e


# -- the choice -------------------------------------------------------------------------------------------------------


def planned(**options):
    sharded = shardstep.shard(step, mesh_of(8), options=MACHINE(**options))
    return sharded.plan(*jax.eval_shape(lambda: (state(256, 1024), examples(256))))


def test_it_happens_by_itself_where_nothing_else_fits():
    on_device, away = planned(), planned(offload=True)
    assert not on_device.host_bytes and away.peak_bytes.sharded < on_device.peak_bytes.sharded
    between = int(on_device.peak_bytes.sharded + away.peak_bytes.sharded) // 2
    assert not planned(memory=on_device.peak_bytes.sharded).host_bytes
    found = planned(memory=between)
    assert found.fits and found.host_bytes == away.host_bytes
    assert "nothing else fits" in found.why_offload and "host memory" in str(found)
    assert json.loads(found.to_json())["host_bytes"] == found.host_bytes
    with pytest.warns(UserWarning, match="offload"):
        assert not planned(memory=between, offload=False).fits


def test_what_rests_in_host_memory_is_the_optimizers_and_costs_time():
    on_device, away = planned(), planned(offload=True)
    hosted = [leaf for leaf in away.leaves if leaf.memory == HOST]
    assert hosted and {leaf.role for leaf in hosted} == {"auxiliary"}
    assert all("split" in leaf.layout for leaf in hosted)
    bus = 2 * away.host_bytes / 64e9
    assert away.step_seconds.sharded - on_device.step_seconds.sharded == pytest.approx(bus, rel=0.25)


def test_on_cpu_nothing_is_moved_and_the_plan_says_so():
    sharded = shardstep.shard(step, mesh_of(8), options=Options(offload=True))
    plan = sharded.plan(state(), examples())
    assert not plan.host_bytes and "on CPU" in plan.why_offload and "on CPU" in str(plan)
    now, _ = sharded(state(), examples())
    assert in_host_memory(now) == {False}


def test_a_loop_over_steps_has_the_state_on_the_device_and_says_so():
    def steps(state, xs):
        return jax.lax.scan(step, state, xs)

    xs = jnp.stack([examples()] * 2)
    sharded = shardstep.shard(steps, mesh_of(8), batch_axis=1, options=AWAY)
    assert "stay on the device during the scan" in sharded.plan(state(), xs).why_offload
    ours, theirs = sharded(state(), xs), jax.jit(steps)(state(), xs)
    assert_same(jax.tree.map(np.asarray, ours), jax.tree.map(np.asarray, theirs))
    assert in_host_memory(ours[0][1]) == {True}


def test_checkpoints_come_back_to_host_memory(tmp_path):
    sharded = shardstep.shard(step, mesh_of(8), options=AWAY)
    now, _ = sharded(state(), examples())
    shardstep.save(tmp_path / "saved", now)
    back = shardstep.restore(tmp_path / "saved", sharded.plan(now, examples()))
    assert in_host_memory(back[1]) == {True}
    assert_same(jax.tree.map(np.asarray, back), jax.tree.map(np.asarray, now))


def test_options_refuse_what_is_no_answer():
    with pytest.raises(shardstep.ShardstepError, match="offload"):
        Options(offload="moments")
