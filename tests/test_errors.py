"""What a user reads who did something wrong; and that the arguments survive it."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from steps import adam_state, adam_step, batch, loss, mesh_of, update, weights

import shardstep
from shardstep import ShardstepError

# -- the arguments survive --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(match, *arguments):
    """A ShardstepError with this text, and arguments that are alive after it."""
    with pytest.raises(ShardstepError, match=match):
        yield
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.Array):
            assert not leaf.is_deleted()
            np.asarray(leaf)


def placed_state(mesh=None):
    """State that a sharded step has returned: the kind that a call donates."""
    return shardstep.shard(adam_step, mesh)(adam_state(), batch())[0]


# -- the batch --------------------------------------------------------------------------------------------------------


def test_a_per_replica_batch_that_does_not_divide():
    def step(state, batch):
        grads = jax.lax.pmean(jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state), "replica")
        return state - 0.1 * grads

    sharded = shardstep.shard(step, axis_name="replica", batch_argnums=1)
    state = sharded(jnp.ones((96, 64)), batch(0, 16))
    with refused(r"batch\['x'\] has 20 examples on dimension 0, and 8 replicas.*multiple of 8 \(e\.g\. 16\)", state):
        sharded(state, batch(0, 20))
    assert np.isfinite(np.asarray(sharded(state, batch(0, 16)))).all()  # the state goes on


def test_a_batch_without_examples():
    state = placed_state()
    with refused(r"the batch is empty: batch\['x'\] has no examples on dimension 0", state):
        shardstep.shard(adam_step)(state, batch(0, 0))


def test_a_per_replica_batch_that_is_ambiguous():
    def step(state, batch, table):
        shifted = {**batch, "x": batch["x"] + table.sum(0)}
        return jax.tree.map(lambda w, g: w - lax.pmean(g, "replica"), state, jax.grad(loss)(state, shifted))

    arguments = weights(), batch(), jnp.ones((5, 96))
    told = r"ambiguous: batch has leading dimension 24; table has leading dimension 5.*batch_argnames='batch'"
    with refused(told, arguments):
        shardstep.shard(step, axis_name="replica")(*arguments)
    shardstep.shard(step, axis_name="replica", batch_argnames="batch")(*arguments)  # the way out that the message names


def test_no_batch_for_a_per_replica_step():
    def step(state, key):
        return jax.tree.map(lambda w: lax.pmean(w, "replica") * 0.9, state), jax.random.uniform(key)

    with refused(r"no batch found: every argument \(state, key\) is state, a key or a scalar.*batch_argnums"):
        shardstep.shard(step, axis_name="replica")(weights(), jax.random.key(0))


def test_batch_argnums_out_of_range():
    with refused(r"batch_argnums=5: the step was called with 2 positional arguments"):
        shardstep.shard(adam_step, batch_argnums=5)(adam_state(), batch())


def test_batch_argnames_unknown():
    with refused(r"batch_argnames='bach': no such argument; the step was called with state, batch"):
        shardstep.shard(adam_step, batch_argnames="bach")(adam_state(), batch())


def test_batch_axis_that_no_leaf_has():
    with refused(r"the batch \(batch\) has no array with a dimension 2: see batch_axis"):
        shardstep.shard(adam_step, batch_argnums=1, batch_axis=2)(adam_state(), batch())


def test_batch_axis_of_another_length():
    with refused(r"batch_axis has 2 entries for 1 batch arguments"):
        shardstep.shard(adam_step, batch_argnums=1, batch_axis=(0, 1))(adam_state(), batch())


def test_static_argnums_out_of_range():
    with refused(r"static_argnums=-3 is out of range: the step takes 2 arguments"):
        shardstep.shard(adam_step, static_argnums=-3)


# -- the state --------------------------------------------------------------------------------------------------------


def test_no_state():
    with refused(r"no state found.*\(arguments: params, batch\).*return state, loss"):
        shardstep.shard(loss)(weights(), batch())


def test_no_state_in_a_step_that_forgets_it():
    with refused(r"no state found"):
        shardstep.shard(lambda state, batch: adam_step(state, batch)[1])(adam_state(), batch())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.astype(jnp.bfloat16), r"comes in as float32\[96,64\] but goes out as bfloat16\[96,64\]"),
        (lambda w: w[:48], r"comes in as float32\[96,64\] but goes out as float32\[48,64\]"),
        (lambda w: w.T, r"comes in as float32\[96,64\] but goes out as float32\[64,96\]"),
    ],
    ids=["dtype", "shape", "transposed"],
)
def test_state_that_comes_back_changed(change, told):
    def step(state, batch):
        (params, moments), value = adam_step(state, batch)
        return ({**params, "w1": change(params["w1"])}, moments), value

    state = placed_state()
    with refused(r"state leaf state\[0\]\['w1'\] " + told, state):
        shardstep.shard(step)(state, batch())


def test_one_array_that_comes_back_changed():
    def step(w, x):
        return w.astype(jnp.bfloat16) - x.mean().astype(jnp.bfloat16), x.sum()

    with refused(r"state leaf w comes in as float32\[96,64\] but goes out as bfloat16\[96,64\]"):
        shardstep.shard(step)(jnp.ones((96, 64)), jnp.ones((8, 3)))


def test_state_on_other_devices():
    few, rest = Mesh(np.asarray(jax.devices()[:2]), ("data",)), Mesh(np.asarray(jax.devices()[4:]), ("data",))
    state = placed_state(rest)
    with refused(r"state\[0\]\['b'\] is on .*but the mesh has .*jax.device_put", state):
        shardstep.shard(adam_step, few)(state, batch())
    shardstep.shard(adam_step, rest)(state, batch())


def test_donated_state_used_again():
    sharded = shardstep.shard(adam_step)
    first, _ = sharded(adam_state(), batch())
    second, _ = sharded(first, batch())
    with refused(
        r"was donated to an earlier call and is gone: use the state that the call returned.*donate=False", second
    ):
        sharded(first, batch())


# -- the mesh and the options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["replica", ("data", "replica")], ids=str)
def test_an_unknown_axis(axis, mesh):
    with refused(r"axis='replica' is not an axis of the mesh, which has data"):
        shardstep.shard(adam_step, mesh, axis=axis)


def test_unknown_weights():
    with refused(r"weights='split': choose 'replicated', 'sharded' or 'auto'"):
        shardstep.shard(adam_step, weights="split")


@pytest.mark.parametrize("group", [3, 0, 16, -2])
def test_a_group_that_does_not_divide(group, mesh):
    with refused(rf"group={group} does not divide the 8 replicas of axis 'data'"):
        shardstep.shard(adam_step, mesh, group=group)


def test_groups_on_several_axes():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("host", "chip"))
    with refused(r"group=3 does not divide the 8 replicas of axes 'host', 'chip'"):
        shardstep.shard(adam_step, mesh, group=3)
    apart = jax.make_mesh((2, 2, 2), ("a", "model", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with refused(r"group=1 would cut one of axes 'a', 'b'.*Give the size of the inner ones \(2, say\)"):
        shardstep.shard(adam_step, apart, axis=("a", "b"), group=1)


# -- per-replica steps ------------------------------------------------------------------------------------------------


def per_replica_step(state, batch):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return update(params, moments, lax.pmean(gradients, "batch")), lax.pmean(value, "batch")


def test_axis_name_without_a_collective():
    state = placed_state()
    with refused(r"axis_name='batch' is set, but the step has no collective over that axis.*for jax.jit", state):
        shardstep.shard(adam_step, axis_name="batch")(state, batch())


def test_a_collective_without_axis_name():
    state = placed_state()
    with refused(r"not bound.*batch.*per-replica step.*axis_name=", state):
        shardstep.shard(per_replica_step)(state, batch())


def test_a_collective_over_another_name():
    with refused(r"not bound.*batch"):
        shardstep.shard(per_replica_step, axis_name="replicas")(adam_state(), batch())


def test_state_that_would_differ_between_replicas():
    def step(state, batch):
        state, value = per_replica_step(state, batch)
        params, moments = state
        return ({**params, "b": batch["x"].mean() * params["b"]}, moments), value

    state = placed_state()
    with refused(r"state leaf state\[0\]\['b'\] would differ between replicas.*lax\.pmean\(x, 'batch'\)", state):
        shardstep.shard(step, axis_name="batch")(state, batch())


def test_a_loop_that_replicas_would_leave_at_different_times():
    def step(state, batch):
        def halved(c):  # all replicas would have to take part in each round, but some have left
            return c[0] + lax.psum(c[1], "batch"), c[1] / 2

        rounds = lax.while_loop(lambda c: c[1] > 1e-3, halved, (0.0, batch["x"].max()))[0]
        state, value = per_replica_step(state, batch)
        return state, value + lax.psum(rounds, "batch")

    state = placed_state()
    with refused(
        r"predicate of the while loop at .*test_errors\.py.* depends on data of one replica.*lax\.pmax", state
    ):
        shardstep.shard(step, axis_name="batch")(state, batch())


def test_a_branch_that_communicates_on_a_condition_of_one_replica():
    def step(state, batch):
        state, _ = per_replica_step(state, batch)
        return state, lax.cond(batch["x"].max() > 0, lambda v: lax.psum(v, "batch"), lambda v: v, batch["x"].sum())

    state = placed_state()
    with refused(r"condition at .*test_errors\.py.* depends on data of one replica, but a branch communicates", state):
        shardstep.shard(step, axis_name="batch")(state, batch())


# -- the user's own errors come through -------------------------------------------------------------------------------


class Mine(Exception):
    pass


def test_an_exception_in_the_step_is_the_users_own():
    def step(state, batch):
        raise Mine("in the step")

    state = placed_state()
    with pytest.raises(Mine, match="in the step"):
        shardstep.shard(step)(state, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda x: float(x.sum()), jax.errors.ConcretizationTypeError),
        (lambda x: 1.0 if x.sum() > 0 else 0.0, jax.errors.TracerBoolConversionError),
        (lambda x: np.asarray(x).sum(), jax.errors.TracerArrayConversionError),
        (lambda x: (x @ x).sum(), TypeError),
        (lambda x: x.no_such_attribute, AttributeError),
    ],
    ids=["float", "if", "numpy", "shapes", "attribute"],
)
def test_a_step_that_cannot_be_traced_raises_what_jit_raises(act, error):
    def step(state, batch):
        state, value = adam_step(state, batch)
        return state, value * act(batch["x"])

    state = adam_state()
    with pytest.raises(error) as plain:
        jax.jit(step)(state, batch())
    with pytest.raises(error) as ours:
        shardstep.shard(step)(state, batch())
    assert type(ours.value) is type(plain.value)
    assert not isinstance(ours.value, ShardstepError)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_wrong_arguments_raise_what_the_step_raises():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        shardstep.shard(adam_step)(adam_state())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        shardstep.shard(adam_step)(adam_state(), batch(), rate=0.1)


def test_an_error_leaves_the_step_usable():
    sharded = shardstep.shard(adam_step, mesh_of(8))
    state = placed_state()
    with refused(r"the batch is empty", state):
        sharded(state, batch(0, 0))
    sharded(state, batch())


# -- what cannot be rewritten -----------------------------------------------------------------------------------------


def in_the_update(act):
    """A step whose momentum goes through `act`."""

    def step(state, batch):
        w, m = state
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        m = act(0.9 * m + gradient)
        return (w - 0.1 * m, m), value

    return step


def through_a_ref(m):
    ref = jax.new_ref(m)
    ref[...] = 2.0 * ref[...]
    return ref[...]


def through_a_ref_in_a_loop(m):
    ref = jax.new_ref(m)

    def body(i, carry):
        ref[...] = 2.0 * ref[...]
        return carry

    jax.lax.fori_loop(0, 2, body, 0)
    return ref[...]


def through_an_ordered_io_callback(m):
    return m + io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32), ordered=True)


def through_an_ordered_print(m):
    jax.debug.print("{}", m.sum(), ordered=True)
    return m


def through_a_shard_map(m):
    mesh = jax.make_mesh((8,), ("other",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("other")
    return jax.shard_map(lambda x: 2.0 * x, mesh=mesh, in_specs=rows, out_specs=rows)(m)


@pytest.mark.parametrize(
    "act, way_out",
    [
        (through_a_ref, "Pass its value in and return the new one"),
        (through_a_ref_in_a_loop, "Pass its value in and return the new one"),
        (through_an_ordered_io_callback, "Leave ordered=True out"),
        (through_an_ordered_print, "Leave ordered=True out"),
        (through_a_shard_map, "shardstep.shard(f, mesh, axis_name=...)"),
    ],
)
def test_what_cannot_be_rewritten_names_the_line_and_the_way_out(act, way_out):
    state = jnp.ones((64, 64)), jnp.zeros((64, 64))
    with pytest.raises(ShardstepError, match=re.escape(way_out)) as caught:
        shardstep.shard(in_the_update(act))(state, np.ones((16, 64), np.float32))
    assert re.match(rf"\S*test_errors.py:\d+:\d+ \({act.__name__}", str(caught.value))


def test_a_ref_among_the_arguments():
    def step(w, seen, batch):
        seen[...] += 1
        return w - jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

    with pytest.raises(ShardstepError, match=r"test_errors.py:\d+:\d+ \(\S*step\): .* mutable array"):
        shardstep.shard(step)(jnp.ones((64, 64)), jax.new_ref(jnp.zeros(())), np.ones((16, 64), np.float32))
