"""Predicted memory: what is alive at the worst moment, and what happens when that does not fit."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from steps import estimated, mesh_of

import shardstep
from shardstep._src.machine.memory import memory_limit
from shardstep._src.machine.replicas import Replicas
from shardstep._src.planning.memory import UNSEEN

WIDTH, EXAMPLES = 256, 64  # a matrix of 256 KiB, 8 examples per replica
MATRIX = WIDTH * WIDTH * 4


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def momentum(loss):
    def step(state, x):
        params, moments = state
        grads = jax.grad(loss)(params, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments)

    return step


def layered(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)


def memory(loss, params, examples=EXAMPLES, weights="sharded", **options):
    sharded = shardstep.shard(momentum(loss), mesh_of(8), weights=weights, options=shardstep.Options(**options))
    return estimated(sharded, (params, params), shaped(examples, WIDTH)).memory


def test_arguments_are_what_rests_on_a_device():
    params = [shaped(WIDTH, WIDTH)] * 4
    batch = EXAMPLES * WIDTH * 4 // 8
    assert memory(layered, params).arguments == 8 * MATRIX // 8 + batch
    assert memory(layered, params, weights="replicated").arguments == 4 * MATRIX + 4 * MATRIX // 8 + batch


def test_donated_state_needs_no_room_for_what_replaces_it():
    params = [shaped(WIDTH, WIDTH)] * 4
    assert memory(layered, params).outputs == 0
    assert memory(layered, params, donate=False).outputs == 8 * MATRIX // 8


def test_scanned_layers_are_gathered_one_at_a_time():
    """Beside gradients (an eighth of 16 matrices) and residuals, a few layers are there at once, not all."""
    found = memory(scanned, shaped(16, WIDTH, WIDTH))
    assert found.temporaries < 11 * MATRIX
    assert memory(layered, [shaped(WIDTH, WIDTH)] * 16).temporaries > 16 * MATRIX


def test_a_scan_keeps_the_residuals_of_every_layer():
    """The input of its product, and what the derivative of tanh needs (one value since JAX 0.12, two before)."""
    few, many = (memory(scanned, shaped(n, WIDTH, WIDTH), 8192) for n in (4, 12))
    residual = UNSEEN * 8192 // 8 * WIDTH * 4
    each = (many.temporaries - few.temporaries) / 8 / residual
    assert round(each) in (2, 3) and each == pytest.approx(round(each), rel=0.05)


def test_what_a_loop_over_steps_carries_stays_where_it_is():
    """Donated state is updated in its place, step after step."""
    params, x = [shaped(2 * WIDTH, 2 * WIDTH)] * 4, shaped(3, EXAMPLES, 2 * WIDTH)
    loop = lambda state, xs: lax.scan(lambda s, x: (momentum(layered)(s, x), None), state, xs)[0]  # noqa: E731
    sharded = shardstep.shard(loop, mesh_of(8), weights="replicated", batch_axis=1)
    predicted = estimated(sharded, (params, params), x).memory
    found = sharded.lower((params, params), x).compile().memory_analysis()
    actual = found.argument_size_in_bytes + found.temp_size_in_bytes
    assert predicted.arguments + predicted.temporaries == pytest.approx(actual, rel=0.25)


KINDS = {
    "layers": (layered, [shaped(WIDTH, WIDTH)] * 6, 64),
    "many examples": (layered, [shaped(WIDTH, WIDTH)] * 6, 8192),
    "scanned": (scanned, shaped(8, WIDTH, WIDTH), 64),
    "scanned, many examples": (scanned, shaped(8, WIDTH, WIDTH), 8192),
    "bfloat16, many examples": (
        lambda params, x: layered([w.astype(jnp.bfloat16) for w in params], x.astype(jnp.bfloat16)).astype(jnp.float32),
        [shaped(WIDTH, WIDTH)] * 6,
        8192,
    ),
    "checkpointed, many examples": (
        lambda params, x: lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)), x, params)[
            0
        ].sum(),
        shaped(8, WIDTH, WIDTH),
        8192,
    ),
    # XLA on CPU undid this before JAX 0.12
    "checkpointed, not scanned": (
        lambda params, x: functools.reduce(jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w)), params, x).sum(),
        [shaped(WIDTH, WIDTH)] * 6,
        8192,
    ),
    # its gradient looks up by indices on CPU
    "max-pooling": (
        lambda params, x: nn.max_pool((x @ params).reshape(-1, 16, 16, 1), (2, 2), (2, 2)).sum(),
        shaped(WIDTH, WIDTH),
        8192,
    ),
}


@pytest.mark.parametrize("weights", ("replicated", "sharded"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_is_near_what_xla_allocates(kind, weights):
    """The benchmark `memory_prediction.py` does this for the zoo."""
    loss, params, examples = KINDS[kind]
    sharded = shardstep.shard(momentum(loss), mesh_of(8), weights=weights)
    arguments = (params, params), shaped(examples, WIDTH)
    predicted = estimated(sharded, *arguments).memory
    found = sharded.lower(*arguments).compile().memory_analysis()
    actual = found.argument_size_in_bytes + found.temp_size_in_bytes
    assert predicted.arguments == pytest.approx(found.argument_size_in_bytes, rel=0.01)
    assert predicted.arguments + predicted.temporaries == pytest.approx(actual, rel=0.25)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA on CPU multiplies bfloat16")
def test_16_bit_operands_of_products_are_copied_where_xla_multiplies_in_float32():
    """As its CPU backend does: here a loop reads weights as they were passed in."""

    def step(weights, frozen, x):
        read = lambda total, part: (total + jnp.sum(jnp.tanh(part @ frozen)).astype(jnp.float32), None)  # noqa: E731
        features, _ = lax.scan(read, 0.0, x.reshape(4, -1, WIDTH).astype(jnp.bfloat16))
        return weights - 0.1 * features * jnp.mean(x), frozen

    arguments = shaped(WIDTH), jax.ShapeDtypeStruct((WIDTH, 16 * WIDTH), jnp.bfloat16), shaped(32, WIDTH)
    sharded = shardstep.shard(step, mesh_of(8), weights="replicated")
    predicted = estimated(sharded, *arguments).memory
    found = sharded.lower(*arguments).compile().memory_analysis()
    assert found.temp_size_in_bytes > 16 * MATRIX
    assert predicted.temporaries == pytest.approx(found.temp_size_in_bytes, rel=0.2)


# -- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "machine", "limit"),
    [(None, None, None), (12345, None, 12345), (None, "v5e:8", 16 * 2**30), (7, "v5e:8", 7), (None, "h200:8", 141e9)],
)
def test_the_limit_is_what_was_asked_for_or_what_the_machine_has(asked, machine, limit):
    assert memory_limit(Replicas.of(mesh_of(8), None, None, machine), asked, machine) == limit


def plan_within(limit, weights="auto", params=None):
    params = [shaped(WIDTH, WIDTH)] * 4 if params is None else params
    loss = layered if isinstance(params, list) else scanned
    sharded = shardstep.shard(momentum(loss), mesh_of(8), weights=weights, options=shardstep.Options(memory=limit))
    return sharded.plan((params, params), shaped(EXAMPLES, WIDTH))


def test_a_plan_that_fits_says_nothing(recwarn):
    plan = plan_within(2**30)
    assert plan.fits and plan.missing_bytes == 0 and plan.memory == 2**30
    assert "DOES NOT FIT" not in str(plan)
    assert json.loads(plan.to_json())["fits"] is True
    assert not [w for w in recwarn if "memory" in str(w.message)]


def test_a_plan_that_does_not_fit_says_so_first():
    with pytest.warns(UserWarning, match="more than the"):
        plan = plan_within(100_000)
    assert not plan.fits and plan.missing_bytes == plan.peak_bytes.sharded - 100_000
    second = str(plan).splitlines()[1]
    assert "DOES NOT FIT" in second and "what would help" in second
    assert json.loads(plan.to_json())["fits"] is False


def test_auto_shards_weights_where_replicated_ones_do_not_fit():
    """On CPU, weights rest replicated unless memory says otherwise."""
    layers = shaped(16, WIDTH, WIDTH)
    loose, tight = plan_within(None, params=layers), plan_within(5 * 2**20, params=layers)
    assert loose.weights == "replicated" and loose.peak_bytes.sharded > 5 * 2**20
    assert tight.weights == "sharded" and tight.fits
    assert "memory" in tight.why_weights


def test_what_was_asked_for_is_not_changed_by_memory():
    with pytest.warns(UserWarning, match='weights="sharded"'):
        plan = plan_within(5 * 2**20, weights="replicated", params=shaped(16, WIDTH, WIDTH))
    assert plan.weights == "replicated" and not plan.fits


def test_options_refuse_what_is_no_number_of_bytes():
    with pytest.raises(shardstep.ShardstepError, match="memory"):
        shardstep.Options(memory=-1)


def stack_of_layers(**how):
    """The plan for 16 scanned layers and so many examples that it is cheaper to move weights."""
    layers = shaped(16, WIDTH, WIDTH)
    sharded = shardstep.shard(momentum(scanned), mesh_of(8), **how)
    return sharded.plan((layers, layers), shaped(4096, WIDTH))


def between(first, then):
    return int(first.peak_bytes.sharded + then.peak_bytes.sharded) // 2


def test_what_is_sent_beyond_the_replicated_step_is_said_first():
    """Each layer is gathered twice, so that no replica holds all of them."""
    loose = stack_of_layers(weights="replicated")
    limit = between(loose, stack_of_layers(weights="sharded"))
    tight = stack_of_layers(options=shardstep.Options(memory=limit))
    assert tight.fits and tight.wire_bytes.ratio > 1.2
    second = str(tight).splitlines()[1]
    assert "SENDS MORE" in second and "gathered where a loop reads them" in second
    assert "SENDS MORE" not in str(loose)


def test_weights_stay_sharded_where_replicated_ones_would_send_less_but_do_not_fit():
    gpu = shardstep.Options(topology="h200:8")
    limit = between(*(stack_of_layers(weights=w, options=gpu) for w in ("replicated", "sharded")))
    plan = stack_of_layers(options=dataclasses.replace(gpu, memory=limit))
    assert plan.weights == "sharded" and plan.fits
    assert "replicated weights would need" in plan.why_weights
