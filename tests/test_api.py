"""Every way in which people call a training step: the sharded one is called the same way and returns the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from steps import (
    EXAMPLES,
    OPTIMIZER,
    adam_state,
    adam_step,
    assert_same,
    batch,
    compilations,
    errors,
    loss,
    mesh_of,
    split_leaves,
    update,
    weights,
)

import shardstep

STEPS = 3


def agree(step, state, call, *, jit=jax.jit, mesh=None, **options):
    """Train with the plain and the sharded step; `call(step, state, i) -> (state, metrics)`. Returns the latter."""
    plain, sharded = jit(step), shardstep.shard(step, mesh, **options)
    ours = theirs = state
    for i in range(STEPS):
        theirs, expected = call(plain, theirs, i)
        ours, metrics = call(sharded, ours, i)
        assert_same(metrics, expected)
    assert_same(ours, theirs)
    return sharded


# -- argument order and names -----------------------------------------------------------------------------------------


def test_state_then_batch():
    agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)))


def test_batch_then_state():
    agree(lambda batch, state: adam_step(state, batch), adam_state(), lambda step, state, i: step(batch(i), state))


def test_metrics_then_state():
    def step(state, batch):
        state, value = adam_step(state, batch)
        return {"loss": value}, state

    agree(step, adam_state(), lambda step, state, i: step(state, batch(i))[::-1])


def noisy_step(params, moments, batch, key):
    noise = jax.random.normal(jax.random.wrap_key_data(key) if key.dtype == jnp.uint32 else key, batch["x"].shape)
    batch = {**batch, "x": batch["x"] + noise}
    value, gradients = jax.value_and_grad(loss)(params, batch)
    params, moments = update(params, moments, gradients)
    return params, moments, value


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_params_moments_batch_key(make_key):
    def call(step, state, i):
        params, moments, value = step(*state, batch(i), make_key(i))
        return (params, moments), value

    agree(noisy_step, adam_state(), call)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_key_in_the_state(make_key):
    def step(state, batch):
        inner, key = state
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.8, batch["x"].shape)
        inner, value = adam_step(inner, {**batch, "x": batch["x"] * kept})
        return (inner, key), (value, kept)

    agree(step, (adam_state(), make_key(0)), lambda step, state, i: step(state, batch(i)))


def test_keyword_arguments():
    def call(step, state, i):
        params, moments, value = step(key=jax.random.key(i), batch=batch(i), moments=state[1], params=state[0])
        return (params, moments), value

    agree(noisy_step, adam_state(), call)


def test_keyword_only_batch_behind_positional_state():
    def step(state, *, x, y, scale=1.0):
        state, value = adam_step(state, {"x": x * scale, "y": y})
        return state, value

    agree(step, adam_state(), lambda step, state, i: step(state, **batch(i), scale=0.5))


def test_several_batch_arguments():
    def step(state, x, y):
        return adam_step(state, {"x": x, "y": y})

    agree(step, adam_state(), lambda step, state, i: step(state, *batch(i).values()))


def test_variable_arguments():
    def step(*args):
        return adam_step(args[0], dict(zip("xy", args[1:], strict=True)))

    agree(step, adam_state(), lambda step, state, i: step(state, *batch(i).values()))


def test_a_bound_method():
    class Trainer:
        def step(self, state, batch):
            return adam_step(state, batch)

    agree(Trainer().step, adam_state(), lambda step, state, i: step(state, batch(i)))


def test_a_partial():
    step = functools.partial(lambda rate, state, batch: adam_step(state, {**batch, "x": rate * batch["x"]}), 0.5)
    agree(step, adam_state(), lambda step, state, i: step(state, batch(i)))


def test_an_object_that_is_called():
    class Trainer:
        def __call__(self, state, batch):
            return adam_step(state, batch)

    agree(Trainer(), adam_state(), lambda step, state, i: step(state, batch(i)))


def test_a_step_that_returns_nothing_but_state():
    step = jax.tree_util.Partial(lambda state, batch: adam_step(state, batch)[0])
    agree(step, adam_state(), lambda step, state, i: (step(state, batch(i)), ()))


def test_the_step_keeps_its_name_and_docstring():
    def train(state, batch):
        """Train."""
        return adam_step(state, batch)

    sharded = shardstep.shard(train)
    assert (sharded.__name__, sharded.__doc__) == ("train", "Train.")


# -- static arguments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    power: int


def configured_step(config, state, batch, mode):
    """Python control flow on both static arguments."""
    targets = batch["y"] ** config.power if mode == "train" else batch["y"] * 0
    return adam_step(state, {**batch, "y": targets})


@pytest.mark.parametrize("mode", ["train", "zero"])
@pytest.mark.parametrize("power", [1, 2])
def test_static_argnums(power, mode):
    static = dict(static_argnums=(0, 3))

    def call(step, state, i):
        return step(Config(power), state, batch(i), mode)

    agree(configured_step, adam_state(), call, jit=functools.partial(jax.jit, **static), **static)


def test_negative_static_argnums():
    static = dict(static_argnums=(0, -1))

    def call(step, state, i):
        return step(Config(1), state, batch(i), "train")

    agree(configured_step, adam_state(), call, jit=functools.partial(jax.jit, **static), **static)


@pytest.mark.parametrize("by_name", [True, False])
def test_static_argnames(by_name):
    static = dict(static_argnames=("config", "mode"))

    def call(step, state, i):
        if by_name:
            return step(state=state, config=Config(2), batch=batch(i), mode="train")
        return step(Config(2), state, batch(i), "train")

    agree(configured_step, adam_state(), call, jit=functools.partial(jax.jit, **static), **static)


def test_each_static_value_has_its_own_program():
    traces = []

    def step(state, batch, power):
        traces.append(power)
        return adam_step(state, {**batch, "y": batch["y"] ** power})

    sharded = shardstep.shard(step, static_argnums=2)
    state = adam_state()
    values = [float(sharded(state, batch(), power)[1]) for power in (1, 2, 1, 2)]
    assert values[:2] == values[2:] and values[0] != values[1]
    assert set(traces) == {1, 2} and len(traces) == 2


# -- steps that are jitted already ------------------------------------------------------------------------------------


def test_a_jitted_step():
    agree(jax.jit(adam_step), adam_state(), lambda step, state, i: step(state, batch(i)))


def test_a_jitted_step_that_donates():
    state = adam_state()
    donating = jax.jit(adam_step, donate_argnums=0)
    sharded, expected = shardstep.shard(donating), adam_step(state, batch())
    assert_same(sharded(state, batch()), expected)


def test_a_jitted_step_with_static_arguments_inside():
    static = dict(static_argnums=(0, 3))
    jitted = jax.jit(configured_step, **static)

    def call(step, state, i):
        return step(Config(2), state, batch(i), "train")

    agree(jitted, adam_state(), call, jit=lambda step: step, **static)


def test_the_static_arguments_of_a_jitted_step_need_no_repeating():
    """A string or a dataclass cannot be anything but static."""
    jitted = jax.jit(configured_step, static_argnums=0, static_argnames="mode")

    def call(step, state, i):
        return step(Config(2), state, batch(i), mode="train")

    agree(jitted, adam_state(), call, jit=lambda step: step)


# -- kinds of pytrees -------------------------------------------------------------------------------------------------


class Tupled(NamedTuple):
    params: Any
    moments: Any
    note: Any = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "moments"], meta_fields=["note"])
@dataclass
class Registered:
    params: Any
    moments: Any
    note: str = "static"


@jax.tree_util.register_pytree_node_class
class Custom:
    """A node without key paths, as older code registers them."""

    def __init__(self, params, moments):
        self.params, self.moments = params, moments

    def tree_flatten(self):
        return (self.params, self.moments), "custom"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "custom"
        return cls(*children)


@flax.struct.dataclass
class Struct:
    params: Any
    moments: Any
    name: str = flax.struct.field(pytree_node=False, default="flax")


class Slots(dict):
    """A dict read by attribute."""

    params = property(lambda self: self["params"])
    moments = property(lambda self: self["moments"])


jax.tree_util.register_pytree_node(
    Slots, lambda s: (list(s.values()), tuple(s)), lambda keys, values: Slots(zip(keys, values, strict=True))
)

KINDS = {
    "named_tuple": Tupled,
    "dataclass": Registered,
    "custom_node": Custom,
    "flax_struct": Struct,
    "dict_subclass": lambda params, moments: Slots(params=params, moments=moments),
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_every_kind_of_pytree(kind):
    make = KINDS[kind]

    def step(state, batch):
        (params, moments), value = adam_step((state.params, state.moments), batch)
        return make(params, moments), value

    sharded = agree(step, make(*adam_state()), lambda step, state, i: step(state, batch(i)))
    plan = sharded.plan(make(*adam_state()), batch())
    assert len(split_leaves(plan)) == 4  # the two moments of the two large weights


def test_state_of_lists_and_tuples():
    def step(state, batch):
        weights, (momentum,) = state
        value, gradients = jax.value_and_grad(lambda w: loss(dict(zip(("w1", "b", "w2"), w, strict=True)), batch))(
            weights
        )
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        return ([w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], (momentum,)), value

    start = [weights()[k] for k in ("w1", "b", "w2")]
    state = (start, ([jnp.zeros_like(w) for w in start],))
    agree(step, state, lambda step, state, i: step(state, batch(i)))


def test_a_flax_train_state():
    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=gradients), value

    state = TrainState.create(apply_fn=loss, params=weights(), tx=OPTIMIZER)
    assert isinstance(state.step, int)  # it starts as a Python number and comes back as an array
    agree(step, state, lambda step, state, i: step(state, batch(i)))


def test_optax_states_with_masks_and_empty_parts():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(1e-2), {"w1": True, "b": False, "w2": True}),
        optax.multi_transform({"slow": optax.sgd(1e-3), "fast": OPTIMIZER}, {"w1": "fast", "b": "slow", "w2": "fast"}),
    )

    def step(state, batch):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        changes, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, changes), opt_state), value

    agree(step, (weights(), optimizer.init(weights())), lambda step, state, i: step(state, batch(i)))


def test_none_leaves():
    def step(state, batch, extra):
        assert extra is None and state["ema"] is None
        inner, value = adam_step(state["inner"], batch)
        return {"inner": inner, "ema": None}, {"loss": value, "aux": None}

    state = {"inner": adam_state(), "ema": None}
    agree(step, state, lambda step, state, i: step(state, batch(i), None))


def test_non_array_leaves_are_static():
    """An Equinox module holds functions and strings; `eqx.filter_jit` is the reference."""

    class Model(eqx.Module):
        layers: list
        activation: Any
        name: str

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.layers = [eqx.nn.Linear(96, 64, key=k1), eqx.nn.Linear(64, 96, key=k2)]
            self.activation = jax.nn.gelu
            self.name = "model"

        def __call__(self, x):
            return self.layers[1](self.activation(self.layers[0](x)))

    def step(model, moments, batch):
        def objective(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        value, gradients = eqx.filter_value_and_grad(objective)(model)
        changes, moments = OPTIMIZER.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, changes), moments, value

    model = Model(jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    def call(step, state, i):
        model, moments, value = step(*state, batch(i))
        return (model, moments), value

    sharded = agree(step, (model, moments), call, jit=eqx.filter_jit)
    trained, _, _ = sharded(model, moments, batch())
    assert trained.activation is jax.nn.gelu and trained.name == "model"


def test_numpy_arrays_and_python_scalars_as_arguments():
    def step(state, batch, rate):
        params, count = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return (jax.tree.map(lambda w, g: w - rate * g, params, gradients), count + 1), value

    state = (jax.tree.map(np.asarray, weights()), 0)
    agree(step, state, lambda step, state, i: step(state, jax.tree.map(np.asarray, batch(i)), 0.1))


# -- how often it is traced and compiled ------------------------------------------------------------------------------


def counting_step(traces):
    def step(state, batch):
        traces.append(1)
        inner, value = adam_step(state["inner"], batch)
        return {"inner": inner, "step": state["step"] + 1}, value

    return step


def test_a_python_number_in_the_state_is_traced_for_the_first_call_only():
    traces = []
    sharded = shardstep.shard(counting_step(traces))
    state = {"inner": adam_state(), "step": 0}
    for i in range(4):
        state, _ = sharded(state, batch(i))
    assert int(state["step"]) == 4
    assert len(traces) == 2  # as a constant, to see whether the step changes it, and then as a tracer


def test_the_second_step_compiles_nothing():
    sharded = shardstep.shard(counting_step([]))
    batches = [batch(i) for i in range(3)]
    state, _ = sharded({"inner": adam_state(), "step": 0}, batches[0])
    with compilations() as count:
        for b in batches[1:]:
            state, _ = sharded(state, b)
    assert count == [0]


def test_other_batch_shapes_are_planned_again():
    traces = []
    step = counting_step(traces)
    sharded = shardstep.shard(step)
    state = {"inner": adam_state(), "step": 0}
    for examples in (24, 16, 24, 16):
        expected = jax.jit(step)(state, batch(0, examples))
        state, value = sharded(state, batch(0, examples))
        assert_same((state, value), expected)
    assert [leaf.shape for leaf in sharded.plan(state, batch(0, 16)).leaves if leaf.role == "batch"] == [(16, 96)] * 2


# -- the batch --------------------------------------------------------------------------------------------------------


def table_step(state, batch, table):
    """`table` has a leading dimension too, so the batch has to be named."""
    return adam_step(state, {**batch, "x": batch["x"] + table.sum(0)})


TABLE = np.linspace(-1, 1, 5 * 96, dtype=np.float32).reshape(5, 96)


@pytest.mark.parametrize(
    "named",
    [
        dict(batch_argnums=1),
        dict(batch_argnums=(1,)),
        dict(batch_argnums=-2),
        dict(batch_argnames="batch"),
        dict(batch_argnames=("batch",)),
    ],
    ids=str,
)
def test_the_batch_is_named(named):
    sharded = agree(table_step, adam_state(), lambda step, state, i: step(state, batch(i), TABLE), **named)
    roles = {leaf.path: leaf.role for leaf in sharded.plan(adam_state(), batch(), TABLE).leaves}
    assert roles["batch['x']"] == roles["batch['y']"] == "batch" and roles["table"] == "input"


def test_the_batch_is_named_and_given_by_keyword():
    def call(step, state, i):
        return step(state, table=TABLE, batch=batch(i))

    agree(table_step, adam_state(), call, batch_argnames="batch")


def test_the_batch_is_found_by_its_sharding(mesh):
    """Only y is laid over the replicas by the user; x and the table have other leading dimensions."""
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def call(step, state, i):
        return step(state, jax.device_put(batch(i), rows), TABLE)

    sharded = agree(table_step, adam_state(), call, mesh=mesh)
    leaves = sharded.plan(adam_state(), jax.device_put(batch(), rows), TABLE).leaves
    assert {leaf.path for leaf in leaves if leaf.role == "batch"} == {"batch['x']", "batch['y']"}


def column_step(state, x, y):
    return adam_step(state, {"x": x.T, "y": y})


def test_batch_axis_for_all():
    def step(state, x, y):
        return adam_step(state, {"x": x.T, "y": y.T})

    def call(step, state, i):
        return step(state, batch(i)["x"].T, batch(i)["y"].T)

    agree(step, adam_state(), call, batch_axis=1)


@pytest.mark.parametrize("axis", [(1, 0), (-1, 0)], ids=str)
def test_batch_axis_for_each_argument(axis):
    def call(step, state, i):
        return step(state, batch(i)["x"].T, batch(i)["y"])

    agree(column_step, adam_state(), call, batch_argnums=(1, 2), batch_axis=axis)


def test_batch_axis_is_said_by_the_sharding(mesh):
    def call(step, state, i):
        x = jax.device_put(batch(i)["x"].T, NamedSharding(mesh, PartitionSpec(None, "data")))
        y = jax.device_put(batch(i)["y"], NamedSharding(mesh, PartitionSpec("data")))
        return step(state, x, y)

    agree(column_step, adam_state(), call, mesh=mesh)


def test_stacked_batches_for_a_loop_over_steps():
    def several(state, batches):
        return jax.lax.scan(adam_step, state, batches)

    def call(step, state, i):
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(batch(3 * i + k) for k in range(3)))
        return step(state, stacked)

    agree(several, adam_state(), call, batch_axis=1)


def test_a_batch_with_scalar_and_table_leaves():
    def step(state, batch):
        scaled = {"x": batch["x"] * batch["scale"] + batch["table"].mean(0), "y": batch["y"]}
        return adam_step(state, scaled)

    def call(step, state, i):
        return step(state, {**batch(i), "scale": np.float32(0.5), "table": TABLE})

    sharded = agree(step, adam_state(), call, batch_argnames="batch")
    leaves = sharded.plan(adam_state(), {**batch(), "scale": np.float32(0.5), "table": TABLE}).leaves
    layouts = {leaf.path: leaf.layout for leaf in leaves}
    assert layouts["batch['table']"] == layouts["batch['scale']"] == "replicated"
    assert layouts["batch['x']"] == "split(0)"


# -- meshes -----------------------------------------------------------------------------------------------------------


def whole_on(array, names):
    """Is this array the same on all devices along the mesh axes `names`?"""
    spec = [n for part in array.sharding.spec for n in (part if isinstance(part, tuple) else (part,))]
    return not set(spec) & set(names)


def test_no_mesh_means_all_devices():
    sharded = shardstep.shard(adam_step)
    assert sharded.plan(adam_state(), batch()).replicas == jax.device_count() == 8


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fewer_devices(n):
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh_of(n))
    plan = sharded.plan(adam_state(), batch())
    assert plan.replicas == n
    assert plan.state_bytes.sharded < plan.state_bytes.replicated or n == 1


def test_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",))
    assert mesh.axis_types == (AxisType.Explicit,)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def step(state, batch):  # on an array with an explicitly sharded first dimension, sorting by it would raise
        order = jnp.argsort(batch["y"][:, 0])
        return adam_step(state, {k: v[order] for k, v in batch.items()})

    plain = jax.jit(step)
    sharded = shardstep.shard(step, mesh)
    ours = theirs = adam_state()
    for i in range(STEPS):
        theirs, expected = plain(theirs, batch(i))
        ours, value = sharded(ours, jax.device_put(batch(i), rows))
        assert_same(value, expected)
    assert_same(ours, theirs)


def test_state_replicated_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",))
    state = jax.device_put(adam_state(), NamedSharding(mesh, PartitionSpec()))
    assert_same(shardstep.shard(adam_step, mesh)(state, batch()), jax.jit(adam_step)(adam_state(), batch()))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_several_data_axes(shape):
    mesh = Mesh(np.asarray(jax.devices()).reshape(shape), ("pod", "host", "chip")[: len(shape)])
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh)
    state, _ = sharded(adam_state(), batch())
    moment = state[1][0].mu["w1"]
    assert moment.addressable_shards[0].data.size == moment.size // 8


def test_an_axis_that_carries_no_examples_is_left_alone():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "model"))
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh, axis="data")
    assert sharded.plan(adam_state(), batch()).replicas == 2
    state, _ = sharded(adam_state(), batch())
    moment = state[1][0].mu["w1"]
    assert moment.addressable_shards[0].data.size == moment.size // 2
    assert all(whole_on(x, ["model"]) for x in jax.tree.leaves(state))


def test_two_of_three_axes():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "model", "chip"))
    axes = ("chip", "data")  # in any order
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh, axis=axes)
    assert sharded.plan(adam_state(), batch()).replicas == 4


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_groups(group, mesh):
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh, group=group)
    state, _ = sharded(adam_state(), batch())
    moment = state[1][0].mu["w1"]
    assert moment.addressable_shards[0].data.size == moment.size // group
    assert len(moment.sharding.device_set) == 8


@pytest.mark.parametrize(("group", "resting"), [(1, ()), (2, None), (4, ("chip",)), (8, (("host", "chip"),))])
def test_groups_on_two_axes(group, resting):
    """Groups that end where the user's axes do lie along those axes; others cut one of them."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("host", "chip"))
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), mesh=mesh, group=group)
    moment = sharded(adam_state(), batch())[0][1][0].mu["w1"]
    assert moment.addressable_shards[0].data.size == moment.size // group
    assert resting is None or moment.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(*resting)), moment.ndim
    )


