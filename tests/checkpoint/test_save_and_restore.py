"""Checkpoints know no layout: what N replicas wrote any M read, plain Orbax included. What is broken is refused."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from steps import OPTIMIZER, adam_state, adam_step, assert_same, batch, mesh_of

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint.manifest import NAME

EXAMPLES = 120  # 1, 3, 4, 5, 6 and 8 replicas share them evenly


def train(step, state, first, last):
    losses = []
    for i in range(first, last):
        state, loss = step(state, batch(i, EXAMPLES))
        losses.append(float(loss))
    return state, losses


def bits(tree):
    """Every leaf as its bytes, so that NaN equals itself and -0 differs from 0."""

    def one(x):
        if isinstance(x, float):  # a number that the step hands back as it came
            return "float", repr(x)
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return str(x.dtype), x.shape, np.asarray(x).tobytes()

    return jax.tree.map(one, tree)


def in_layout(state, plan):
    wanted = jax.tree.leaves(plan.shardings[0][0])
    held = [x.data if isinstance(x, shardstep.Padded) else x for x in jax.tree.leaves(state)]
    return all(x.sharding == s for x, s in zip(held, wanted, strict=True))


# -- any number of replicas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before, after", [(8, 6), (6, 8), (8, 1), (1, 5), (4, 3)])
def test_other_number_of_replicas(tmp_path, before, after):
    state, _ = train(shardstep.shard(adam_step, mesh_of(before)), adam_state(), 0, 2)
    shardstep.save(tmp_path, state, step=2)
    step = shardstep.shard(adam_step, mesh_of(after))
    plan = step.plan(adam_state(), batch(0, EXAMPLES))
    restored = shardstep.restore(tmp_path, plan)
    assert bits(restored) == bits(state)
    assert in_layout(restored, plan)
    ours, losses = train(step, restored, 2, 4)
    theirs, reference = train(jax.jit(adam_step), adam_state(), 0, 4)
    assert_same(ours, theirs)
    np.testing.assert_allclose(losses, reference[2:], rtol=1e-5)


@pytest.mark.parametrize("before, after", [("replicated", "sharded"), ("sharded", "replicated")])
def test_other_rest_for_weights(tmp_path, before, after):
    state, _ = train(shardstep.shard(adam_step, mesh_of(8), weights=before), adam_state(), 0, 2)
    shardstep.save(tmp_path, state, step=2)
    step = shardstep.shard(adam_step, mesh_of(4), weights=after)
    plan = step.plan(adam_state(), batch(0, EXAMPLES))
    restored = shardstep.restore(tmp_path, plan)
    assert bits(restored) == bits(state)
    assert in_layout(restored, plan)
    assert restored[0]["w1"].sharding.is_fully_replicated == (after == "replicated")


def test_goes_on_bit_for_bit(tmp_path):
    step = shardstep.shard(adam_step, mesh_of(8))
    unbroken, losses = train(step, adam_state(), 0, 4)
    state, first = train(step, adam_state(), 0, 2)
    shardstep.save(tmp_path, state, step=2)
    again = shardstep.shard(adam_step, mesh_of(8))
    restored = shardstep.restore(tmp_path, again.plan(adam_state(), batch(0, EXAMPLES)))
    resumed, second = train(again, restored, 2, 4)
    assert bits(resumed) == bits(unbroken)
    assert first + second == losses


def test_no_device_reads_more_than_its_block(tmp_path, monkeypatch):
    state, _ = train(shardstep.shard(adam_step, mesh_of(4)), adam_state(), 0, 1)
    shardstep.save(tmp_path, state)
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0, EXAMPLES))
    put = []
    device_put = jax.device_put

    def watched(x, *args, **kwargs):
        put.append(np.shape(x))
        return device_put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", watched)
    restored = shardstep.restore(tmp_path, plan)
    assert restored[1][0].mu["w1"].addressable_shards[0].data.shape == (12, 64)
    blocks = put.count((12, 64))
    assert blocks == 16  # two moments of w1, eight blocks each
    assert put.count((96, 64)) == 8  # the weight alone rests whole


def odd_step(state, batch):
    (params, moments), x = state, batch["x"]
    value, gradients = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["layer/w"]) - 0.1) ** 2))(params)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), value


def odd_state():
    params = {"layer/w": jnp.linspace(-1, 1, 96 * 59).reshape(96, 59)}  # neither 5 nor 7 divides a dimension
    return params, OPTIMIZER.init(params)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("before, after", [(7, 5), (5, 1), (1, 7)])
def test_padded_leaves_are_stored_in_their_own_shape(tmp_path, before, after, weights):
    step = shardstep.shard(odd_step, mesh_of(before), weights=weights)
    state, _ = step(odd_state(), batch(0, 35))
    padded = [x for x in jax.tree.leaves(state) if isinstance(x, shardstep.Padded)]
    assert len(padded) == (0 if before == 1 else 2 if weights == "replicated" else 3)
    for x in padded:  # what stands in the padding must not come back
        x.data = poisoned(x)
    tmp_path = tmp_path / "a 100% odd name#"
    shardstep.save(tmp_path, state, step=1)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), odd_state())
    with ocp.CheckpointManager(tmp_path) as manager:
        assert bits(manager.restore(1, args=ocp.args.StandardRestore(plain))) == bits(state)
    step = shardstep.shard(odd_step, mesh_of(after), weights=weights)
    plan = step.plan(odd_state(), batch(0, 35))
    restored = shardstep.restore(tmp_path, plan)
    assert bits(restored) == bits(state)
    assert in_layout(restored, plan)
    assert isinstance(restored[1][0].mu["layer/w"], shardstep.Padded) == (after > 1)
    ours, _ = step(restored, batch(1, 35))
    theirs, _ = jax.jit(odd_step)(jax.jit(odd_step)(odd_state(), batch(0, 35))[0], batch(1, 35))
    assert_same(ours, theirs)


def poisoned(x):
    outside = np.ones(x.data.shape, bool)
    outside[tuple(map(slice, x.shape))] = False
    return jax.device_put(jnp.where(outside, jnp.nan, x.data), x.data.sharding)


# -- every kind of leaf ------------------------------------------------------------------------------------------------


def mixed_state():
    return {
        "w": jnp.linspace(-1, 1, 96 * 64).reshape(96, 64).astype(jnp.bfloat16),
        "m": jnp.zeros((96, 64)).at[0, 0].set(jnp.nan).at[0, 1].set(-0.0),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(9),
        "count": jnp.asarray(2**31 - 5, jnp.int32),
        "mask": jnp.arange(96) % 3 == 0,
        "small": jnp.arange(-4, 4, dtype=jnp.int8),
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "complex": jnp.asarray([1 + 2j, 3 - 1j]),
        "step": 3,
        "rate": 0.1,
        "mlp/~/linear.0": [{0: jnp.ones(3), 1: (jnp.zeros(2),)}],  # names that Haiku gives, numbers as names
    }


def mixed_step(state, batch):
    key, used = jax.random.split(state["key"])
    noise = jax.random.normal(used, state["m"].shape)
    scale = jnp.mean(batch["x"]) + jnp.sum(state["w"].astype(jnp.float32) * jnp.mean(batch["x"], 0)[:, None])
    return state | {"m": state["m"] + scale * noise, "key": key, "count": state["count"] + 1, "step": state["step"] + 1}


def test_every_dtype_exactly(tmp_path):
    step = shardstep.shard(mixed_step, mesh_of(8))
    state = step(mixed_state(), batch(0))
    shardstep.save(tmp_path, state, step=1)
    plan = shardstep.shard(mixed_step, mesh_of(3)).plan(mixed_state(), batch(0))
    restored = shardstep.restore(tmp_path, plan)
    assert bits(restored) == bits(state)
    assert restored["keys"].dtype == state["keys"].dtype and restored["key"].dtype == state["key"].dtype


def test_host_arrays_and_python_numbers(tmp_path):
    """A state that was never on a device: NumPy arrays and numbers. What the step changes takes the plan's dtype."""
    state = mixed_state() | {"w": np.ones((96, 64), jnp.bfloat16), "count": np.int32(4)}
    shardstep.save(tmp_path, state)
    restored = shardstep.restore(tmp_path, shardstep.shard(mixed_step, mesh_of(4)).plan(state, batch(0)))
    assert restored["step"].dtype == jnp.int32 and int(restored["step"]) == 3
    assert isinstance(restored["rate"], float) and restored["rate"] == 0.1  # the step hands it back as it came
    assert int(restored["count"]) == 4
    np.testing.assert_array_equal(np.asarray(restored["w"]), state["w"])


