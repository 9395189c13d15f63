"""Layers that are stacked and scanned: gathered and scattered one at a time, as an expert's FSDP program does."""

from __future__ import annotations

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from steps import mesh_of

import shardstep
from shardstep._src.tools.hlo import collectives, wire_bytes

WIDTH, HIDDEN, LAYERS, EXAMPLES = 48, 96, 6, 96


def stacked(layers=LAYERS, width=WIDTH, hidden=HIDDEN, seed=0):
    k1, k2 = jax.random.split(jax.random.key(seed))
    return {
        "up": jax.random.normal(k1, (layers, width, hidden)) / 8,
        "down": jax.random.normal(k2, (layers, hidden, width)) / 8,
        "bias": jnp.zeros((layers, hidden)),
    }


def layer(x, w, dtype=jnp.float32):
    hidden = jax.nn.gelu(x @ w["up"].astype(dtype) + w["bias"].astype(dtype))
    return x + hidden @ w["down"].astype(dtype), None


def adam_step(loss):
    """One step of Adam, by hand, for any loss; a large epsilon, so that rounding is not scaled up."""

    def step(state, x):
        params, mean, square = state
        value, grads = jax.value_and_grad(loss)(params, x)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, grads)
        params = jax.tree.map(lambda p, m, v: p - 1e-2 * m / (jnp.sqrt(v) + 1e-3), params, mean, square)
        return (params, mean, square), value

    return step


def adam_state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, jax.tree.map(jnp.zeros_like, params)


def examples(width=WIDTH, count=EXAMPLES):
    return jax.random.normal(jax.random.key(7), (count, width))


def scanned(params, x, body=layer, dtype=jnp.float32, **how):
    out, _ = lax.scan(functools.partial(body, dtype=dtype), x.astype(dtype), params, **how)
    return jnp.mean(out.astype(jnp.float32) ** 2)


def with_policy(policy):
    def loss(params, x):
        body = jax.checkpoint(layer, policy=policy, static_argnums=(2,))
        out, _ = lax.scan(lambda x, w: body(x, w, jnp.bfloat16), x.astype(jnp.bfloat16), params)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return loss


def two_groups(params, x):
    """Stacks of different heights, and an embedding that both ends of the model share."""
    x = x @ params["embed"]
    x, _ = lax.scan(layer, x, params["first"])
    x, _ = lax.scan(layer, x, params["second"])
    return jnp.mean((x @ params["embed"].T) ** 2)


def in_microbatches(params, x):
    """Layers inside microbatches."""

    def microbatch(total, part):
        return total + scanned(params, part), None

    return lax.scan(microbatch, 0.0, x.reshape(4, -1, x.shape[1]))[0] / 4


def blocks_of_layers(params, x):
    """A scan of scans: [blocks, layers, ...]."""
    nested = jax.tree.map(lambda w: w.reshape(2, -1, *w.shape[1:]), params)
    return jnp.mean(lax.scan(lambda x, block: lax.scan(layer, x, block), x, nested)[0] ** 2)


def indexed(params, x):
    """A loop that looks its layer up."""

    def body(i, x):
        return layer(x, jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), params))[0]

    return jnp.mean(lax.fori_loop(0, params["up"].shape[0], body, x) ** 2)


def indexed_and_checkpointed(params, x, dtype=jnp.float32):
    """A scan over the numbers of the layers."""

    @jax.checkpoint
    def body(x, i):
        return layer(x, jax.tree.map(lambda w: w[i], params), dtype)

    out, _ = lax.scan(body, x.astype(dtype), jnp.arange(params["up"].shape[0]))
    return jnp.mean(out.astype(jnp.float32) ** 2)


def indexed_in_microbatches(params, x):
    parts = x.reshape(4, -1, x.shape[1])
    return lax.scan(lambda total, part: (total + indexed(params, part), None), 0.0, parts)[0] / 4


class FlaxLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(HIDDEN)(x))), None


FLAX = nn.scan(FlaxLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()


def haiku_model(x):
    def block(x):
        return x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(HIDDEN)(x)))

    return jnp.mean(hk.experimental.layer_stack(LAYERS)(block)(x) ** 2)


HAIKU = hk.without_apply_rng(hk.transform(haiku_model))


def equinox_layers():
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))
    return make(jax.random.split(jax.random.key(0), LAYERS))


def equinox_loss(params, x):
    dynamic, static = eqx.partition(params, eqx.is_array)
    out, _ = lax.scan(lambda x, w: (x + jnp.tanh(jax.vmap(eqx.combine(w, static))(x)), None), x, dynamic)
    return jnp.mean(out**2)