def test_a_group_on_axes_that_stand_apart():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("host", "model", "chip"))
    how = dict(mesh=mesh, axis=("host", "chip"), group=2)
    sharded = agree(adam_step, adam_state(), lambda step, state, i: step(state, batch(i)), **how)
    moment = sharded(adam_state(), batch())[0][1][0].mu["w1"]
    assert moment.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("chip")), moment.ndim)


# -- donation ---------------------------------------------------------------------------------------------------------


def deleted(tree):
    return [x.is_deleted() for x in jax.tree.leaves(tree)]


def test_the_callers_own_arrays_stay_alive_and_the_old_state_is_donated():
    sharded = shardstep.shard(adam_step)
    start, examples = adam_state(), batch()
    first, _ = sharded(start, examples)
    assert not any(deleted((start, examples)))
    second, _ = sharded(first, examples)
    assert all(deleted(first))
    assert not any(deleted((second, examples)))


def test_placed_state_is_donated_and_placed_batches_are_not():
    sharded = shardstep.shard(adam_step)
    state, examples = sharded.place(adam_state(), batch())
    sharded(state, examples)
    assert all(deleted(state)) and not any(deleted(examples))


def test_placing_and_donating_leaves_the_source_of_the_placement_alone():
    start = adam_state()
    sharded = shardstep.shard(adam_step)
    state, examples = sharded.place(start, batch())
    sharded(state, examples)
    assert_same(start, adam_state(), tolerance=0)


