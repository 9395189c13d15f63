"""`shard` is used as `jax.jit` is: every form that works there works here, and what cannot be meant fails at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from steps import adam_state, adam_step, assert_same, batch, compilations, mesh_of

import shardstep

MESH = mesh_of(8)


def plain(steps=1):
    state = adam_state()
    for i in range(steps):
        state, value = jax.jit(adam_step)(state, batch(i))
    return state, value


# -- decorators, partial, methods --------------------------------------------------------------------------------------


@shardstep.shard
def bare(state, batch):
    return adam_step(state, batch)


@shardstep.shard(mesh=MESH, weights="sharded")
def with_arguments(state, batch):
    return adam_step(state, batch)


@functools.partial(shardstep.shard, mesh=MESH)
def through_partial(state, batch):
    return adam_step(state, batch)


@shardstep.shard()
def empty_call(state, batch):
    return adam_step(state, batch)


@pytest.mark.parametrize("step", [bare, with_arguments, through_partial, empty_call], ids=lambda s: s.__name__)
def test_decorated_steps_compute_what_the_plain_step_does(step):
    assert_same(step(adam_state(), batch()), plain())
    assert any("split" in leaf.layout for leaf in step.plan(adam_state(), batch()).leaves)


class Trainer:
    """An ordinary object, no pytree: static, as under `eqx.filter_jit`."""

    def __init__(self, scale):
        self.scale = scale

    @shardstep.shard(mesh=MESH)
    def train(self, state, batch):
        state, value = adam_step(state, batch)
        return state, self.scale * value

    @staticmethod
    @shardstep.shard
    def alone(state, batch):
        return adam_step(state, batch)


def test_methods_are_bound():
    ten, two = Trainer(10.0), Trainer(2.0)
    state, value = plain()
    assert_same(ten.train(adam_state(), batch()), (state, 10 * value))
    assert_same(two.train(adam_state(), batch()), (state, 2 * value))
    assert_same(Trainer.train(two, adam_state(), batch()), (state, 2 * value))
    assert_same(ten.alone(adam_state(), batch()), (state, value))


def test_what_a_bound_step_offers_takes_the_arguments_without_the_object():
    trainer = Trainer(1.0)
    arguments = adam_state(), batch()
    assert trainer.train.plan(*arguments).leaves
    assert trainer.train.eval_shape(*arguments)[1].shape == ()
    state, examples = trainer.train.place(*arguments)
    assert_same(trainer.train.lower(*arguments).compile()(trainer, state, examples), plain())
    assert trainer.train.__name__ == "train" and "bound" in repr(trainer.train)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """A pytree whose method is the step: the object itself is the state."""

    w: jax.Array

    @shardstep.shard(mesh=MESH)
    def fitted(self, batch):
        return Model(self.w - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(self.w))


def test_an_object_that_is_a_pytree_is_the_state_of_its_method():
    ours, w = Model(jnp.ones((96, 96))), jnp.ones((96, 96))
    for i in range(2):
        ours = ours.fitted(batch(i))
        w = Model.fitted.step(Model(w), batch(i)).w
    assert_same(ours, Model(w))


# -- donation ----------------------------------------------------------------------------------------------------------


def two_states(params, moments, batch):
    (params, moments), value = adam_step((params, moments), batch)
    return params, moments, value


@pytest.mark.parametrize(
    "how, gone",
    [
        ({}, {0, 1}),
        ({"donate_argnums": ()}, set()),
        ({"donate_argnums": 1}, {1}),
        ({"donate_argnums": (0, 1)}, {0, 1}),
        ({"donate_argnums": -3}, {0}),
        ({"donate_argnames": "moments"}, {1}),
        ({"donate_argnames": ("params",), "donate_argnums": (1,)}, {0, 1}),
        ({"options": shardstep.Options(donate=False)}, set()),
    ],
    ids=str,
)
def test_donation_is_as_asked(how, gone):
    step = shardstep.shard(two_states, MESH, **how)
    placed = step.place(*adam_state(), batch())
    step(*placed)
    for i in (0, 1):
        assert all(x.is_deleted() == (i in gone) for x in jax.tree.leaves(placed[i])), i


@pytest.mark.parametrize(
    "how, said",
    [
        ({"donate_argnums": 3}, "takes 3 arguments"),
        ({"donate_argnames": "momentum"}, "params, moments, batch"),
        ({"donate_argnums": 0, "options": shardstep.Options(donate=False)}, "drop one"),
    ],
    ids=str,
)
def test_donation_that_cannot_be_meant_is_refused(how, said):
    with pytest.raises(shardstep.ShardstepError, match=said):
        shardstep.shard(two_states, MESH, **how)


# -- ahead of time -----------------------------------------------------------------------------------------------------


def test_trace_lower_and_compile_speak_in_the_users_pytrees():
    step, arguments = shardstep.shard(adam_step, MESH), (adam_state(), batch())
    structure = jax.tree.structure((arguments, {}))
    shapes = jax.eval_shape(adam_step, *arguments)
    traced = step.trace(*arguments)
    lowered = traced.lower()
    compiled = lowered.compile()
    for stage, kind in ((traced, jax.stages.Traced), (lowered, jax.stages.Lowered), (compiled, jax.stages.Compiled)):
        assert isinstance(stage, kind)
        assert stage.in_tree == structure
        assert stage.out_tree == jax.tree.structure(shapes)
        assert_shapes(stage.out_info, shapes)
        assert stage.args_info[0][0][0]["w1"].donated and not stage.args_info[0][1]["x"].donated
        assert stage.in_avals[0][1]["x"].shape == (24, 96)
    assert "psum" in str(traced.jaxpr) or "reduce_scatter" in str(traced.jaxpr)
    assert traced.fun_name == "adam_step"
    assert_shapes(step.eval_shape(*arguments), shapes)
    assert_shapes(jax.eval_shape(step, *arguments), shapes)
    assert jax.tree.structure(compiled.input_shardings) == structure
    assert jax.tree.structure(compiled.output_shardings) == jax.tree.structure(shapes)


def assert_shapes(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_compiled_step_is_called_as_the_step_is():
    step = shardstep.shard(adam_step, MESH)
    compiled = step.lower(*jax.eval_shape(lambda: (adam_state(), batch()))).compile()
    state = adam_state()
    for i in range(2):
        state, value = compiled(state, batch(i))
    assert_same((state, value), plain(2))
    with pytest.raises(TypeError, match=r"batch\['x'\] is float32\[16, 96\], but the step was lowered for"):
        compiled(adam_state(), batch(examples=16))
    with pytest.raises(TypeError, match="another structure"):
        compiled(adam_state())
    with pytest.raises(TypeError, match="cannot be traced"):
        jax.jit(compiled)(adam_state(), batch())


def test_static_arguments_are_left_out_when_a_compiled_step_is_called():
    def step(state, batch, twice):
        state, value = adam_step(state, batch)
        return state, 2 * value if twice else value

    compiled = shardstep.shard(step, MESH, static_argnames="twice").lower(adam_state(), batch(), twice=True).compile()
    state, value = plain()
    assert_same(compiled(adam_state(), batch()), (state, 2 * value))


def test_a_compiled_step_takes_and_returns_padded_leaves():
    def step(w, batch):
        gradient = jax.grad(lambda w: jnp.mean((batch["x"][:, :67] @ w) ** 2))(w)
        return w - 0.1 * gradient

    w = jnp.ones((67, 131))
    sharded = shardstep.shard(step, MESH, weights="sharded")
    compiled = sharded.lower(w, batch()).compile()
    once = compiled(w, batch())
    assert once.shape == (67, 131) == compiled.out_info.shape
    assert_same(compiled(once, batch(1)), jax.jit(step)(jax.jit(step)(w, batch()), batch(1)))


def test_eval_shape_of_a_per_replica_step_counts_all_replicas():
    def step(w, x):
        gradient = jax.lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "data")
        return w - gradient, x @ w

    sharded = shardstep.shard(step, MESH, axis_name="data", batch_argnums=1)
    shapes = sharded.eval_shape(jnp.ones((96, 64)), jnp.ones((24, 96)))
    assert [s.shape for s in shapes] == [(96, 64), (24, 64)]
    assert [x.shape for x in sharded(jnp.ones((96, 64)), jnp.ones((24, 96)))] == [(96, 64), (24, 64)]


def test_clear_cache_forgets_programs():
    step = shardstep.shard(adam_step, MESH)
    state, _ = step(adam_state(), batch())
    with compilations() as count:
        state, _ = step(state, batch(1))
    assert count == [0]
    step.clear_cache()
    with compilations() as count:
        step(state, batch(2))
    assert count[0] > 0


# -- what it says of itself --------------------------------------------------------------------------------------------


def test_a_sharded_step_says_what_it_is():
    assert repr(shardstep.shard(adam_step, MESH)) == "ShardedStep(adam_step, mesh=(data=8))"
    text = repr(shardstep.shard(adam_step, MESH, weights="sharded", batch_argnums=1))
    assert text == "ShardedStep(adam_step, mesh=(data=8), batch_argnums=1, weights='sharded')"
    kept = shardstep.shard(adam_step, MESH, options=shardstep.Options(donate=False, bucket_bytes=0))
    assert repr(kept) == "ShardedStep(adam_step, mesh=(data=8), options=Options(bucket_bytes=0, donate=False))"
    assert "functools" not in repr(shardstep.shard(functools.partial(adam_step), MESH))
    assert inspect.signature(bare) == inspect.signature(adam_step)
    assert shardstep.__version__[0].isdigit()


WRONG = {
    "a number": (lambda: shardstep.shard(5), r"shard\(5\): the first argument is the training step.* an int was given"),
    "a mesh first": (lambda: shardstep.shard(MESH), r"a mesh was given: shardstep\.shard\(step, mesh\)"),
    "a count for a mesh": (lambda: shardstep.shard(adam_step, 8), r"jax\.make_mesh\(\(8,\), \('data',\)\)"),
    "options as a dict": (
        lambda: shardstep.shard(adam_step, options={"donate": False}),
        r"is a dict: use options=shardstep\.Options\(donate=False\)",
    ),
    "sharded twice": (lambda: shardstep.shard(bare), r"ShardedStep\(bare.* is sharded already"),
    "a bound step": (lambda: shardstep.shard(Trainer(1.0).train), "is sharded already"),
    "in a decorator": (lambda: shardstep.shard(mesh=8), r"jax\.make_mesh"),
    "weights": (lambda: shardstep.shard(adam_step, weights="split"), "choose 'replicated', 'sharded' or 'auto'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_meant_fails_at_once(wrong):
    call, said = WRONG[wrong]
    with pytest.raises(shardstep.ShardstepError, match=said):
        call()


# -- type checkers -----------------------------------------------------------------------------------------------------

SCRIPT = """
import functools

