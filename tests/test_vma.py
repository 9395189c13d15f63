"""JAX's own type system (`check_vma`) certifies every rewritten program: what is called replicated is replicated."""

from __future__ import annotations

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from steps import adam_state, adam_step, batch, loss, mesh_of, update
from zoo import ZOO

import shardstep

SOURCE = pathlib.Path(shardstep.__file__).parent


def shard_maps(jaxpr):
    """Every shard_map in a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from shard_maps(getattr(inner, "jaxpr", inner))


def assert_certified(sharded, *arguments):
    """Tracing the rewritten program is the check: JAX raises where something is not as replicated as it is called."""
    program, call = sharded.program(arguments, {})
    placed = program.place(call.leaves)
    (found,) = shard_maps(jax.make_jaxpr(lambda *leaves: jax.tree.leaves(program(leaves)))(*placed).jaxpr)
    assert found.params["check_vma"] is True


@pytest.mark.parametrize("name", ["transformer", "accumulation_scan"])  # test_equality.py runs all of them
def test_the_zoo(name, mesh):
    program = ZOO[name](batch=8)
    sharded = shardstep.shard(program.step, mesh, batch_argnums=program.batch_argnums, batch_axis=program.batch_axis)
    assert_certified(sharded, *program.state, *program.batches[0])


@pytest.mark.parametrize(
    "options", [{}, {"weights": "sharded"}, {"group": 2}, {"weights": "sharded", "group": 4}], ids=str
)
def test_options(options, mesh):
    assert_certified(shardstep.shard(adam_step, mesh, **options), adam_state(), batch())


@pytest.mark.parametrize("n", [1, 3, 8])
def test_numbers_of_replicas(n):
    options = shardstep.Options(engine="rewrite")  # one replica alone would run the step as it is
    assert_certified(shardstep.shard(adam_step, mesh_of(n), options=options), adam_state(), batch())


def test_several_axes():
    mesh = jax.make_mesh((2, 4), ("host", "chip"))
    assert_certified(shardstep.shard(adam_step, mesh), adam_state(), batch())
    assert_certified(shardstep.shard(adam_step, mesh, axis="chip"), adam_state(), batch())


def test_a_per_replica_step(mesh):
    def step(state, batch):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return update(params, moments, lax.pmean(gradients, "batch")), lax.pmean(value, "batch")

    assert_certified(shardstep.shard(step, mesh, axis_name="batch"), adam_state(), batch())


def test_a_step_with_every_kind_of_control_flow(mesh):
    def step(state, batch):
        params, _ = state
        scale = lax.cond(loss(params, batch) > 1, lambda: 0.5, lambda: 2.0)
        norm = lax.while_loop(lambda n: n > 1, lambda n: n / 2, jnp.abs(batch["x"]).max())
        total = lax.fori_loop(0, 3, lambda i, t: t + batch["y"].sum() * i, 0.0)
        state, value = adam_step(state, {**batch, "x": batch["x"] * scale / norm})
        return state, value + total

    assert_certified(shardstep.shard(step, mesh), adam_state(), batch())


def test_the_check_has_teeth():
    """A program that returns what differs as replicated is refused by JAX."""
    mesh = mesh_of(8)
    spec = jax.sharding.PartitionSpec
    wrong = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec("data"), out_specs=spec(), check_vma=True)
    with pytest.raises(ValueError, match=r"replicat|vary|invari"):
        jax.make_jaxpr(wrong)(jnp.ones(8))


def test_the_check_is_on_by_default():
    assert shardstep.Options().check is True


def test_the_check_is_switched_off_nowhere():
    """In all of src, `check_vma` is `options.check`; only `baselines.py` has it off, for the user's own program."""
    settings = [
        (path.name, ast.unparse(keyword.value))
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in ("check_vma", "check_rep", "check")
    ]
    assert sorted(settings) == [("baselines.py", "False"), ("rewritten.py", "options.check")]