def test_flax_train_state(tmp_path):
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), jnp.ones((1, 96)))

    def create():
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def step(state, x):
        gradients = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients)

    state = shardstep.shard(step, mesh_of(8))(create(), batch(0)["x"])
    shardstep.save(tmp_path, state, step=1)
    restored = shardstep.restore(tmp_path, shardstep.shard(step, mesh_of(3)).plan(state, batch(0)["x"]))
    assert type(restored) is TrainState and restored.apply_fn is state.apply_fn
    assert type(restored.opt_state[0]) is optax.ScaleByAdamState
    assert bits(restored) == bits(state)


def test_equinox_module(tmp_path):
    """Functions and other static leaves are not written: they come back from the plan."""
    model = eqx.nn.MLP(96, 96, 64, 2, key=jax.random.key(0))

    def step(model, x):
        gradients = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))

    trained = shardstep.shard(step, mesh_of(8), weights="sharded")(model, batch(0)["x"])
    shardstep.save(tmp_path, trained)
    plan = shardstep.shard(step, mesh_of(4), weights="sharded").plan(model, batch(0)["x"])
    restored = shardstep.restore(tmp_path, plan)
    assert type(restored) is eqx.nn.MLP and restored.activation is model.activation
    assert bits(eqx.filter(restored, eqx.is_array)) == bits(eqx.filter(trained, eqx.is_array))