def test_a_learning_rate_is_no_state():
    def step(state, batch, rate):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda w, g: w - rate * g, state, gradients), value

    sharded = shardstep.shard(step)
    state, examples, rate = sharded.place(weights(), batch(), jnp.float32(0.1))
    sharded(state, examples, rate)
    assert not rate.is_deleted()


def test_donation_can_be_switched_off():
    sharded = shardstep.shard(adam_step, options=shardstep.Options(donate=False))
    first, _ = sharded(adam_state(), batch())
    second, _ = sharded(first, batch())
    assert not any(deleted((first, second)))


def test_a_state_that_holds_one_array_twice():
    def step(state, batch):
        inner, value = adam_step(state["inner"], batch)
        ema = jax.tree.map(lambda e, w: 0.9 * e + 0.1 * w, state["ema"], inner[0])
        return {"inner": inner, "ema": ema}, value

    def call(step, state, i):
        return step(state, batch(i))

    inner = adam_state()
    agree(step, {"inner": inner, "ema": inner[0]}, call)


def test_a_placed_state_that_holds_one_array_twice():
    def step(state, batch):
        params, other = state["params"], state["other"]
        gradients = jax.grad(lambda p, o: loss(p, batch) + loss(o, batch), argnums=(0, 1))(params, other)
        params, other = (
            jax.tree.map(lambda w, g: w - 0.1 * g, *pair) for pair in zip((params, other), gradients, strict=True)
        )
        return {"params": params, "other": other}, loss(params, batch)

    sharded = shardstep.shard(step)
    state, _ = sharded({"params": weights(0), "other": weights(1)}, batch())
    state, _ = sharded(state, batch())  # from now on the call is recognised
    state["other"] = state["params"]  # as when a target network is synchronised
    expected = jax.jit(step)(state, batch())
    assert_same(sharded(state, batch()), expected)