def residuals_offloaded(params, x):
    """What the backward pass needs waits in the memory of the host."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def body(x, w):
        hidden = checkpoint_name(jax.nn.gelu(x @ w["up"] + w["bias"]), "hidden")
        return x + hidden @ w["down"], None

    return jnp.mean(lax.scan(body, x, params)[0] ** 2)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


def nnx_layers():
    make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer, in_axes=0, out_axes=0))
    return nnx.split(make(nnx.Rngs(0)))


def nnx_loss(params, x):
    layers = nnx.merge(nnx_layers()[0], params)
    run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    return jnp.mean(run(layers, x) ** 2)


FORMS = {
    "plain": (scanned, stacked),
    "bfloat16": (functools.partial(scanned, dtype=jnp.bfloat16), stacked),
    "unrolled in part": (functools.partial(scanned, unroll=2), stacked),
    "backwards": (functools.partial(scanned, reverse=True), stacked),
    "remat": (with_policy(None), stacked),
    "remat, products saved": (with_policy(jax.checkpoint_policies.dots_saveable), stacked),
    "odd layers": (scanned, functools.partial(stacked, 5)),
    "odd width": (scanned, functools.partial(stacked, width=45)),
    "two groups": (
        two_groups,
        lambda: {"first": stacked(4), "second": stacked(2, seed=1), "embed": stacked(1)["up"][0, :, :WIDTH]},
    ),
    "remat, residuals offloaded": (residuals_offloaded, stacked),
    "microbatches": (in_microbatches, stacked),
    "blocks of layers": (blocks_of_layers, stacked),
    "indexed": (indexed, stacked),
    "indexed, remat": (indexed_and_checkpointed, stacked),
    "indexed, microbatches": (indexed_in_microbatches, stacked),
    "flax": (
        lambda p, x: jnp.mean(FLAX.apply(p, x, None)[0] ** 2),
        lambda: FLAX.init(jax.random.key(0), examples(), None),
    ),
    "haiku": (HAIKU.apply, lambda: HAIKU.init(jax.random.key(0), examples())),
    "equinox": (equinox_loss, equinox_layers),
    "nnx": (nnx_loss, lambda: nnx_layers()[1]),
}
WIDTHS = {"odd width": 45}


SELDOM = (("replicated", 8), ("sharded", 3))
# Every form where its weights rest sharded; replicated weights, and three replicas, for the first forms only.
RESTING = [
    *(pytest.param(form, "sharded", 8) for form in FORMS),
    *(pytest.param(form, *how, marks=pytest.mark.once) for form in list(FORMS)[:3] for how in SELDOM),
    *(pytest.param(form, *how, marks=pytest.mark.thorough) for form in list(FORMS)[3:] for how in SELDOM),
    *(pytest.param("indexed", "sharded", replicas) for replicas in (2, 3)),
]


@pytest.mark.parametrize(("form", "weights", "replicas"), RESTING)
def test_numbers_are_those_of_the_plain_step(form, weights, replicas):
    assert_plain(form, replicas, weights=weights, options=shardstep.Options(donate=False))


def assert_plain(form, replicas, **how):
    loss, init = FORMS[form]
    step = adam_step(loss)
    x = examples(WIDTHS.get(form, WIDTH))
    state = adam_state(eqx.filter(init(), eqx.is_array) if form == "equinox" else init())
    expected, value = jax.jit(step)(state, x)
    found, found_value = shardstep.shard(step, mesh_of(replicas), **how)(state, x)
    narrow = form in ("bfloat16", "remat", "remat, products saved")
    np.testing.assert_allclose(found_value, value, rtol=2e-2 if narrow else 1e-5)
    for a, b in zip(jax.tree.leaves(shardstep.logical(found)), jax.tree.leaves(expected), strict=True):
        # an update moves a weight by at most 1e-2; bfloat16 gradients are summed in another order
        np.testing.assert_allclose(a, b, atol=2e-3 if narrow else 2e-5)


ONCE = [
    *(pytest.param(form, replicas) for form, replicas in (("remat", 8), ("plain", 3), ("bfloat16", 2))),
    *(pytest.param(form, 8, marks=pytest.mark.thorough) for form in FORMS if form not in ("remat", "plain")),
]


@pytest.mark.parametrize(("form", "replicas"), ONCE)
def test_numbers_stay_so_where_layers_are_gathered_once(form, replicas):
    assert_plain(form, replicas, weights="sharded", options=shardstep.Options(donate=False, layers="once"))


EACH = [
    *(pytest.param(form, 8) for form in ("microbatches", "blocks of layers", "indexed, microbatches")),
    *(pytest.param(form, 3, marks=pytest.mark.thorough) for form in FORMS),
]


@pytest.mark.parametrize(("form", "replicas"), EACH)
def test_numbers_stay_so_where_as_little_is_held_as_can_be(form, replicas):
    assert_plain(form, replicas, weights="sharded", options=shardstep.Options(donate=False, layers="each"))


def test_steps_in_a_loop_around_scanned_layers():
    step = adam_step(scanned)
    state, xs = adam_state(stacked()), jnp.stack([examples(), 2 * examples()])
    loop = lambda state, xs: lax.scan(step, state, xs)  # noqa: E731
    sharded = shardstep.shard(
        loop, mesh_of(8), weights="sharded", batch_axis=1, options=shardstep.Options(donate=False)
    )
    for a, b in zip(
        jax.tree.leaves(shardstep.logical(sharded(state, xs))), jax.tree.leaves(loop(state, xs)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("weights", ("replicated", "sharded"))
@pytest.mark.parametrize("layers", (5, 8, 16))
def test_no_leaf_is_split_along_its_layers(layers, weights):
    state, x = jax.eval_shape(lambda: (adam_state(stacked(layers, 64, 128)), examples(64)))
    plan = shardstep.shard(adam_step(scanned), mesh_of(8), weights=weights).plan(state, x)
    stacks = [leaf for leaf in plan.leaves if len(leaf.shape) == 3]
    assert {leaf.layout for leaf in stacks if leaf.role == "auxiliary"} == {"split(1)"}
    assert not any("split(0)" in leaf.layout for leaf in stacks)


def test_dimensions_that_nested_loops_slice_are_all_left_whole():
    params = lambda: {"w": jnp.zeros((8, 8, 64, 64))}  # noqa: E731
    inner = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731

    def loss(p, x):
        return jnp.mean(lax.scan(lambda x, ws: lax.scan(inner, x, ws), x, p["w"])[0])

    state, x = jax.eval_shape(lambda: (adam_state(params()), examples(64)))
    plan = shardstep.shard(adam_step(loss), mesh_of(8), weights="sharded").plan(state, x)
    assert {leaf.layout for leaf in plan.leaves if leaf.role == "auxiliary"} == {"split(2)"}


def test_a_stack_with_no_other_dimension_to_split_is_split_along_its_layers():
    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, w: (x * w, None), x, params)[0])

    step = adam_step(loss)
    state, x = jax.eval_shape(lambda: (adam_state(jnp.ones(8192)), examples()))
    plan = shardstep.shard(step, mesh_of(8), weights="sharded").plan(state, x)
    assert {leaf.layout for leaf in plan.leaves if leaf.role == "auxiliary"} == {"split(0)"}


def odd_heads(params, x, heads=5):
    """A GPT in bfloat16 whose heads the replicas do not divide; an example is 16 tokens."""

    @jax.checkpoint
    def block(x, w):
        w = jax.tree.map(lambda w: w.astype(jnp.bfloat16), w)
        qkv = (x @ w["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
        x = x + jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x = x.reshape(-1, 16, params["out"].shape[-1]).astype(jnp.bfloat16)
    return jnp.mean(lax.scan(block, x, params)[0].astype(jnp.float32) ** 2)


def gpt(layers, width=160):
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return {name: jnp.ones((layers, *shape)) / width for name, shape in shapes.items()}


KINDS = {
    "bfloat16, remat": (with_policy(None), lambda: (stacked(8, 128, 256), examples(128, 2048))),
    "float32": (scanned, lambda: (stacked(8, 128, 256), examples(128, 2048))),
    "layers that do not divide": (scanned, lambda: (stacked(7, 128, 256), examples(128, 2048))),
    "odd heads": (odd_heads, lambda: (gpt(6), examples(160, 1024))),
    "indexed": (indexed, lambda: (stacked(8, 128, 256), examples(128, 2048))),
    "indexed, remat": (indexed_and_checkpointed, lambda: (stacked(7, 128, 256), examples(128, 2048))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_needs_what_fsdp_by_hand_needs(kind):
    """Arguments and temporaries as XLA counts them, and bytes on the wire, against annotations by hand."""
    loss, make = KINDS[kind]
    params, x = make()
    mesh, state, step = mesh_of(8), adam_state(params), adam_step(loss)
    by_hand = jax.tree.map(lambda w: NamedSharding(mesh, PartitionSpec(None, "data")), state)
    split = NamedSharding(mesh, PartitionSpec("data"))
    hand = jax.jit(step, in_shardings=(by_hand, split), out_shardings=(by_hand, None), donate_argnums=0)
    hand = hand.lower(state, x).compile()
    ours = shardstep.shard(step, mesh, weights="sharded").lower(state, x).compile()
    assert _bytes(ours) <= 1.1 * _bytes(hand)
    assert wire_bytes(collectives(ours.as_text())) <= 1.01 * wire_bytes(collectives(hand.as_text()))


def _bytes(compiled):
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


ONE_BY_ONE = {
    "float32": (scanned, "float32"),
    "bfloat16": (functools.partial(scanned, dtype=jnp.bfloat16), "bfloat16"),
    "indexed": (indexed, "float32"),
    "indexed, bfloat16, remat": (functools.partial(indexed_and_checkpointed, dtype=jnp.bfloat16), "bfloat16"),
}


@pytest.mark.parametrize("how", ONE_BY_ONE)
def test_each_layer_is_gathered_and_scattered_inside_the_loop(how):
    """Twice gathered (forward and backward), once scattered, in the dtype in which the layer reads it."""
    many = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    state = jax.eval_shape(lambda: adam_state(stacked(8, 128, 256)))
    loss, dtype = ONE_BY_ONE[how]
    step = adam_step(loss)
    alone = shardstep.Options(bucket_bytes=0)
    plan = shardstep.shard(step, mesh_of(8), weights="sharded", options=alone).plan(state, many((4096, 128)))
    large = [c for c in plan.collectives if max(map(np.prod, c.shapes)) >= 128 * 256]
    assert all(c.loop and c.times == 8 for c in large)
    kinds = sorted((c.kind, c.dtype, c.shape) for c in large)
    shapes = ((128, 256), (256, 128))
    gathers = [("all-gather", dtype, shape) for shape in shapes for _ in range(2)]
    assert kinds == sorted([*gathers, *(("reduce-scatter", "float32", shape) for shape in shapes)])


def planned(loss, weights="auto", **options):
    state = jax.eval_shape(lambda: adam_state(stacked(8, 128, 256)))
    machine = shardstep.Options(topology="h200:8", bucket_bytes=0, **options)
    sharded = shardstep.shard(adam_step(loss), mesh_of(8), weights=weights, options=machine)
    return sharded.plan(state, jax.ShapeDtypeStruct((4096, 128), jnp.float32))


HOW = {"remat": with_policy(None), "bfloat16": functools.partial(scanned, dtype=jnp.bfloat16), "float32": scanned}


@pytest.mark.parametrize("how", HOW)
def test_layers_are_gathered_once_where_memory_is_given(how):
    """Then no more is sent than in the replicated step; one by one, half as much again."""
    each, once = (planned(HOW[how], "sharded", layers=layers) for layers in ("each", "once"))
    assert each.wire_bytes.ratio > 1.4 and once.wire_bytes.ratio <= 1.0
    assert once.peak_bytes.sharded > each.peak_bytes.sharded
    (dtype,) = {c.dtype for c in once.collectives if c.kind == "all-gather"}
    assert dtype == ("float32" if how == "float32" else "bfloat16")
    assert planned(HOW[how], "sharded").wire_bytes == each.wire_bytes
    plenty, tight = planned(HOW[how]), planned(HOW[how], memory=each.peak_bytes.sharded + 1)
    assert plenty.wire_bytes == once.wire_bytes and "gathered once" in plenty.why_weights
    assert tight.weights == "sharded" and tight.wire_bytes == each.wire_bytes and tight.fits


def test_options_refuse_another_way_to_gather_layers():
    with pytest.raises(shardstep.ShardstepError, match="layers"):
        shardstep.Options(layers="twice")


def test_optax_state_follows_its_weights():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))

    def step(state, x):
        params, moments = state
        value, grads = jax.value_and_grad(scanned)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = stacked(8, 64, 128)
    state = jax.eval_shape(lambda: (params, tx.init(params)))
    plan = shardstep.shard(step, mesh_of(8), weights="sharded").plan(state, examples(64))
    assert {leaf.layout for leaf in plan.leaves if len(leaf.shape) == 3} == {"split(1)"}
