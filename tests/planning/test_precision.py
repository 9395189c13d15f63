"""In which dtype values travel: read in the compiled program, and in the numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_same

import shardstep
from shardstep import Options
from shardstep._src.core.backend import Backend
from shardstep._src.tools.hlo import collectives
from shardstep._src.tools.report.verdict import verdict

WIDTH, LAYERS = 128, 3
WEIGHT = WIDTH * WIDTH
ALONE = 0  # bucket_bytes


def init(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [(jax.random.normal(k, (WIDTH, WIDTH)) / 12).astype(dtype) for k in keys]


BATCH = jax.random.normal(jax.random.key(1), (32, WIDTH))


def loss(weights, batch, dtype=None):
    x = batch
    for w in weights:
        w = w if dtype is None else w.astype(dtype)
        x = jnp.tanh(x.astype(w.dtype) @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def sgd(dtype=None, momentum=0.9, rate=0.1):
    """f32 weights, read in `dtype`."""

    def step(state, batch):
        weights, velocity = state
        value, grads = jax.value_and_grad(loss)(weights, batch, dtype)
        velocity = [momentum * v + g for v, g in zip(velocity, grads, strict=True)]
        return ([w - rate * v for w, v in zip(weights, velocity, strict=True)], velocity), value

    weights = init()
    return step, (weights, [jnp.zeros_like(w) for w in weights])


def masters(state, batch):
    """bf16 weights that the model reads, f32 masters beside the moments: the weights are the rounded masters."""
    weights, moments, originals = state
    value, grads = jax.value_and_grad(loss)(weights, batch)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, moments = OPTIMIZER.update(grads, moments, originals)
    originals = optax.apply_updates(originals, updates)
    return (jax.tree.map(lambda w: w.astype(jnp.bfloat16), originals), moments, originals), value


OPTIMIZER = optax.adam(1e-2)


def sent(step, *args):
    """(kind, dtype, bytes) of the weight-sized collectives in the compiled program.

    On CPU, bf16 is gathered as the integers that its bits are.
    """
    found = collectives(step.lower(*args).compile().as_text())
    return sorted((c.kind, c.dtype.replace("u16", "bf16"), c.bytes) for c in found if c.bytes >= WEIGHT)


def accelerated(step, mesh, **how):
    """Sums of 16-bit floats are left as they are, as on GPU and TPU. Such a program can be lowered here, not run."""
    sharded = shardstep.shard(step, mesh, **how)
    axes = tuple(axis._replace(backend=Backend(widens=False)) for axis in sharded.replicas.axes)
    sharded.replicas = dataclasses.replace(sharded.replicas, axes=axes)
    return sharded


def planned(step, *args):
    return sorted((c.kind, c.dtype) for c in step.plan(*args).collectives if max(map(np.prod, c.shapes)) == WEIGHT)


# -- as the model reads them ------------------------------------------------------------------------------------------


def test_sharded_weights_are_gathered_as_the_forward_pass_reads_them(mesh):
    step, state = sgd(jnp.bfloat16)
    sharded = shardstep.shard(step, mesh, weights="sharded", options=Options(bucket_bytes=ALONE))
    found = sent(sharded, state, BATCH)
    assert [c for c in found if c[0] == "all-gather"] == [("all-gather", "bf16", 2 * WEIGHT)] * LAYERS
    assert not [c for c in found if c[0] == "all-reduce"]


def test_rounded_weights_are_gathered_not_their_masters(mesh):
    originals = init()
    state = (init(jnp.bfloat16), OPTIMIZER.init(originals), originals)
    sharded = shardstep.shard(masters, mesh, options=Options(bucket_bytes=ALONE))
    found = sent(sharded, state, BATCH)
    assert [c for c in found if c[0] == "all-gather"] == [("all-gather", "bf16", 2 * WEIGHT)] * LAYERS
    layouts = {leaf.path: leaf.layout for leaf in sharded.plan(state, BATCH).leaves}
    assert layouts["state[2][0]"] == "split(0)" and layouts["state[0][0]"] == "replicated"


# -- reduce_dtype -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "asked", "travels"),
    [
        (None, None, "float32"),
        (None, jnp.bfloat16, "bfloat16"),
        (jnp.bfloat16, None, "bfloat16"),  # as the backward pass produces them, like the all-reduce of plain `jit`
        (jnp.bfloat16, "float32", "float32"),
        (None, jnp.float16, "float16"),
    ],
)
def test_gradients_are_summed_as_asked(computed, asked, travels, mesh):
    step, state = sgd(computed)
    sharded = accelerated(step, mesh, options=Options(bucket_bytes=ALONE, reduce_dtype=asked))
    assert (
        planned(sharded, state, BATCH) == [("all-gather", "float32")] * LAYERS + [("reduce-scatter", travels)] * LAYERS
    )
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[travels]
    program = sharded.lower(state, BATCH).as_text()
    scattered = f"(tensor<{WIDTH}x{WIDTH}x{short}>) -> tensor<{WIDTH // 8}x{WIDTH}x{short}>"
    assert program.count(scattered) == LAYERS


def test_half_precision_gradients_may_be_summed_in_full(mesh):
    """bf16 weights, bf16 gradients, bf16 velocity: the sum alone is formed in f32."""
    step, _ = sgd()
    state = (init(jnp.bfloat16), [jnp.zeros_like(w) for w in init(jnp.bfloat16)])
    asked = accelerated(step, mesh, options=Options(bucket_bytes=ALONE, reduce_dtype=jnp.float32))
    scatters = [c for c in planned(asked, state, BATCH) if c[0] == "reduce-scatter"]
    assert scatters == [("reduce-scatter", "float32")] * LAYERS
    default = accelerated(step, mesh, options=Options(bucket_bytes=ALONE))
    assert ("reduce-scatter", "bfloat16") in planned(default, state, BATCH)


def test_each_term_is_rounded_and_the_sum_is(mesh):
    """What `reduce_dtype=bfloat16` does to numbers. (XLA's CPU backend adds in f32 in between.)"""
    step, (weights, velocity) = sgd(momentum=0.0, rate=100.0)
    sharded = shardstep.shard(step, mesh, options=Options(reduce_dtype=jnp.bfloat16))
    (ours, _), value = sharded((weights, velocity), BATCH)
    shares = BATCH.reshape(8, -1, WIDTH)
    terms = [jax.grad(lambda w, x: loss(w, x) / 8)(weights, x) for x in shares]

    def distance(rounded):
        expected = jax.tree.map(lambda w, *g: w - 100.0 * rounded(sum(map(rounded, g))), weights, *terms)
        return sum(float(jnp.mean(jnp.abs(a - b))) for a, b in zip(ours, expected, strict=True))

    # not nothing: some terms lie between two bf16 numbers
    assert distance(lambda g: g.astype(jnp.bfloat16).astype(jnp.float32)) < 0.05 * distance(lambda g: g)
    assert float(value) == pytest.approx(float(loss(weights, BATCH)), rel=1e-6)  # the loss is no gradient


def test_statistics_and_scalars_keep_their_dtype(mesh):
    """BatchNorm's mean is read by the forward pass again; the loss and the norm are scalars."""

    def step(state, batch):
        w, scale = state

        def objective(w, scale):
            x = batch @ w
            x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * scale
            return jnp.mean(jnp.tanh(x) ** 2)

        value, grads = jax.value_and_grad(objective, (0, 1))(w, scale)
        norm = optax.tree.norm(grads)
        return (w - 0.1 * grads[0] / norm, scale - 0.1 * grads[1] / norm), (value, norm)

    state = (init()[0], jnp.ones(WIDTH))
    options = Options(bucket_bytes=ALONE, reduce_dtype=jnp.bfloat16)
    plan = accelerated(step, mesh, options=options).plan(state, BATCH)
    narrow = [(c.kind, c.shape) for c in plan.collectives if c.dtype == "bfloat16"]
    assert sorted(narrow) == [("all-reduce", (WIDTH,)), ("all-reduce", (WIDTH, WIDTH))]  # the two gradients
    wide = [c.shape for c in plan.collectives if c.dtype == "float32" and c.kind == "all-reduce"]
    assert () in wide and (WIDTH,) in wide


def test_gradients_inside_a_loop(mesh):
    """The weights of one iteration meet the examples of the next: gradients are gradients still."""
    step, state = sgd()

    def many(state, batches):
        return jax.lax.scan(step, state, batches)

    options = Options(bucket_bytes=ALONE, reduce_dtype=jnp.bfloat16)
    sharded = accelerated(many, mesh, batch_argnums=1, batch_axis=1, options=options)
    plan = sharded.plan(state, jnp.stack([BATCH] * 10))
    inside = {(c.kind, c.dtype) for c in plan.collectives if c.loop and max(map(np.prod, c.shapes)) == WEIGHT}
    assert ("reduce-scatter", "bfloat16") in inside and ("reduce-scatter", "float32") not in inside


# -- gather_dtype -----------------------------------------------------------------------------------------------------


def test_weights_are_gathered_as_asked(mesh):
    step, state = sgd()
    options = Options(bucket_bytes=ALONE, gather_dtype=jnp.bfloat16)
    sharded = shardstep.shard(step, mesh, weights="sharded", options=options)
    found = [c for c in sent(sharded, state, BATCH) if c[0] == "all-gather"]
    assert found == [("all-gather", "bf16", 2 * WEIGHT)] * LAYERS


@pytest.mark.parametrize("bucket_bytes", [ALONE, 1 << 20])
def test_only_what_the_model_reads_is_rounded(bucket_bytes, mesh):
    """The forward and backward pass read rounded weights; the update changes the weights themselves."""
    step, (weights, velocity) = sgd()
    options = Options(bucket_bytes=bucket_bytes, gather_dtype=jnp.bfloat16)
    sharded = shardstep.shard(step, mesh, options=options)  # weights="auto"
    plan = sharded.plan((weights, velocity), BATCH)
    assert plan.weights == "sharded" and "gather_dtype=bfloat16" in plan.why_weights
    (ours, _), value = sharded((weights, velocity), BATCH)
    rounded = [w.astype(jnp.bfloat16).astype(jnp.float32) for w in weights]
    expected_value, grads = jax.value_and_grad(loss)(rounded, BATCH)
    expected = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
    assert_same((ours, value), (expected, expected_value), tolerance=1e-6)


def test_weights_that_go_elsewhere_than_to_the_examples_are_not_rounded(mesh):
    """The sorted weights are a metric: they are gathered for it, and nobody asked for rounded metrics."""
    step, (weights, velocity) = sgd()

    def reporting(state, batch):
        new, _ = step(state, batch)
        return new, jnp.sort(state[0][0].reshape(-1))

    options = Options(bucket_bytes=ALONE, gather_dtype=jnp.bfloat16)
    sharded = shardstep.shard(reporting, mesh, weights="sharded", options=options)
    _, reported = sharded((weights, velocity), BATCH)
    assert np.array_equal(reported, np.sort(np.asarray(weights[0]).reshape(-1)))


def test_replicated_weights_are_never_rounded(mesh):
    step, state = sgd()
    sharded = shardstep.shard(step, mesh, weights="replicated", options=Options(gather_dtype=jnp.bfloat16))
    with pytest.raises(shardstep.ShardstepError, match="weights='sharded'"):
        sharded.plan(state, BATCH)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_on_tpu_the_plan_compares_with_an_all_reduce_in_bfloat16(weights, mesh):
    """There XLA sums gradients as the backward pass makes them. Whole float32 weights are more to gather than that."""
    options = Options(topology="v5e:2x4", bucket_bytes=ALONE)
    for dtype, size in ((None, 4), (jnp.bfloat16, 2)):
        step, state = sgd(dtype)
        plan = shardstep.shard(step, mesh, batch_argnums=1, weights=weights, options=options).plan(state, BATCH)
        scalar = 2 * 7 / 8 * 4
        assert plan.wire_bytes.replicated == pytest.approx(2 * 7 / 8 * LAYERS * WEIGHT * size + scalar)
        gathered = size if weights == "sharded" else 4
        assert plan.wire_bytes.sharded == pytest.approx(7 / 8 * LAYERS * WEIGHT * (size + gathered) + scalar)
        assert plan.engine == "rewrite"


@pytest.mark.parametrize(("stored", "reduced_for"), [(jnp.float32, "convert_element_type"), (jnp.bfloat16, "mul")])
def test_a_whole_weight_is_no_term_of_a_sum(stored, reduced_for, mesh):
    """Plain SGD, weights whole: what is summed over replicas is the gradient, as small as it was made.

    Weight and update could be summed together, but in the weight's dtype, and next to it small updates round away.
    """

    def step(weight, x):
        def loss(w):
            return jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))

        value, gradient = jax.value_and_grad(loss)(weight)
        return weight - jnp.asarray(0.1, stored) * gradient, value

    shapes = jax.ShapeDtypeStruct((256, 256), stored), jax.ShapeDtypeStruct((16, 256), jnp.float32)
    options = Options(topology="v5e:2x4")
    plan = shardstep.shard(step, mesh, batch_argnums=1, weights="replicated", options=options).plan(*shapes)
    large = [c for c in plan.collectives if c.shape]
    assert {(c.kind, c.dtype) for c in large} == {("all-reduce", "bfloat16")}
    assert {c.purpose for c in large} == {reduced_for}
    assert plan.wire_bytes.sharded <= plan.wire_bytes.replicated