def test_an_array_that_is_state_and_another_argument():
    """A reference policy that starts as the policy."""

    def step(state, batch, reference):
        def objective(params):
            return loss(params, batch) + sum(jnp.sum((params[k] - reference[k]) ** 2) for k in params)

        gradients = jax.grad(objective)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss(state, batch)

    sharded = shardstep.shard(step, batch_argnums=1)
    state, _ = sharded(weights(0), batch(), weights(1))
    expected = jax.jit(step)(state, batch(), state)
    assert_same(sharded(state, batch(), state), expected)


# -- state from elsewhere ---------------------------------------------------------------------------------------------


def test_state_of_another_mesh_goes_in():
    few, many = (shardstep.shard(adam_step, mesh_of(n)) for n in (2, 8))
    ours = theirs = adam_state()
    for i, step in enumerate((few, many, few)):
        ours, _ = step(ours, batch(i))
        theirs, _ = jax.jit(adam_step)(theirs, batch(i))
    assert_same(ours, theirs)


def test_state_of_another_plan_goes_in():
    whole, split = (shardstep.shard(adam_step, weights=w) for w in ("replicated", "sharded"))
    ours = theirs = adam_state()
    for i, step in enumerate((whole, split, split, whole)):
        ours, _ = step(ours, batch(i))
        theirs, _ = jax.jit(adam_step)(theirs, batch(i))
    assert_same(ours, theirs)


