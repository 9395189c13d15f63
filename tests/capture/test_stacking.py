"""Which pieces of a program are found to be the same work, and what becomes of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardstep._src.capture.stacking import Stacking, stack
from shardstep._src.core.pieces import STACKED, evaluate, run_stacked
from shardstep._src.core.program import Program, flatten
from shardstep._src.planning.rows import rows_of

X = [np.random.default_rng(i).normal(size=(4, 6)).astype(np.float32) for i in range(3)]


def stacked(f, *args, rows=4):
    """The rewritten program, its stacks, and that it computes the same."""
    program = flatten(jax.make_jaxpr(f)(*args))
    how = Stacking(lambda equation: bool(equation.effects), rows)
    found = stack(program, how)
    pieces = [e for e in found.walk() if e.primitive is STACKED]
    if not any(e.bodies for e in found.equations):
        ours = _run(found, args)
        for a, b in zip(ours, jax.tree.leaves(f(*args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return found, pieces


def _run(program, args):
    env = dict(zip(program.inputs, map(jnp.asarray, args), strict=True))
    env.update(program.constants)
    for e in program.equations:
        operands = [np.asarray(a.value, a.array.dtype) if hasattr(a, "value") else env[a] for a in e.inputs]
        if e.primitive is STACKED:
            made = run_stacked(e.params["piece"], operands, lambda x: x)
        elif e.bodies:
            made = evaluate(Program(e.inputs, e.outputs, (e,)), operands, lambda x: x)
        else:
            made = e.primitive.bind(*operands, **e.params)
        env.update(zip(e.outputs, made if e.primitive.multiple_results else [made], strict=True))
    return [env[a] for a in program.outputs]


def polish(x, scale=1.0):
    x = x / jnp.linalg.norm(x)
    for _ in range(2):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return scale * x


def test_equal_work_on_several_values_is_one_piece_on_their_stack():
    program, (piece,) = stacked(lambda *xs: [polish(x) for x in xs], *X)
    assert [v.array.shape for v in piece.inputs] == [(4, 4, 6)] and piece.params["piece"].count == 3
    assert sorted(str(e.primitive) for e in program.equations) == ["stack", "stacked", "unstack"]


def test_a_loop_is_traced_anew():
    def f(*xs):
        return [lax.fori_loop(0, 3, lambda i, y: y - 0.1 * (y @ y.T) @ y, x) for x in xs]

    _, (piece,) = stacked(f, *X)
    assert [str(e.primitive) for e in piece.params["piece"].program.equations] == ["scan"]


def test_what_all_rows_share_is_not_stacked():
    def f(scale, *xs):
        return [polish(x, scale) for x in xs]

    _, (piece,) = stacked(f, np.float32(3.0), *X)
    assert sum(piece.params["piece"].stacked) == 1 and len(piece.inputs) == 2


def test_work_that_differs_in_a_constant_or_a_shape_is_not_alike():
    assert not stacked(lambda x, y: [polish(x, 1.0), polish(y, 2.0) @ y.T], *X[:2])[1]
    assert not stacked(lambda x, y: [polish(x), polish(y)], X[0], X[1][:, :5])[1]


def test_pieces_that_need_each_other_halfway_are_left_as_they_are():
    def f(x, y):
        first = [polish(x), polish(y)]
        total = sum(jnp.sum(a * a) for a in first)  # a global norm: every leaf waits for all
        return [polish(a * total + b) for a, b in zip(first, (x, y), strict=True)]

    assert not stacked(f, *X[:2])[1]


def test_two_groups_that_wait_for_one_another_crosswise_are_not_both_stacked():
    def other(x):
        return jnp.linalg.qr(x.T)[0].T

    def f(x, y):
        a, d = polish(x), other(y)
        b, c = other(x * jnp.max(a)), polish(y * jnp.max(d))
        return a, b, c, d

    _, pieces = stacked(f, *X[:2])
    assert len(pieces) <= 1


def test_products_with_vectors_and_inner_products_are_left_alone():
    assert not stacked(lambda *xs: [jnp.vdot(x, x) for x in xs], *X)[1]
    assert not stacked(lambda *xs: [x @ jnp.ones(6) for x in xs], *X)[1]


def test_branches_are_searched_for_equal_work_inside():
    def f(flag, *xs):
        return lax.cond(flag, lambda *xs: [polish(x) for x in xs], lambda *xs: list(xs), *xs)

    program, pieces = stacked(f, np.bool_(True), *X)
    assert len(pieces) == 1 and str(program.equations[-1].primitive) == "cond"
    branch = program.equations[-1].bodies[1]
    ours = _run(branch, X)
    for a, b in zip(ours, map(polish, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_loop_runs_as_jax_runs_it():
    def f(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c + jnp.abs(c), x)

    program = flatten(jax.make_jaxpr(f)(X[0]))
    np.testing.assert_allclose(evaluate(program, [X[0]], lambda x: x)[0], f(X[0]), rtol=1e-6)


def test_leaves_that_are_stacks_are_put_end_to_end():
    """Two leaves of three matrices, for four replicas: six rows, and two copies."""
    stacks = [np.stack(X), np.stack(X[::-1])]
    how = Stacking(lambda equation: False, rows=4, rows_of=rows_of)
    program = flatten(jax.make_jaxpr(lambda *xs: [jax.vmap(polish)(x) for x in xs])(*stacks))
    found = stack(program, how)
    (piece,) = (e for e in found.equations if e.primitive is STACKED)
    assert piece.params["piece"].count == 6 and piece.inputs[0].array.shape == (8, 4, 6)
    for ours, x in zip(_run(found, stacks), stacks, strict=True):
        np.testing.assert_allclose(ours, jax.vmap(polish)(x), rtol=1e-5, atol=1e-6)


def test_a_loop_that_goes_on_for_some_rows_only():
    """Under `vmap`, a loop asks each row whether it goes on; rows that are done stay as they are."""

    def root(x):
        return lax.while_loop(
            lambda y: jnp.sum(y * y) > 1.0, lambda y: 0.4 * (y @ y.T) @ y / jnp.sum(y * y) + 0.1 * y, x
        )

    stacks = [np.stack(X), 3 * np.stack(X)]
    how = Stacking(lambda equation: False, rows=4, rows_of=rows_of)
    found = stack(flatten(jax.make_jaxpr(lambda *xs: [jax.vmap(root)(x) for x in xs])(*stacks)), how)
    assert [e.params["piece"].count for e in found.equations if e.primitive is STACKED] == [6]
    for ours, x in zip(_run(found, stacks), stacks, strict=True):
        np.testing.assert_allclose(ours, jax.vmap(root)(x), rtol=1e-5, atol=1e-6)


def test_what_all_rows_have_alike_is_no_meeting():
    """A loop that counts, under `vmap`: every row has a counter of its own, and all begin at zero."""

    def root(x):
        def goes_on(c):
            return (c[0] < 5) & (jnp.sum(c[1] * c[1]) > 1.0)

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, 0.4 * (c[1] @ c[1].T) @ c[1] / jnp.sum(c[1] ** 2)), (0, x))

    stacks = np.stack(X)
    program = flatten(jax.make_jaxpr(lambda x: jax.vmap(root)(x)[1])(stacks))
    rows = rows_of(program)
    assert rows is not None and rows.height == 3
    ours = [_run(rows.program, [x[None]])[0] for x in stacks]
    np.testing.assert_allclose(np.concatenate(ours), jax.vmap(root)(stacks)[1], rtol=1e-5, atol=1e-6)


def test_rows_that_meet_are_no_rows():
    """A norm over all matrices of a leaf."""
    program = flatten(
        jax.make_jaxpr(lambda x: jax.vmap(polish)(x / jnp.linalg.norm(x)) @ x.swapaxes(1, 2))(np.stack(X))
    )
    assert rows_of(program) is None