import jax
import shardstep
from jax.sharding import Mesh


State = dict[str, jax.Array]


def train_step(state: State, batch: jax.Array, rate: float = 0.1) -> tuple[State, jax.Array]:
    return state, batch


def run(mesh: Mesh, state: dict[str, jax.Array], batch: jax.Array) -> None:
    step = shardstep.shard(train_step, mesh, weights="sharded", donate_argnums=0)
    reveal_type(step(state, batch, rate=0.2))
    plan: shardstep.Plan = step.plan(state, batch)
    print(plan.state_bytes.ratio, step.lower(state, batch).compile().as_text())


@shardstep.shard
def bare(state: jax.Array, batch: jax.Array) -> jax.Array:
    return state


@shardstep.shard(weights="replicated")
def called(state: jax.Array, batch: jax.Array) -> jax.Array:
    return state


class Trainer:
    @shardstep.shard
    def train(self, state: jax.Array, batch: jax.Array) -> jax.Array:
        return state


def use(x: jax.Array) -> None:
    reveal_type(bare(x, x))
    reveal_type(called(x, x))
    reveal_type(Trainer().train(x, x))
"""
MISUSED = """
def misused(x: jax.Array) -> None:
    bare(x)
    called(x, "text")
    Trainer().train(x, x, x)
    shardstep.shard(train_step, weight="sharded")
    shardstep.shard(5)
"""


@pytest.mark.once
def test_mypy_strict_sees_the_steps_own_signature(tmp_path):
    (tmp_path / "user.py").write_text(SCRIPT + MISUSED)
    source = Path(shardstep.__file__).parents[1]
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports",
            "silent",
            "--cache-dir",
            str(tmp_path / "cache"),
            "user.py",
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("user.py")]
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert [r.replace("jax._src.basearray.", "jax.") for r in revealed] == [
        "tuple[dict[str, jax.Array], jax.Array]",
        "jax.Array",
        "jax.Array",
        "jax.Array",
    ], found.stdout + found.stderr
    wrong = [int(line.split(":")[1]) for line in lines if ": error:" in line]
    first = SCRIPT.count("\n") + 3
    assert sorted(set(wrong)) == [first + i for i in range(5)], found.stdout