def two_arguments(params, moments, batch):
    (params, moments), loss = adam_step((params, moments), batch)
    return params, moments, loss


@pytest.mark.parametrize("container", [lambda p, m: (p, m), lambda p, m: {"params": p, "moments": m}])
def test_several_state_arguments(tmp_path, container):
    state = container(*adam_state())
    shardstep.save(tmp_path, state)
    plan = shardstep.shard(two_arguments, mesh_of(8)).plan(*adam_state(), batch(0))
    restored = shardstep.restore(tmp_path, plan)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def test_one_bare_array(tmp_path):
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w = jnp.linspace(0, 1, 96 * 64).reshape(96, 64)
    shardstep.save(tmp_path, w)
    plan = shardstep.shard(step, mesh_of(8), weights="sharded").plan(w, batch(0)["x"])
    assert bits(shardstep.restore(tmp_path, plan)) == bits(w)


# -- plain Orbax -------------------------------------------------------------------------------------------------------


def plain_state():
    state = adam_state()
    for i in range(2):
        state, _ = jax.jit(adam_step)(state, batch(i, EXAMPLES))
    return state


def write_alone(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "alone", state)
    return path / "alone"


def write_numbered(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "run" / "2", state)
    return path / "run"


def write_managed(path, state):
    with ocp.CheckpointManager(path / "managed") as manager:
        manager.save(2, args=ocp.args.StandardSave(state))
    return path / "managed"


def write_named_item(path, state):
    with ocp.CheckpointManager(path / "named") as manager:
        manager.save(2, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    return path / "named"


@pytest.mark.parametrize("write", [write_alone, write_numbered, write_managed, write_named_item])
def test_reads_plain_orbax(tmp_path, write):
    state = plain_state()
    path = write(tmp_path, state)
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0, EXAMPLES))
    restored = shardstep.restore(path, plan)
    assert bits(restored) == bits(state)
    assert in_layout(restored, plan)


def test_plain_orbax_reads_it(tmp_path):
    state, _ = train(shardstep.shard(adam_step, mesh_of(8)), adam_state(), 0, 2)
    shardstep.save(tmp_path / "alone", state)
    shardstep.save(tmp_path / "run", state, step=2)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, plain_state())
    with ocp.StandardCheckpointer() as checkpointer:
        assert bits(checkpointer.restore(tmp_path / "alone", target)) == bits(state)
        hosts = checkpointer.restore(tmp_path / "alone")  # no target: NumPy arrays, on any machine
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(hosts))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 2
        assert bits(manager.restore(2, args=ocp.args.StandardRestore(target))) == bits(state)


# -- numbers, time -----------------------------------------------------------------------------------------------------


def test_steps_are_numbered(tmp_path):
    states = {n: jax.tree.map(lambda x, n=n: x + n, adam_state()) for n in (2, 10)}
    assert shardstep.latest_step(tmp_path / "run") is None
    for n, state in states.items():
        shardstep.save(tmp_path / "run", state, step=n)
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    assert shardstep.latest_step(tmp_path / "run") == 10
    assert bits(shardstep.restore(tmp_path / "run", plan)) == bits(states[10])
    assert bits(shardstep.restore(tmp_path / "run", plan, step=2)) == bits(states[2])
    with pytest.raises(ShardstepError, match="no checkpoint of step 3 in"):
        shardstep.restore(tmp_path / "run", plan, step=3)
    with pytest.raises(ShardstepError, match="no whole checkpoint in"):
        shardstep.restore(tmp_path / "elsewhere", plan)