# -- reduce="float32" -------------------------------------------------------------------------------------------------


def half(step):
    """The same step on bf16 weights, bf16 gradients and bf16 velocity."""
    return step, (init(jnp.bfloat16), [jnp.zeros_like(w) for w in init(jnp.bfloat16)])


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_terms_in_sixteen_bits_are_exchanged_and_nothing_more_is_sent(weights, mesh):
    step, state = half(sgd()[0])
    asked = shardstep.shard(step, mesh, weights=weights, options=Options(bucket_bytes=ALONE, reduce="float32"))
    found = [c for c in sent(asked, state, BATCH) if c[0] != "all-gather"]
    assert found == [("all-to-all", "bf16", 2 * WEIGHT)] * LAYERS
    default = accelerated(step, mesh, weights=weights, options=Options(bucket_bytes=ALONE))
    plan = asked.plan(state, BATCH)
    assert plan.wire_bytes.sharded == pytest.approx(default.plan(state, BATCH).wire_bytes.sharded, rel=1e-3)
    assert any("added in float32" in note for note in plan.notes) and not plan.lossy


def test_what_is_float32_already_is_summed_as_ever(mesh):
    step, state = sgd()
    options = Options(bucket_bytes=ALONE, reduce="float32")
    sharded = shardstep.shard(step, mesh, options=options)
    plan = sharded.plan(state, BATCH)
    assert {c.kind for c in plan.collectives} == {"reduce-scatter", "all-gather", "all-reduce"}
    assert any("nothing changes" in note for note in plan.notes)