def test_state_comes_back_as_ordinary_arrays():
    state, _ = shardstep.shard(adam_step)(adam_state(), batch())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), adam_state())
    evaluated = jax.jit(loss)(state[0], batch())  # evaluation code needs no shardstep
    assert np.isfinite(float(evaluated))


# -- what comes back --------------------------------------------------------------------------------------------------


def test_metrics_with_one_entry_per_example_come_back_whole():
    def step(state, batch):
        state, value = adam_step(state, batch)
        each = errors(state[0], batch)
        return state, {"loss": value, "each": each, "worst": each.argmax(), "columns": jnp.stack([each, each], 1).T}

    agree(step, adam_state(), lambda step, state, i: step(state, batch(i)))
    _, metrics = shardstep.shard(step)(adam_state(), batch())
    assert metrics["each"].shape == (EXAMPLES,) and metrics["columns"].shape == (2, EXAMPLES)


def test_outputs_that_are_constants_or_inputs():
    def step(state, batch):
        state, value = adam_step(state, batch)
        return state, {"loss": value, "epoch": 3, "ones": jnp.ones(4), "echo": batch["y"], "text": "done"}

    sharded = shardstep.shard(step)
    _, metrics = sharded(adam_state(), batch())
    assert metrics["text"] == "done" and int(metrics["epoch"]) == 3
    np.testing.assert_array_equal(metrics["echo"], batch()["y"])
    np.testing.assert_array_equal(metrics["ones"], np.ones(4))