def test_a_whole_checkpoint_is_replaced_only_when_asked(tmp_path):
    state = adam_state()
    shardstep.save(tmp_path, state, step=1)
    with pytest.raises(ShardstepError, match="already holds a checkpoint"):
        shardstep.save(tmp_path, state, step=1)
    other = jax.tree.map(lambda x: x + 1, state)
    shardstep.save(tmp_path, other, step=1, overwrite=True)
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(state, batch(0))
    assert bits(shardstep.restore(tmp_path, plan)) == bits(other)


def test_nothing_but_checkpoints_is_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "run" / "1").mkdir(parents=True)
    (tmp_path / "run" / "1" / "notes.txt").write_text("of this run")
    for overwrite in (False, True):
        with pytest.raises(ShardstepError, match="holds something that is no checkpoint"):
            shardstep.save(tmp_path, adam_state(), overwrite=overwrite)
        with pytest.raises(ShardstepError, match="holds something that is no checkpoint"):
            shardstep.save(tmp_path / "run", adam_state(), step=1, overwrite=overwrite)
    shardstep.save(tmp_path / "run", adam_state(), step=2)
    run = write_numbered(tmp_path / "plain", adam_state())
    with pytest.raises(ShardstepError, match="holds something that is no checkpoint"):
        shardstep.save(run, adam_state(), overwrite=True)  # not in place of all numbered ones
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "run" / "1" / "notes.txt").exists()


def test_background_save_is_of_the_state_as_it_was(tmp_path):
    """The state is donated to the next steps while it is written."""
    step = shardstep.shard(adam_step, mesh_of(8))
    plan = step.plan(adam_state(), batch(0, EXAMPLES))
    state, _ = train(step, adam_state(), 0, 1)
    host = np.zeros((512, 512))
    saved = bits(state)
    saving = shardstep.save(tmp_path, {"state": state, "host": host}, step=1, wait=False)
    host += 1
    train(step, state, 1, 4)
    saving.wait()
    assert saving.done
    shardstep.save(tmp_path / "state", state := step.place(adam_state(), batch(0, EXAMPLES))[0], step=1, wait=False)
    second = shardstep.save(tmp_path / "state", state, step=2, wait=False)  # waits for the first
    assert bits(shardstep.restore(tmp_path / "state", plan)) == bits(state)  # waits for the second
    assert second.done
    with ocp.CheckpointManager(tmp_path) as manager:
        restored = manager.restore(1, args=ocp.args.StandardRestore())
    assert not restored["host"].any()
    assert jax.tree.leaves(bits(jax.tree.leaves(restored["state"]))) == jax.tree.leaves(saved)


def test_a_failed_save_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(shardstep._src.checkpoint.saving.manifest, "write", full)
    saving = shardstep.save(tmp_path, adam_state(), step=1, wait=False)
    with pytest.raises(ShardstepError, match=r"1 was not written: no space left on device"):
        saving.wait()
    assert shardstep.latest_step(tmp_path) is None
    monkeypatch.undo()
    shardstep.save(tmp_path, adam_state(), step=1)  # what the failed one left is in nobody's way
    assert shardstep.latest_step(tmp_path) == 1


# -- broken checkpoints ------------------------------------------------------------------------------------------------


