"""`Options(deterministic=True)`: the same bits on 2, 4 or 8 replicas, and what is not promised is said."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_same, mesh_of

import shardstep
from shardstep import Options

WIDTH, EXAMPLES = 64, 32
OPTIMIZER = optax.adam(1e-2)
X = jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))
FIXED = Options(deterministic=True)


def create(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "layers": [(jax.random.normal(k, (WIDTH, WIDTH)) / 8).astype(dtype) for k in keys],
        "bias": jnp.zeros(WIDTH, dtype),
        "uneven": jnp.full((WIDTH, 3), 0.1, dtype),
    }
    return params, OPTIMIZER.init(params)


def loss_of(params, x):
    """Its gradients are scaled after they are summed: by a number that is no power of two."""
    h = x.astype(params["bias"].dtype)
    for w in params["layers"]:
        h = jnp.tanh(h @ w) + params["bias"]
    return jnp.mean((h @ params["uneven"]).astype(jnp.float32) ** 2) / 3.7


def plain(state, x):
    params, moments = state
    value, gradients = jax.value_and_grad(loss_of)(params, x)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), value


def accumulating(state, x):
    """Gradients of four microbatches (on the first dimension) are added up in a loop."""
    params, moments = state

    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, part)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (value, gradients), _ = jax.lax.scan(add, zero, x)
    changes, moments = OPTIMIZER.update(jax.tree.map(lambda g: g / 3, gradients), moments, params)
    return (optax.apply_updates(params, changes), moments), value


STEPS = {"plain": (plain, X, 0), "accumulating": (accumulating, jnp.stack([X, X + 0.1, X - 0.1, 2 * X]), 1)}


def after(n, step, dtype, options, steps=3):
    run, x, axis = STEPS[step]
    sharded = shardstep.shard(run, mesh_of(n), batch_argnums=1, batch_axis=axis, weights="replicated", options=options)
    state = create(dtype)
    for _ in range(steps):
        state, value = sharded(state, x)
    return shardstep.logical(state), value


def differing(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in leaves)


SHORT = [("plain", jnp.bfloat16), ("accumulating", jnp.float32)]
MORE = [("plain", jnp.float32), ("accumulating", jnp.bfloat16)]


@pytest.mark.parametrize(
    ("step", "dtype"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_the_same_bits_on_two_replicas_or_more(step, dtype):
    on_eight = after(8, step, dtype, FIXED)
    for n in (4, 2):
        assert not differing(on_eight, after(n, step, dtype, FIXED)), n
    # alone, XLA fuses what a collective separates elsewhere, and may round once where it rounds twice
    assert_same(after(1, step, dtype, FIXED), on_eight, tolerance=1e-5 if dtype == jnp.float32 else 2e-2)
    assert differing(after(8, step, dtype, Options()), after(2, step, dtype, Options()))  # not by luck


def test_the_numbers_are_the_steps_own():
    run, x, _ = STEPS["plain"]
    state = create(jnp.float32)
    for _ in range(3):
        state, value = jax.jit(run)(state, x)
    assert_same(after(4, "plain", jnp.float32, FIXED), (state, value), tolerance=2e-4)


def test_what_it_costs_and_what_it_leaves_out_is_said():
    """A sum is not put off until after the loop; the norm of a weight is no sum over examples."""

    def clipped(state, x):
        (params, moments), value = accumulating(state, x)
        norm = optax.tree.norm(params)
        return (jax.tree.map(lambda p: p / norm, params), moments), value

    x = STEPS["accumulating"][1]
    how = dict(batch_argnums=1, batch_axis=1, weights="replicated")
    fixed = shardstep.shard(clipped, mesh_of(8), options=FIXED, **how).plan(create(jnp.float32), x)
    default = shardstep.shard(clipped, mesh_of(8), **how).plan(create(jnp.float32), x)
    assert fixed.wire_bytes.sharded > 1.5 * default.wire_bytes.sharded and "SENDS MORE" in str(fixed)
    said = " ".join(fixed.notes)
    assert "added in pairs" in said and "another order for reduce_sum" in said
    assert not any("deterministic" in note for note in default.notes)


def test_examples_that_do_not_make_enough_terms_are_said():
    """Eight examples on eight replicas: a term would be a product of one."""
    sharded = shardstep.shard(plain, mesh_of(8), batch_argnums=1, options=FIXED)
    plan = sharded.plan(create(jnp.float32), X[:8])
    assert any("another order for dot_general" in note for note in plan.notes)
    state, value = sharded(create(jnp.float32), X[:8])
    assert_same((state, value), jax.jit(plain)(create(jnp.float32), X[:8]), tolerance=1e-4)


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        (dict(mesh=mesh_of(6)), {}, "1, 2, 4"),
        (dict(mesh=mesh_of(8), group=4), {}, "one axis"),
        (dict(mesh=mesh_of(8), axis_name="data"), {}, "per-replica step"),
        (dict(mesh=mesh_of(8)), dict(reduce="float32"), "Leave out reduce"),
        (dict(mesh=mesh_of(8)), dict(wire="int8"), "Leave out wire"),
    ],
    ids=str,
)
def test_where_the_order_cannot_be_kept(how, options, said):
    def per_replica(state, x):
        params, moments = state
        gradients = jax.lax.pmean(jax.grad(loss_of)(params, x), "data")
        return jax.tree.map(jnp.subtract, params, gradients), moments

    step = per_replica if "axis_name" in how else plain
    with pytest.raises(shardstep.ShardstepError, match=said):
        shardstep.shard(step, batch_argnums=1, options=Options(deterministic=True, **options), **how).plan(
            create(jnp.float32), X
        )
