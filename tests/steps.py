"""The smallest training step with something to shard, and how two runs of a step are compared.

    pred = tanh(x @ w1 + b) @ w2        w1: 96 x 64, w2: 64 x 96 (24 KiB each: above `min_shard_bytes`), b: 64 (below)

24 examples, so that 1, 2, 3 and 8 replicas share them evenly.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardstep._src.planning.estimate import estimate

EXAMPLES = 24
OPTIMIZER = optax.adam(1e-2, eps=1e-3)  # a large eps: Adam would scale the rounding of tiny gradients up to full size


def mesh_of(n, name="data"):
    return jax.sharding.Mesh(np.asarray(jax.devices()[:n]), (name,))


def estimated(sharded, *args):
    """What a sharded step is predicted to take: seconds and memory."""
    planned, _ = sharded.program(args, {})
    decided, replicas = planned.decided, planned.replicas
    return estimate(decided.schedule, decided.donated, replicas.axes, replicas.topology)


def weights(seed=0):
    k1, k2 = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(k1, (96, 64)) / 10,
        "b": jnp.zeros(64),
        "w2": jax.random.normal(k2, (64, 96)) / 10,
    }


def batch(seed=0, examples=EXAMPLES):
    k1, k2 = jax.random.split(jax.random.key(100 + seed))
    return {"x": jax.random.normal(k1, (examples, 96)), "y": jax.random.normal(k2, (examples, 96))}


def errors(params, batch):
    """The squared error of each example."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2, axis=1)


def loss(params, batch):
    return jnp.mean(errors(params, batch))


def update(params, moments, gradients):
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, changes), moments


def adam_step(state, batch):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return update(params, moments, gradients), value


def adam_state(seed=0):
    params = weights(seed)
    return params, OPTIMIZER.init(params)


def assert_same(ours, theirs, tolerance=1e-5):
    """Same tree, shapes and dtypes; floats within `tolerance` of the leaf's largest value, everything else exactly."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        where = jax.tree_util.keystr(path)
        if not hasattr(a, "dtype"):
            assert a == b, where
            continue
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if jnp.issubdtype(a.dtype, jnp.inexact):
            limit = tolerance * max(float(np.max(np.abs(b), initial=0)), 1e-6)
            np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)


@contextlib.contextmanager
def compilations():
    """The number of programs that XLA compiles inside the block, as the one element of a list."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.clear_event_listeners()


def split_leaves(plan):
    """The paths of the leaves that rest split."""
    return {leaf.path for leaf in plan.leaves if "split" in leaf.layout and leaf.role != "batch"}