def data_file(directory):
    """The largest file: arrays."""
    return max((f for f in directory.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(file, at=0.5):
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 1
    file.write_bytes(data)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = {
    "flipped": (lambda d: flip(data_file(d)), "the bytes of the file .* have changed"),
    "short": (lambda d: truncate(data_file(d)), "the file .* has .* bytes where .* were written"),
    "missing": (lambda d: data_file(d).unlink(), "the file .* is missing"),
    "no list": (lambda d: (d / "default" / NAME).unlink(), "its list of files, _SHARDSTEP, is missing"),
    "damaged list": (lambda d: truncate(d / "default" / NAME), "its list of files, _SHARDSTEP, cannot be read"),
    "newer format": (
        lambda d: (d / "default" / NAME).write_text(json.dumps({"format": 2, "files": {}})),
        "its format is 2, and this version of shardstep reads 1",
    ),
    "no tree": (lambda d: (d / "default" / "_METADATA").unlink(), "it holds no tree"),
    "cut off": (lambda d: d.rename(d.with_name("2.orbax-checkpoint-tmp")), "it was cut off while it was written"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_is_refused_and_the_newest_whole_one_found(tmp_path, damage):
    hurt, why = DAMAGE[damage]
    old, new = adam_state(), jax.tree.map(lambda x: x + 1, adam_state())
    shardstep.save(tmp_path, old, step=1)
    shardstep.save(tmp_path, new, step=2)
    hurt(tmp_path / "2")
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(old, batch(0))
    with pytest.raises(ShardstepError, match=f"2.* is broken: {why}"):
        shardstep.restore(tmp_path, plan, step=2)
    with pytest.warns(UserWarning, match=f"skipping the checkpoint .*2.*: {why}"):
        assert bits(shardstep.restore(tmp_path, plan)) == bits(old)
    shardstep.save(tmp_path, new, step=2)  # what is broken is replaced
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bits(shardstep.restore(tmp_path, plan)) == bits(new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves some errors unread
def test_damage_to_what_plain_orbax_wrote(tmp_path):
    """No hashes there: what TensorStore cannot read is refused."""
    state = plain_state()
    for n in (1, 2):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(n), state)
    data_file(tmp_path / "2").unlink()
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    with pytest.warns(UserWarning, match="skipping the checkpoint .*2: it cannot be read"):
        assert bits(shardstep.restore(tmp_path, plan)) == bits(state)
    with pytest.raises(ShardstepError, match="2 is broken: it cannot be read"):
        shardstep.restore(tmp_path, plan, step=2)
    gc.collect()  # they are reported when they are collected: here


def test_all_broken(tmp_path):
    shardstep.save(tmp_path, adam_state(), step=1)
    flip(data_file(tmp_path))
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    with pytest.warns(UserWarning, match="skipping"), pytest.raises(ShardstepError, match="no whole checkpoint"):
        shardstep.restore(tmp_path, plan)


def test_another_tree(tmp_path):
    params, moments = adam_state()
    params = {"w1": params["w1"].astype(jnp.bfloat16), "b": jnp.zeros(65), "extra": jnp.zeros((2, 3))}
    shardstep.save(tmp_path, (params, moments))
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    with pytest.raises(ShardstepError) as error:
        shardstep.restore(tmp_path, plan)
    text = str(error.value)
    assert "does not fit the plan's state" in text
    assert "missing: state[0]['w2'] float32[64, 96]" in text
    assert "unexpected: 0.extra float32[2, 3]" in text
    assert "of another shape or dtype: state[0]['w1'] float32[96, 64] is stored as bfloat16[96, 64]" in text
    assert "of another shape or dtype: state[0]['b'] float32[64] is stored as float32[65]" in text


def test_keys_are_not_numbers(tmp_path):
    raw = mixed_state() | {"key": jax.random.key_data(jax.random.key(7))}
    shardstep.save(tmp_path, raw)
    plan = shardstep.shard(mixed_step, mesh_of(8)).plan(mixed_state(), batch(0))
    with pytest.raises(ShardstepError, match=r"state\['key'\] key<fry>\[\] is stored as uint32\[2\]"):
        shardstep.restore(tmp_path, plan)


def test_a_number_that_does_not_fit(tmp_path):
    shardstep.save(tmp_path, mixed_state() | {"step": 2**40})
    plan = shardstep.shard(mixed_step, mesh_of(8)).plan(mixed_state(), batch(0))
    with pytest.raises(ShardstepError, match=r"state\['step'\] int32\[\] cannot hold the stored number"):
        shardstep.restore(tmp_path, plan)


def test_a_plan_from_another_process(tmp_path):
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    shardstep.save(tmp_path, adam_state())
    with pytest.raises(ShardstepError, match="this plan has no devices"):
        shardstep.restore(tmp_path, pickle.loads(pickle.dumps(plan)))


def test_no_pickle(tmp_path, monkeypatch):
    shardstep.save(tmp_path, adam_state())
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))

    def refuse(*_, **__):
        raise AssertionError("a pickle was loaded")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    shardstep.restore(tmp_path, plan)


def test_progress_is_for_terminals(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("shardstep._src.core.progress.LARGE", 0)
    plan = shardstep.shard(adam_step, mesh_of(8)).plan(adam_state(), batch(0))
    shardstep.save(tmp_path / "a", adam_state())
    shardstep.restore(tmp_path / "a", plan)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: treat it as a terminal
    shardstep.save(tmp_path / "b", adam_state())
    shardstep.restore(tmp_path / "b", plan)
    shown = capfd.readouterr().err
    assert "writing b" in shown and "checking b" in shown and "reading b" in shown
    shutil.rmtree(tmp_path / "b")