# -- place, lower, plan -----------------------------------------------------------------------------------------------


def test_place_lays_arguments_out_as_the_plan_says():
    sharded = shardstep.shard(adam_step)
    state, examples = sharded.place(adam_state(), batch())
    plan = sharded.plan(adam_state(), batch())
    (state_shardings, batch_shardings), _ = plan.shardings
    for x, sharding in zip(
        jax.tree.leaves((state, examples)), jax.tree.leaves((state_shardings, batch_shardings)), strict=True
    ):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert_same((state, examples), (adam_state(), batch()), tolerance=0)


def test_lower_gives_what_jax_gives():
    lowered = shardstep.shard(adam_step).lower(adam_state(), batch())
    assert isinstance(lowered, jax.stages.Lowered)
    compiled = lowered.compile()
    assert "reduce-scatter" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes > 0


def test_plan_and_lower_need_no_arrays():
    def shapes(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    params, moments = adam_state()
    arguments = params, moments, batch(), jax.random.key(0)
    sharded = shardstep.shard(noisy_step)
    assert sharded.plan(*shapes(arguments)) == sharded.plan(*arguments)
    text = sharded.lower(*shapes(arguments)).compile().as_text()
    assert "reduce-scatter" in text


def test_a_plan_runs_nothing_on_devices():
    abstract = jax.eval_shape(lambda: (adam_state(), batch()))
    with compilations() as count:
        plan = shardstep.shard(adam_step).plan(*abstract)
    assert count == [0] and plan.leaves


def test_a_sharded_step_can_be_traced_itself():
    """`jax.eval_shape`, or a jitted function around it, as for any jitted function."""
    sharded, arguments = shardstep.shard(adam_step), (adam_state(), batch())
    expected = jax.jit(adam_step)(*arguments)
    found = jax.eval_shape(sharded, *arguments)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    assert_same(jax.jit(sharded)(*arguments), expected)
    assert not any(deleted(arguments))


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_compares_both_runs():
    start = adam_state()
    found = shardstep.check(adam_step, start, batch())
    assert found.within(1e-5) and found.replicas == 8 and found.steps == 3
    assert not any(deleted(start))
    assert any(leaf.path.endswith("['w1']") for leaf in found.leaves)


def test_check_sees_a_difference():
    """A step that is not a function of its arguments: each trace scales the weights differently."""
    traces = []

    def step(state, batch):
        traces.append(1)
        (params, moments), value = adam_step(state, batch)
        return (jax.tree.map(lambda w: w * len(traces), params), moments), value

    found = shardstep.check(step, adam_state(), batch(), steps=1)
    assert not found.within(1e-2) and not found.exact
    assert "differs" in str(found)


def test_several_axes_never_cut_one_dimension_too_fine():
    """Four elements, 4 x 2 replicas: each axis divides them, both together do not."""

    def step(state, batch):
        return {"w": state["w"] * 0.5}, jnp.flip(batch, 0)[:4]

    state, batch = {"w": jnp.ones((64, 64))}, jnp.arange(8.0)
    _, first = shardstep.shard(step, batch_argnums=1, group=2)(state, batch)
    np.testing.assert_array_equal(first, [7.0, 6.0, 5.0, 4.0])
