"""Indexing rules: loops are split, rows have owners, and out-of-range indices mean what they mean in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from simulate import verify
from sites import indices, site_of, values

from shardstep._src.core.layout import PARTIAL, REPLICATED, Partial, Split
from shardstep._src.rules import Block, Local, rule_for

R, S, P = REPLICATED, Split, PARTIAL
B = Split(0, batch=True)


def offers(site, *placements):
    decisions = rule_for(site.primitive)(site, placements)
    if decisions is None:
        return None
    return [(d.operands, d.results) for d in ([decisions] if hasattr(decisions, "operands") else decisions)]


# ------------------------------------------------------- slices -------------------------------------------------------


def test_dynamic_slice_keeps_what_is_taken_whole():
    def cut(x, i):
        return lax.dynamic_slice_in_dim(x, i, 2, axis=1)

    offered = verify(cut, values(4, 6), jnp.int32(3), n=2, only={"dynamic_slice"})["dynamic_slice"]
    assert {(o[0], r[0]) for o, r in offered} == {(S(0), S(0)), (S(0, 2), S(0, 2)), (P, P), (R, R)}
    site = site_of("dynamic_slice", cut, values(4, 6), jnp.int32(3))
    assert offers(site, S(1), R, R) is None
    assert offers(site, Partial("max"), R, R) == [((Partial("max"), R, R), (Partial("max"),))]


def test_dynamic_update_slice_keeps_what_is_updated_whole():
    def put(x, u, i):
        return lax.dynamic_update_slice_in_dim(x, u, i, axis=1)

    args = values(4, 6), values(4, 2), jnp.int32(3)
    offered = verify(put, *args, n=2, only={"dynamic_update_slice"})["dynamic_update_slice"]
    assert {o[:2] + r for o, r in offered} == {(p, p, p) for p in (S(0), S(0, 2), P, R)}
    site = site_of("dynamic_update_slice", put, *args)
    assert offers(site, S(1), R, R, R) is None
    assert offers(site, R, S(0), R, R) == [((S(0), S(0), R, R), (S(0),))]
    assert offers(site, R, P, R, R) == [((P, P, R, R), (P,))]
    assert offers(site, Partial("max"), R, R, R) == [((R,) * 4, (R,))]


def test_roll_by_a_traced_shift():
    offered = verify(lambda x, i: jnp.roll(x, i, axis=1), values(4, 6), jnp.int32(2), n=2, only={"dynamic_slice"})
    assert any(o[0] == S(0) and r[0] == S(0) for o, r in offered["dynamic_slice"])


# ------------------------------------------------------- gather -------------------------------------------------------


def test_embedding_lookup():
    offered = verify(lambda t, i: t[i], values(6, 4), indices(4, 2, below=6), n=2, only={"gather"})["gather"]
    assert offered >= {
        ((R, S(0)), (S(0),)),  # the batch of tokens
        ((R, S(1)), (S(1),)),  # their positions
        ((R, S(0, 2)), (S(0, 2),)),
        ((S(1), R), (S(2),)),  # features
        ((S(0), R), (P,)),  # vocabulary: every row has one owner
        ((R, R), (R,)),
    }


def test_state_yields_to_the_batch_in_a_lookup():
    site = site_of("gather", lambda t, i: t[i], values(6, 4), indices(4, 2, below=6))
    assert offers(site, S(0), B) == [((R, B), (B,))]
    assert offers(site, S(1), B)[0] == ((R, B), (B,))
    assert offers(site, B, S(0))[0] == ((R, S(0)), (S(0),)) and ((B, R), (P,)) in offers(site, B, S(0))


OUT_OF_RANGE = jnp.array([-20, -7, -1, 0, 2, 3, 5, 6, 7, 40, 1, 4], np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize(
    "how",
    [
        dict(mode="clip"),
        dict(mode="promise_in_bounds"),
        dict(mode="fill"),
        dict(mode="fill", fill_value=7),
        dict(mode="fill", fill_value=0),
    ],
    ids=str,
)
def test_a_row_out_of_range_is_what_the_mode_says(how, dtype):
    dims = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def look_up(table, i):
        return lax.gather(table, i, dims, (1, 2), **how)

    offered = verify(look_up, values(6, 2, dtype=dtype), OUT_OF_RANGE[:, None], n=2, outers=(1,))["gather"]
    assert ((S(0), R), (P,)) in offered and ((R, S(0)), (S(0),)) in offered


def test_narrow_indices_reach_every_row():
    i = jnp.array([0, 255, 200, 100], np.uint8)  # the last row, 299, is no uint8
    offered = verify(lambda t, i: t[i], values(300, 1), i, n=2, outers=(1,), only={"gather"})["gather"]
    assert ((S(0), R), (P,)) in offered


@pytest.mark.parametrize("how", [dict(mode="clip"), dict(mode="fill", fill_value=7)], ids=str)
def test_one_component_of_an_index_may_be_out_of_range(how):
    dims = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    pairs = jnp.array([[0, 0], [3, 5], [-1, 2], [4, 2], [2, -1], [1, 6], [-3, 9], [2, 3]], np.int32)
    offered = verify(lambda x, i: lax.gather(x, i, dims, (1, 1), **how), values(6, 4), pairs, n=2, outers=(1,))
    assert offered["gather"] >= {((S(0), R), (P,)), ((S(1), R), (P,)), ((R, S(0)), (S(0),))}


def test_cross_entropy_by_pairs_of_indices():
    """logits[arange(B), labels]: the logits stay, the indices (small) are gathered, the owner picks."""

    def picked(logits, labels):
        return logits[jnp.arange(4), labels]

    args = values(4, 6), indices(4, below=6)
    assert ((S(0), R), (P,)) in verify(picked, *args, n=2, only={"gather"})["gather"]
    assert offers(site_of("gather", picked, *args), B, B) == [((R, B), (B,)), ((B, R), (P,))]


def test_take_along_axis_splits_operand_and_indices_together():
    def take(x, i):
        return jnp.take_along_axis(x, i, axis=1)

    args = values(4, 6), indices(4, 2, below=6)
    offered = verify(take, *args, n=2, only={"gather"})["gather"]
    assert offered >= {
        ((S(0), S(0)), (S(0),)),
        ((S(0, 2), S(0, 2)), (S(0, 2),)),
        ((R, S(1)), (S(1),)),
        ((S(1), R), (P,)),
    }
    assert offers(site_of("gather", take, *args), R, B) == [((B, B), (B,))]


def test_a_window_that_is_cut_has_no_loop():
    def windows(x, i):
        return jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (2, 4)))(i)

    args = values(6, 4), indices(4, below=5)
    offered = verify(windows, *args, n=2, only={"gather"})["gather"]
    assert ((S(1), R), (S(2),)) in offered and ((R, S(0)), (S(0),)) in offered
    assert offers(site_of("gather", windows, *args), S(0), R) is None


def test_a_batch_of_slices():
    offered = verify(
        jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 3)),
        values(4, 6),
        indices(4, below=9),
        n=2,
        only={"gather"},
    )
    assert ((S(0), S(0)), (S(0),)) in offered["gather"]


def test_gather_of_a_partial():
    few = site_of("gather", lambda t, i: jnp.take(t, i, axis=0), values(6, 4), indices(2, below=6))
    many = site_of("gather", lambda t, i: jnp.take(t, i, axis=0), values(6, 4), indices(12, below=6))
    seven = site_of("gather", lambda t, i: t.at[i].get(mode="fill", fill_value=7), values(6, 4), indices(2, below=6))
    assert offers(few, P, R) == [((P, R), (P,))]  # NaN is NaN, however often it is added
    assert offers(many, P, R) == [((R, R), (R,))]  # reduced while it is small
    assert offers(seven, P, R) == [((R, R), (R,))]
    assert offers(seven, Partial("max"), R) == [((Partial("max"), R), (Partial("max"),))]
    assert offers(few, P, B) == [((R, B), (B,))]
    verify(lambda t, i: jnp.take(t, i, axis=0), values(6, 4), indices(2, below=6), n=2, only={"gather"})


def test_rows_of_truth_values_are_not_summed():
    site = site_of("gather", lambda t, i: t[i], values(6, 4) > 3, indices(4, below=6))
    assert offers(site, S(0), R) is None


# ------------------------------------------------------ scatter -------------------------------------------------------


def test_embedding_gradient():
    def grad(t, i):
        return jax.grad(lambda t: (t[i] ** 2).sum())(t)

    args = values(6, 4), indices(4, 2, below=6)
    offered = verify(grad, *args, n=2, outers=(1,), only={"scatter-add"})["scatter-add"]
    assert offered >= {
        ((P, S(0), S(0)), (P,)),  # each replica sums its tokens
        ((P, S(1), S(1)), (P,)),
        ((S(1), R, S(2)), (S(1),)),  # features
        ((S(0), R, R), (S(0),)),  # vocabulary: the owner adds
        ((P, R, P), (P,)),
        ((R, R, R), (R,)),
    }
    site = site_of("scatter_add", grad, *args, wants=(S(0),))
    assert offers(site, R, B, B) == [((P, B, B), (P,))]  # the batch is not gathered for the state's sake
    assert offers(site, P, B, R) == [((P, B, B), (P,))]
    assert offers(site, S(0), B, B) == [((S(0), R, R), (S(0),))]
    assert offers(site, R, R, R) == [((S(0), R, R), (S(0),)), ((R, R, R), (R,))]
    assert offers(site, P, R, R) == [((P, R, P), (P,))]


def test_gradient_of_cross_entropy_by_pairs_is_born_split():
    def grad(logits, labels):
        return jax.grad(lambda x: x[jnp.arange(4), labels].sum())(logits)

    args = values(4, 6), indices(4, below=6)
    verify(grad, *args, n=2, outers=(1,), only={"scatter-add"}, wants=True)
    assert ((B, R, R), (B,)) in offers(site_of("scatter_add", grad, *args, wants=(B,)), R, B, B)


def test_gradient_of_take_along_axis():
    def grad(x, i):
        return jax.grad(lambda x: jnp.take_along_axis(x, i, axis=1).sum())(x)

    args = values(4, 6), indices(4, 2, below=6)
    offered = verify(grad, *args, n=2, outers=(1,), only={"scatter-add"})["scatter-add"]
    assert offered >= {((S(0), S(0), S(0)), (S(0),)), ((P, S(1), S(1)), (P,)), ((S(1), R, R), (S(1),))}
    assert offers(site_of("scatter_add", grad, *args), R, B, R)[0] == ((B, B, B), (B,))


METHODS = {"scatter": "set", "scatter-add": "add", "scatter-sub": "subtract", "scatter-mul": "multiply"}
METHODS |= {"scatter-min": "min", "scatter-max": "max"}


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("name", METHODS)
def test_the_owner_writes_and_out_of_range_is_what_the_mode_says(name, mode):
    i = OUT_OF_RANGE if name != "scatter" else OUT_OF_RANGE[1:7]  # two writes to one place would race
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    write = getattr(lax, name.replace("-", "_"))

    def put(x, i, u):
        return write(x, i, u, dims, mode="fill" if mode == "drop" else mode)

    offered = verify(put, values(6, 2), i[:, None], values(len(i), 2), n=2, outers=(1,), only={name})[name]
    assert offered >= {((S(0), R, R), (S(0),)), ((S(1), R, S(1)), (S(1),))}
    lookups = {r for o, r in offered if o[1] == S(0)}
    combined = {"scatter-add": P, "scatter-sub": P, "scatter-min": Partial("min"), "scatter-max": Partial("max")}
    assert lookups == ({(combined[name],)} if name in combined else set())


def test_writes_through_x_at():
    x = values(4, 6)
    offered = verify(lambda x, i: x.at[i].set(1.0), x, jnp.int32(2), n=2, only={"scatter"})["scatter"]
    assert offered >= {((S(0), R, R), (S(0),)), ((S(1), R, S(0)), (S(1),)), ((P, R, P), (P,))}
    offered = verify(lambda x, i: x.at[i, 1].add(1.0), x, jnp.int32(2), n=2, only={"scatter-add"})["scatter-add"]
    assert offered >= {((S(0), R, R), (S(0),)), ((S(1), R, R), (S(1),)), ((P, R, P), (P,))}
    offered = verify(lambda x, i: x.at[i].apply(jnp.sin), x, jnp.int32(2), n=2, only={"scatter"})["scatter"]
    assert {o[0] for o, _ in offered} == {R, S(1)}  # any function may be applied to a split, none to a partial


def test_a_batch_of_updates():
    put = jax.vmap(lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, axis=0))
    offered = verify(put, values(4, 6), values(4, 3), indices(4, below=9), n=2, outers=(1,), only={"scatter"})[
        "scatter"
    ]
    assert ((S(0), S(0), S(0)), (S(0),)) in offered
    site = site_of("scatter", put, values(4, 6), values(4, 3), indices(4, below=9))
    assert offers(site, S(1), R, R) is None


def test_overwriting_is_a_movement_only_without_races():
    def put(x, i, u):
        return x.at[i].set(u)

    many = site_of("scatter", put, values(4, 6), indices(3, below=4), values(3, 6))
    assert offers(many, P, R, P) == [((R, R, R), (R,))]
    assert offers(many, R, B, B) is None


def test_products_are_linear_in_what_is_multiplied():
    site = site_of("scatter_mul", lambda x, i, u: x.at[i].multiply(u), values(4, 6), indices(3, below=4), values(3, 6))
    assert offers(site, P, R, R) == [((P, R, R), (P,))]
    assert offers(site, P, R, P) == [((R, R, R), (R,))]


def test_maxima_of_maxima():
    top = Partial("max")
    site = site_of("scatter_max", lambda x, i, u: x.at[i].max(u), values(4, 6), indices(3, below=4), values(3, 6))
    assert offers(site, top, R, R) == [((top, R, R), (top,))]
    assert offers(site, R, R, top) == [((R, R, top), (top,))]
    assert offers(site, P, R, R) == [((R, R, R), (R,))]


def test_segment_sum():
    offered = verify(
        lambda x, i: jax.ops.segment_sum(x, i, num_segments=2),
        values(4, 6),
        indices(4, below=2),
        n=2,
        only={"scatter-add"},
    )["scatter-add"]
    assert offered >= {((P, S(0), S(0)), (P,)), ((S(1), R, S(1)), (S(1),)), ((S(0), R, R), (S(0),))}


# ----------------------------------------- on a mesh, under JAX's own checks ------------------------------------------


def test_owners_pass_the_replication_checker():
    """What `emit` writes must type-check under shard_map: block offsets vary, indices and updates do not."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    table, i = values(8, 4), indices(4, below=8)
    there = site_of("gather", lambda t, i: t[i], table, i)
    back = site_of("scatter_add", lambda t, i, u: t.at[i].add(u), table, i, values(4, 4))
    look = next(d for d in rule_for(there.primitive)(there, (S(0), R)) if d.emit)
    add = next(d for d in rule_for(back.primitive)(back, (S(0), R, R)) if d.emit)

    def local(block, i):
        offset = (2 * lax.axis_index("a") + lax.axis_index("b")) * 2
        held = Block((8, 4), (2, 4), (offset, 0))
        (rows,) = look.emit(Local(there.primitive, there.params, (held,), ()), block, i)
        rows = lax.psum(rows, ("a", "b"))
        return rows, add.emit(Local(back.primitive, back.params, (held,), ()), block, i, rows)[0]

    spec = PartitionSpec(("a", "b"))
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=(PartitionSpec(), spec))
    rows, new = jax.jit(run)(table, i[:, None])
    np.testing.assert_array_equal(rows, table[i])
    np.testing.assert_array_equal(new, table.at[i].add(table[i]))
