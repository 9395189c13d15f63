"""Steps on meshes that say more than where the batch lies: Explicit axes, contexts, constraints, a model axis."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardstep

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
EXPLICIT = jax.make_mesh((8,), ("data",))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SMALL = shardstep.Options(min_shard_bytes=1024)


def weights():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(first, (64, 128)) / 8,
        "b": jnp.zeros(128),
        "w2": jax.random.normal(second, (128, 64)) / 11,
    }


def start(params=None):
    params = weights() if params is None else params
    return params, OPTIMIZER.init(params)


def batch(i=0):
    random = np.random.default_rng(i)
    return {name: random.normal(size=(32, 64)).astype(np.float32) for name in ("x", "y")}


def step_with(on_input=lambda x: x, on_hidden=lambda h: h):
    """A training step that treats its input and its hidden layer in some way that leaves the numbers alone."""

    def loss(params, batch):
        hidden = on_hidden(jnp.tanh(on_input(batch["x"]) @ params["w1"] + params["b"]))
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    def step(state, batch):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        changes, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), value

    return step


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def expected():
    """One step on one device, without any sharding."""
    return jax.jit(step_with())(start(), batch())


def assert_sharded(out, expected):
    assert_same(out, expected)
    assert out[0][1][1][0].mu["w1"].sharding.spec == P("data")


# -- constraints and contexts -----------------------------------------------------------------------------------------


def constrained(mesh):
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


def resharded(x):
    return jax.sharding.reshard(x, P("data"))


def inner_jit(mesh):
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(lambda x: x * 1.0, in_shardings=rows, out_shardings=rows)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("placed", [False, True], ids=["unplaced", "placed"])
def test_a_context_mesh(mesh, placed, expected):
    with jax.set_mesh(mesh):
        state, examples = start(), batch()
        if placed:
            state, examples = jax.device_put(state, P()), jax.device_put(examples, P("data"))
        assert_sharded(shardstep.shard(step_with())(state, examples), expected)  # the mesh: all devices
        assert_sharded(shardstep.shard(step_with(), mesh)(start(), batch()), expected)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_what_comes_back_can_be_computed_with(mesh):
    """JAX refuses to mix arrays of Explicit and Auto meshes, so a step returns what its user works with."""

    def step(w, m, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        m = 0.9 * m + gradient
        return w - 0.1 * m, m, value

    w, x = jax.random.normal(jax.random.key(0), (97, 131)), np.ones((32, 97), np.float32)  # 8 divides neither
    evaluate = jax.jit(lambda w, x: (x @ w).mean())
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("data"))
        weight, moment, value = shardstep.shard(step)(jnp.asarray(w), jnp.zeros_like(w), placed)
        assert isinstance(moment, shardstep.Padded)
        found = evaluate(weight, placed), value + 1, (2.0 * moment).sum()
    weight, moment, value = jax.jit(step)(w, jnp.zeros_like(w), x)
    np.testing.assert_allclose(found, (evaluate(weight, x), value + 1, (2.0 * moment).sum()), rtol=1e-4)


def test_a_context_mesh_that_is_not_the_steps_own(expected):
    pairs = jax.make_mesh((4, 2), ("a", "b"))
    with jax.set_mesh(pairs):
        assert_sharded(shardstep.shard(step_with(), AUTO)(start(), batch()), expected)


def test_constraints_on_the_data_axis(expected):
    with jax.set_mesh(AUTO):
        step = step_with(constrained(AUTO), lambda h: jax.lax.with_sharding_constraint(h, P("data", None)))
        assert_sharded(shardstep.shard(step, AUTO)(start(), batch()), expected)
    step = step_with(on_hidden=constrained(AUTO))
    assert_sharded(shardstep.shard(step, AUTO)(start(), batch()), expected)


def test_reshard_in_the_step(expected):
    """Only Explicit axes may be resharded over; jit would trace the step with shardings in the types, and so do we."""
    step = step_with(on_input=resharded)
    with jax.set_mesh(EXPLICIT):
        jax.jit(step)(start(), batch())
        assert_sharded(shardstep.shard(step, EXPLICIT)(start(), batch()), expected)
    named = step_with(on_input=lambda x: jax.sharding.reshard(x, NamedSharding(EXPLICIT, P("data"))))
    assert_sharded(shardstep.shard(named, EXPLICIT)(start(), batch()), expected)


def test_a_step_that_reads_the_types_of_its_arguments(expected):
    def told(x):
        assert jax.typeof(x).sharding.spec == P("data", None)
        rows = jax.typeof(x).sharding
        return jnp.einsum("bi,ij->bj", x, jnp.eye(64), out_sharding=rows)

    with jax.set_mesh(EXPLICIT):
        state, examples = jax.device_put(start(), P()), jax.device_put(batch(), P("data"))
        assert_sharded(shardstep.shard(step_with(told), EXPLICIT)(state, examples), expected)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_shardings_left_on_a_jit(mesh, expected):
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    outer = jax.jit(step_with(), in_shardings=(whole, rows), out_shardings=(whole, whole))
    assert_sharded(shardstep.shard(outer, mesh)(start(), batch()), expected)
    assert_sharded(shardstep.shard(step_with(on_hidden=inner_jit(mesh)), mesh)(start(), batch()), expected)


def test_an_error_of_the_users_own_on_an_explicit_mesh():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        shardstep.shard(step_with(broken), EXPLICIT)(start(), batch())


# -- a model axis -----------------------------------------------------------------------------------------------------

TENSOR_PARALLEL = {"w1": P(None, "model"), "b": P("model"), "w2": P("model", None)}


def mesh_4x2(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def tensor_parallel(mesh):
    """Weights and moments cut over the model axis, as a user of tensor parallelism annotates them."""
    params = {k: jax.device_put(w, NamedSharding(mesh, TENSOR_PARALLEL[k])) for k, w in weights().items()}
    return start(params)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_model_axis_is_kept(kind):
    auto, mesh = mesh_4x2(AxisType.Auto), mesh_4x2(kind)
    on_model = NamedSharding(auto, P("data", "model"))
    annotated = step_with(on_hidden=lambda h: jax.lax.with_sharding_constraint(h, on_model))
    plain = jax.jit(annotated)
    sharded = shardstep.shard(annotated if kind == AxisType.Auto else step_with(), mesh, axis="data", options=SMALL)
    ours, theirs = tensor_parallel(mesh), tensor_parallel(auto)
    assert theirs[1][1][0].mu["w1"].sharding.spec == P(None, "model")  # optax made them alike
    for i in range(3):
        theirs, wanted = plain(theirs, jax.device_put(batch(i), NamedSharding(auto, P("data"))))
        ours, value = sharded(ours, batch(i))
        assert_same(value, wanted)
    assert_same(ours, theirs)

    params, (_, (adam, _)) = ours
    specs = {name: x.sharding.spec for name, x in params.items()}
    assert specs == {"w1": P(None, "model"), "b": P("model"), "w2": P("model")}  # as they came
    moments = {name: x.sharding.spec for name, x in adam.nu.items()}
    assert moments == {
        "w1": P("data", "model"),
        "b": P("model"),
        "w2": P("model", "data"),
    }  # on a free dimension


def test_the_plan_tells_of_the_model_axis():
    mesh = mesh_4x2(AxisType.Auto)
    sharded = shardstep.shard(step_with(), mesh, axis="data", options=SMALL)
    state = tensor_parallel(mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    plan = sharded.plan(shapes, batch())
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    moment = leaves["state[1][1][0].mu['w2']"]
    assert (moment.layout, moment.spec) == ("split(1), model on 0", P("model", "data"))
    assert "model on 0 is kept" in moment.reason
    assert moment.bytes_after == moment.bytes_before // 4
    shardings = plan.shardings[0][0]
    assert shardings[0]["w1"].spec == P(None, "model")
    assert shardings[1][1][0].mu["w1"].spec == P("data", "model")


def test_nothing_is_gathered_over_the_model_axis_for_the_update():
    """Of each weight, a device scatters and gathers the part that it has: half of it on a model axis of two."""
    mesh = mesh_4x2(AxisType.Auto)

    def shapes_of(kind, bucket_bytes):
        options = shardstep.Options(min_shard_bytes=1024, bucket_bytes=bucket_bytes)
        sharded = shardstep.shard(step_with(), mesh, axis="data", options=options)
        text = sharded.lower(tensor_parallel(mesh), batch()).compile().as_text()
        return sorted(re.findall(rf"= f32\[([\d,]+)\]\S* {kind}\(", text))

    # (64 / 4, 128 / 2), and (128 / 2, 64 / 4) as a block
    assert shapes_of("reduce-scatter", 0) == ["1,64,16", "16,64"]
    assert shapes_of("all-gather", 0) == ["4,64,16", "64,64"]
    assert shapes_of("reduce-scatter", 2**20) == ["1,2048"]  # the same two, packed into one


def test_other_annotations_are_another_program():
    mesh = mesh_4x2(AxisType.Auto)
    sharded = shardstep.shard(step_with(), mesh, axis="data", options=SMALL)
    cut, whole = tensor_parallel(mesh), jax.device_put(start(), NamedSharding(mesh, P()))
    assert sharded(cut, batch())[0][0]["w1"].sharding.spec == P(None, "model")
    assert sharded(whole, batch())[0][0]["w1"].sharding.spec == P()


def test_a_leaf_without_a_free_dimension_says_so():
    mesh = mesh_4x2(AxisType.Auto)
    params = {k: jax.device_put(w, NamedSharding(mesh, P("model"))) for k, w in weights().items()}
    sharded = shardstep.shard(step_with(), mesh, axis="data", options=shardstep.Options(min_shard_bytes=1))
    plan = sharded.plan(start(params), batch())
    (bias,) = [leaf for leaf in plan.leaves if leaf.path.endswith(".mu['b']")]
    assert bias.layout == "replicated, model on 0"
    assert "[128] has no dimension that is free (model on 0) to split" in bias.reason


def test_a_step_left_to_xla_needs_auto_axes():
    left_to_xla = shardstep.Options(engine="annotate")
    assert shardstep.shard(step_with(), AUTO, options=left_to_xla).plan(start(), batch())
    with pytest.raises(shardstep.ShardstepError, match="needs a mesh with Auto axes"):
        shardstep.shard(step_with(), EXPLICIT, options=left_to_xla).plan(start(), batch())
