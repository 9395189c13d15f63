"""A shard_map over the data axes inside a step for the whole batch runs as what it is: a piece per replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from steps import adam_state, assert_same, batch, mesh_of, split_leaves, update

import shardstep
from shardstep._src.tools.hlo import collectives

ALL, MINE = PartitionSpec(), PartitionSpec("data")
LARGEST = 96 * 64 * 4


def mapped(piece, n, *, inputs=(MINE, ALL), outputs=MINE, check_vma=True):
    return jax.shard_map(piece, mesh=mesh_of(n), in_specs=inputs, out_specs=outputs, check_vma=check_vma)


def step_through(act):
    """Adam, on examples that have passed through `act(x, key)`."""

    def step(state, batch, key):
        params, moments = state

        def objective(params):
            x = act(jnp.tanh(batch["x"] @ params["w1"] + params["b"]), key)
            return jnp.mean((x @ params["w2"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(objective)(params)
        return update(params, moments, gradients), value

    return step


def agree(step, n, *arguments, mesh=None):
    """Two steps as `jit` makes them, and the sharded step."""
    arguments = arguments or (batch(), jax.random.key(3))
    sharded = shardstep.shard(step, mesh or mesh_of(n))
    plain, ours, theirs = jax.jit(step), adam_state(), adam_state()
    for _ in range(2):
        ours, found = sharded(ours, *arguments)
        theirs, expected = plain(theirs, *arguments)
        assert_same(found, expected)
    assert_same(ours, theirs)
    return sharded


def assert_update_is_sharded(sharded, *arguments):
    arguments = (adam_state(), *(arguments or (batch(), jax.random.key(3))))
    plan = sharded.plan(*arguments)
    assert len(split_leaves(plan)) == 4 and not plan.fallbacks, str(plan)
    found = collectives(sharded.lower(*arguments).compile().as_text())
    assert not [c for c in found if c.kind == "all-reduce" and c.bytes >= LARGEST], found


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


PIECES = {
    "roll": lambda n: lambda x, key: 0.7 * x + 0.3 * jnp.roll(x, 1, axis=0),
    "own key": lambda n: lambda x, key: x * jax.random.beta(jax.random.fold_in(key, lax.axis_index("data")), 2.0, 2.0),
    "dropout": lambda n: (
        lambda x, key: x * jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("data")), 0.8, x.shape)
    ),
    "mean": lambda n: lambda x, key: x - lax.pmean(x.mean(0), "data"),
    "largest": lambda n: lambda x, key: x / lax.pmax(jnp.abs(lax.stop_gradient(x)).max(), "data"),
    "loop": lambda n: lambda x, key: lax.fori_loop(0, 3, lambda i, y: y - 0.1 * lax.pmean(y.mean(0), "data"), x),
    "branch": lambda n: lambda x, key: lax.cond(lax.psum(x.sum(), "data") > 0, jnp.sin, jnp.cos, x),
}
SENDING = {  # what reads other replicas' rows is gathered, as it would be sent
    "ring": lambda n: lambda x, key: x + lax.ppermute(x, "data", ring(n)),
    "everybody's": lambda n: lambda x, key: jnp.tanh(x @ lax.all_gather(x, "data", tiled=True).T) @ jnp.eye(24, 64),
    "exchange": lambda n: (
        lambda x, key: lax.all_to_all(jnp.sin(lax.all_to_all(x, "data", 1, 0, tiled=True)), "data", 0, 1, tiled=True)
    ),
    "sum of blocks": lambda n: (
        lambda x, key: x + lax.psum_scatter(jnp.tile(x, (n, 1)), "data", scatter_dimension=0, tiled=True)
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", PIECES)
def test_a_piece(form, check_vma):
    step = step_through(mapped(PIECES[form](8), 8, check_vma=check_vma))
    assert_update_is_sharded(agree(step, 8))


@pytest.mark.parametrize("form", SENDING)
def test_a_piece_that_sends(form):
    agree(step_through(mapped(SENDING[form](8), 8)), 8)


@pytest.mark.parametrize("n", [2, 3])
def test_other_numbers_of_replicas(n):
    agree(step_through(mapped(PIECES["dropout"](n), n)), n)


def test_the_mesh_of_the_piece_need_not_be_the_mesh_of_the_replicas():
    """Four pieces on eight replicas: what a piece computes does not depend on who runs it."""
    agree(step_through(mapped(PIECES["dropout"](4), 4)), 8)
    step = step_through(mapped(PIECES["mean"](8), 8))
    sharded = shardstep.shard(step, mesh_of(8), group=4)
    arguments = adam_state(), batch(), jax.random.key(3)
    assert_same(sharded(*arguments), jax.jit(step)(*arguments))


def test_in_a_loop_of_the_step():
    def twice(x, key):
        return lax.fori_loop(0, 2, lambda i, y: mapped(PIECES["mean"](8), 8)(y, key), x)

    assert_update_is_sharded(agree(step_through(twice), 8))


def test_axes_together_and_one_by_one():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    both, one = PartitionSpec(("a", "b")), PartitionSpec("a", "b")

    def act(x, key):
        x = jax.shard_map(
            lambda x: x * (1 + lax.axis_index("a") + 2 * lax.axis_index("b")) - lax.pmean(x.mean(), ("a", "b")),
            mesh=mesh, in_specs=both, out_specs=both
        )(x)  # fmt: skip
        return jax.shard_map(lambda x: x + lax.psum(x, "a").mean(0), mesh=mesh, in_specs=one, out_specs=one)(x)

    agree(step_through(act), 8, mesh=mesh)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_whole_step_that_was_written_by_hand(check_vma):
    """Data parallelism as one writes it today, jitted: its update is sharded like any other."""

    def step(state, batch, key):
        params, moments = state
        mine = jax.random.fold_in(key, lax.axis_index("data"))

        def objective(params):
            x = jnp.where(jax.random.bernoulli(mine, 0.8, batch["x"].shape), batch["x"], 0)
            return jnp.mean((jnp.tanh(x @ params["w1"] + params["b"]) @ params["w2"] - batch["y"]) ** 2)

        if check_vma:  # JAX sums what the replicas make of a shared weight by itself
            value, gradients = jax.value_and_grad(lambda p: lax.pmean(objective(p), "data"))(params)
        else:
            value, gradients = lax.pmean(jax.value_and_grad(objective)(params), "data")
        return update(params, moments, gradients), value

    by_hand = jax.jit(mapped(step, 8, inputs=(ALL, MINE, ALL), outputs=ALL, check_vma=check_vma))
    assert_update_is_sharded(agree(by_hand, 8))


def test_a_sum_that_goes_round_the_ring():
    """Nothing shows that all replicas have the same, and no type asks for it: the first replica's value counts."""

    def total(x, key):
        found = moving = x.sum(0)
        for _ in range(7):
            moving = lax.ppermute(moving, "data", ring(8))
            found = found + moving
        return found

    act = mapped(total, 8, outputs=ALL, check_vma=False)
    agree(step_through(lambda x, key: x + act(x, key)), 8)


