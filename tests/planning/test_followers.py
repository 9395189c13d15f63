"""Steps with more than one network, or more than a gradient: what is gathered anyway is gathered once.

A teacher, target network or memory that follows the trained weights is read whole in the forward pass, so that it is a
weight too. Its new value is made of the new weights. Those are gathered when they leave the step, and what follows them
needs no gather of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from steps import mesh_of

import shardstep

WIDTH = 64
OPTIMIZER = optax.adam(1e-2)


def network(seed=0):
    first, second = jax.random.split(jax.random.key(seed))
    return {"in": jax.random.normal(first, (32, WIDTH)) / 6, "out": jax.random.normal(second, (WIDTH, WIDTH)) / 8}


def apply(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def follow_on_average(new, old, count):
    return jax.tree.map(lambda n, o: 0.01 * n + 0.99 * o, new, old)


def follow_now_and_then(new, old, count):
    return jax.tree.map(lambda n, o: jnp.where(count % 2 == 0, n, o), new, old)


def follow_in_a_branch(new, old, count):
    return lax.cond(count % 2 == 0, lambda: new, lambda: old)


def student(follow):
    def step(state, x):
        params, teacher, moments, count = state

        def loss(params):
            return jnp.mean((apply(params, x) - lax.stop_gradient(apply(teacher, x + 0.1))) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        update, moments = OPTIMIZER.update(gradient, moments)
        params = optax.apply_updates(params, update)
        return (params, follow(params, teacher, count), moments, count + 1), value

    return step


def student_state():
    return network(), network(1), OPTIMIZER.init(network()), jnp.zeros((), jnp.int32)


def examples(count=16):
    return jax.random.normal(jax.random.key(9), (count, 32))


def sharded(step):
    options = shardstep.Options(min_shard_bytes=1024)
    return shardstep.shard(step, mesh_of(8), weights="replicated", options=options)


@pytest.mark.parametrize("follow", [follow_on_average, follow_now_and_then, follow_in_a_branch])
def test_a_teacher_is_made_of_the_gathered_student(follow):
    plan = sharded(student(follow)).plan(student_state(), examples())
    assert plan.auxiliary_share > 0.99  # the moments do rest sharded
    assert plan.wire_bytes.sharded <= 1.001 * plan.wire_bytes.replicated


@pytest.mark.parametrize("follow", [follow_on_average, follow_in_a_branch])
def test_teachers_have_the_numbers_of_the_plain_step(follow):
    found = shardstep.check(sharded(student(follow)), student_state(), examples(), steps=3)
    assert found.within(1e-5), found


def adversaries(state, x):
    """The second network is trained against what the first one has just become, every other step."""
    judge, maker, judged, made, count = state
    value, gradient = jax.value_and_grad(lambda p: jnp.mean(apply(p, apply(maker, x)[:, :32]) ** 2))(judge)
    update, judged = OPTIMIZER.update(gradient, judged)
    judge = optax.apply_updates(judge, update)

    def train(maker, made):
        gradient = jax.grad(lambda p: jnp.mean(apply(judge, apply(p, x)[:, :32])))(maker)
        update, made = OPTIMIZER.update(gradient, made)
        return optax.apply_updates(maker, update), made

    maker, made = lax.cond(count % 2 == 0, train, lambda *kept: kept, maker, made)
    return (judge, maker, judged, made, count + 1), value


def adversaries_state():
    judge, maker = network(), network(1)
    return judge, maker, OPTIMIZER.init(judge), OPTIMIZER.init(maker), jnp.zeros((), jnp.int32)


def test_new_weights_that_a_branch_reads_are_gathered_in_front_of_it():
    step = sharded(adversaries)
    plan = step.plan(adversaries_state(), examples())
    assert plan.wire_bytes.sharded <= 1.001 * plan.wire_bytes.replicated
    assert shardstep.check(step, adversaries_state(), examples(), steps=2).within(1e-5)


def test_sums_of_rows_do_not_ask_for_whole_rows():
    """Adafactor at the usual width of a transformer: the longer factor is worth sharding, the shorter one is not."""
    optimizer = optax.adafactor(1e-3)

    def step(state, x):
        params, factors = state
        gradient = jax.grad(lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2))(params)
        update, factors = optimizer.update(gradient, factors, params)
        return optax.apply_updates(params, update), factors

    def create():
        params = {"up": jnp.ones((1024, 4096)), "down": jnp.ones((4096, 1024))}
        return params, optimizer.init(params)

    plan = shardstep.shard(step, mesh_of(8)).plan(jax.eval_shape(create), jax.ShapeDtypeStruct((16, 1024), jnp.float32))
    assert {leaf.layout for leaf in plan.leaves if "v_col" in leaf.path} == {"split(0)"}
    assert {leaf.layout for leaf in plan.leaves if "v_row" in leaf.path} == {"replicated"}
    assert plan.wire_bytes.sharded <= 1.001 * plan.wire_bytes.replicated


# -- linear solvers ---------------------------------------------------------------------------------------------------


def newton(params, batch):
    """Hessian-free: the solver multiplies by the curvature of the whole batch in each of its iterations."""

    def loss(params):
        return jnp.mean((apply(params, batch) - 1) ** 2) + 1e-2 * optax.tree.norm(params, squared=True)

    value, gradient = jax.value_and_grad(loss)(params)

    def curvature(v):
        return jax.tree.map(jnp.add, jax.jvp(jax.grad(loss), (params,), (v,))[1], v)

    direction, _ = jax.scipy.sparse.linalg.cg(curvature, gradient, maxiter=3)
    return jax.tree.map(lambda w, d: w - 0.5 * d, params, direction), value


def test_the_iterations_of_a_solver_share_the_examples():
    step = sharded(newton)
    plan = step.plan(network(), examples())
    assert not plan.fallbacks
    assert any("while" in c.loop for c in plan.collectives)
    assert shardstep.check(step, network(), examples(), steps=2).within(1e-5)


def test_a_direct_solver_needs_its_matrix_whole_and_nothing_else():
    def step(state, x):
        weights, factor = state
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        factor = 0.9 * factor + 0.1 * x.T @ x
        return (weights - jnp.linalg.solve(factor + jnp.eye(32), gradient), factor), jnp.sum(factor)

    state = jnp.ones((32, WIDTH)), jnp.eye(32)
    found = sharded(step)
    assert {f.primitive for f in found.plan(state, examples()).fallbacks} <= {"lu"}
    assert shardstep.check(found, state, examples(), steps=2).within(1e-5)