@pytest.mark.parametrize("how", [dict(reduce="float32"), dict(wire="int8")], ids=str)
def test_terms_inside_a_loop_and_over_groups(how, mesh):
    step, state = half(sgd()[0])

    def many(state, batches):
        return jax.lax.scan(step, state, batches)

    batches = jnp.stack([BATCH] * 10)
    options = Options(bucket_bytes=ALONE, **how)
    sharded = shardstep.shard(many, mesh, batch_argnums=1, batch_axis=1, group=4, options=options)
    travels = {"reduce": "bfloat16", "wire": "int8"}[next(iter(how))]
    large = {
        (c.kind, c.dtype)
        for c in sharded.plan(state, batches).collectives
        if c.loop and max(map(np.prod, c.shapes)) == WEIGHT
    }
    assert ("all-to-all", travels) in large and not {kind for kind, _ in large} & {"reduce-scatter", "all-reduce"}
    (ours, _), values = sharded(state, batches)
    (theirs, _), expected = jax.jit(many)(half(sgd()[0])[1], batches)
    assert_same((ours, values), (theirs, expected), tolerance=2e-2)


# -- wire="int8" ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [ALONE, 1 << 20])
def test_eight_bits_each_way(bucket_bytes, mesh):
    """What the plan says is what the compiled program sends."""
    step, state = sgd()
    sharded = shardstep.shard(step, mesh, options=Options(bucket_bytes=bucket_bytes, wire="int8"))
    plan = sharded.plan(state, BATCH)
    compiled = collectives(sharded.lower(state, BATCH).compile().as_text())
    narrow = sorted((c.kind, round(c.wire_bytes)) for c in compiled if c.dtype == "s8")
    assert narrow == sorted((c.kind, round(c.bytes)) for c in plan.collectives if c.dtype == "int8") and narrow
    message = 7 * (WEIGHT // 8) * (1 + 4 / 128)
    assert sum(nbytes for _, nbytes in narrow) == 2 * LAYERS * message
    assert plan.wire_bytes.sharded < plan.wire_bytes.replicated / 3.8


def test_eight_bits_are_told_first(mesh, tmp_path):
    step, state = sgd()
    sharded = shardstep.shard(step, mesh, options=Options(wire="int8"))
    plan = sharded.plan(state, BATCH)
    assert plan.weights == "sharded" and "wire='int8'" in plan.why_weights
    assert "3 gradients and 3 gathers travel in 8 bits" in plan.lossy
    assert "LOSES PRECISION" in str(plan).splitlines()[1]
    first, second = verdict(plan)[:2]
    assert first.worse and "precision" in first.text
    assert second.topic == "Precision" and second.worse and second.text == plan.lossy
    assert "LOSES PRECISION" not in str(shardstep.shard(step, mesh).plan(state, BATCH))


def test_check_measures_what_eight_bits_do(mesh):
    step, state = sgd()
    found = shardstep.check(shardstep.shard(step, mesh, options=Options(wire="int8")), state, BATCH)
    assert 1e-4 < found.wire_error < 0.05 and not found.exact
    assert f"{found.wire_error:.2%}" in str(found).splitlines()[1] and "loses precision" in found.lossy
    plain = shardstep.check(shardstep.shard(step, mesh), state, BATCH)
    assert not plain.lossy and "loses" not in str(plain)


def test_whole_weights_and_what_the_state_keeps_are_never_rounded_to_eight_bits(mesh):
    """Weights that rest whole are gathered as they are; of weights that rest split, the examples read rounded ones."""
    step, (weights, velocity) = sgd()

    def reporting(state, batch):
        new, value = step(state, batch)
        return new, (value, jnp.sort(state[0][0].reshape(-1)))

    for rest in ("replicated", "sharded"):
        sharded = shardstep.shard(reporting, mesh, weights=rest, options=Options(wire="int8"))
        kinds = {c.kind for c in sharded.plan((weights, velocity), BATCH).collectives if c.dtype == "int8"}
        assert kinds == ({"all-to-all"} if rest == "replicated" else {"all-to-all", "all-gather"})
        _, (_, reported) = sharded((weights, velocity), BATCH)
        assert np.array_equal(reported, np.sort(np.asarray(weights[0]).reshape(-1)))
        weights, velocity = sgd()[1]


def test_counts_and_small_leaves_travel_as_they_are(mesh):
    """Integers, scalars, biases, statistics; leaves without elements."""

    def step(state, batch):
        def objective(p):
            x = batch @ p["w"] + p["bias"]
            return jnp.mean(jnp.tanh(x) ** 2) + jnp.sum(p["none"])

        value, grads = jax.value_and_grad(objective)(state["p"])
        seen = state["seen"] + jnp.sum(batch > 0, axis=0, dtype=jnp.int32)
        return {"p": jax.tree.map(lambda a, g: a - 0.1 * g, state["p"], grads), "seen": seen}, value

    def created():
        return {
            "p": {"w": init()[0], "bias": jnp.zeros(WIDTH), "none": jnp.zeros((0, WIDTH))},
            "seen": jnp.zeros(WIDTH, jnp.int32),
        }

    sharded = shardstep.shard(step, mesh, weights="replicated", options=Options(wire="int8"))
    narrow = [c for c in sharded.plan(created(), BATCH).collectives if c.dtype == "int8"]
    assert {c.shapes for c in narrow} == {((WIDTH, WIDTH),)} and narrow
    ours, value = sharded(created(), BATCH)
    theirs, expected = jax.jit(step)(created(), BATCH)
    assert np.array_equal(ours["seen"], theirs["seen"])
    assert_same((ours["p"]["bias"], value), (theirs["p"]["bias"], expected), tolerance=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(reduce="bfloat16"), "use 'float32'"),
        (dict(wire="int4"), "use 'int8'"),
        (dict(wire="int8", reduce="float32"), "Leave out reduce"),
        (dict(wire="int8", reduce_dtype="bfloat16"), "Leave out reduce_dtype"),
        (dict(wire="int8", gather_dtype="bfloat16"), "Leave out gather_dtype"),
        (dict(wire="int8", engine="annotate"), "engine='rewrite'"),
        (dict(reduce="float32", engine="annotate"), "engine='rewrite'"),
    ],
    ids=str,
)
def test_wires_that_make_no_sense(options, said):
    with pytest.raises(shardstep.ShardstepError, match=said):
        Options(**options)