def test_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    act = jax.shard_map(PIECES["mean"](8), in_specs=(MINE, ALL), out_specs=MINE)  # of the mesh around it
    arguments = batch(), jax.random.key(3)
    with jax.set_mesh(mesh_of(8)):
        expected = jax.jit(step_through(act))(adam_state(), *arguments)
    sharded = shardstep.shard(step_through(act), mesh)
    assert_same(sharded(adam_state(), *arguments), expected)


def test_callbacks_are_called_by_each_replica():
    def seen(x, key):
        jax.debug.callback(lambda mean: calls.append(float(mean)), x.mean())
        return x

    calls = []
    arguments = adam_state(), batch(), jax.random.key(3)
    jax.block_until_ready(jax.jit(step_through(mapped(seen, 8)))(*arguments))
    jax.effects_barrier()
    expected, calls[:] = sorted(calls), []
    jax.block_until_ready(shardstep.shard(step_through(mapped(seen, 8)), mesh_of(8))(*arguments))
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(calls), expected, rtol=1e-4, atol=1e-6)


def test_the_users_line_is_named():
    step = step_through(mapped(SENDING["everybody's"](8), 8))
    plan = shardstep.shard(step, mesh_of(8)).plan(adam_state(), batch(), jax.random.key(3))
    lines = [c.line for c in plan.collectives] + [f.line for f in plan.fallbacks]
    assert lines and not [line for line in lines if "capture/inner_maps.py" in line and "tests" not in line], lines


def test_other_axes_and_other_generators_are_refused():
    """An axis of the user's own has a layout to keep; of rbg keys, vmap draws other numbers than each replica would."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    cut = PartitionSpec("data", "model")
    act = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=cut, out_specs=cut)
    with pytest.raises(shardstep.ShardstepError, match=r"test_inner_maps.*a shard_map .*do not carry the batch"):
        shardstep.shard(step_through(lambda x, key: act(x)), mesh, axis="data")(adam_state(), batch(), 0)
    step = step_through(mapped(PIECES["dropout"](8), 8))
    with pytest.raises(shardstep.ShardstepError, match=r"threefry"):
        shardstep.shard(step, mesh_of(8))(adam_state(), batch(), jax.random.key(0, impl="rbg"))
