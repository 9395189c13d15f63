"""A value that changes its layout is the same value: every pair of placements, on real devices."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from steps import mesh_of

from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import PARTIAL, REPLICATED, Axis, Partial, Split, padded_shape, partition_spec
from shardstep._src.core.moves import moves
from shardstep._src.runtime.collectives import convert

N, SHAPE = 4, (8, 12)
R, S, P = REPLICATED, Split, PARTIAL
VALUE = np.random.default_rng(0).integers(-50, 50, SHAPE).astype(np.float32)

SPLITS = [S(0), S(1), S(0, 2), S(1, 3), S(0, extent=12), S(1, extent=16)]
SOURCES = [R, P, Partial("max"), *SPLITS]
TARGETS = [R, P, *SPLITS]


def held(placement, index, value=VALUE):
    """What replica `index` holds of the value; of a sum a term that is not the value, in padding anything."""
    if placement == P:
        terms = np.random.default_rng(1).integers(-9, 9, (N, *SHAPE)).astype(np.float32)
        return terms[index] if index else value - terms[1:].sum(0)
    if placement == Partial("max"):
        return value - 3.0 * ((np.arange(value.size).reshape(SHAPE) % N) != index)
    if not isinstance(placement, Split):
        return value
    d, outer = placement.dim, placement.outer
    missing = np.subtract(padded_shape(SHAPE, (placement,)), SHAPE)
    full = np.pad(value, [(0, m) for m in missing], constant_values=np.nan)
    seen = full.reshape(*full.shape[:d], outer, N, -1, *full.shape[d + 1 :])
    block = seen.take(index, d + 1)
    return block.reshape(*full.shape[:d], -1, *full.shape[d + 1 :])


def joined(blocks, placement):
    if placement == P:
        return blocks.sum(0)
    if placement == R:
        np.testing.assert_array_equal(blocks, np.stack([blocks[0]] * N))
        return blocks[0]
    whole = np.full(padded_shape(SHAPE, (placement,)), np.nan, np.float32)
    d, outer = placement.dim, placement.outer
    seen = whole.reshape(*whole.shape[:d], outer, N, -1, *whole.shape[d + 1 :])
    for i, block in enumerate(blocks):
        at = (slice(None),) * (d + 1) + (i,)
        seen[at] = block.reshape(seen[at].shape)
    return seen.reshape(whole.shape)[: SHAPE[0], : SHAPE[1]]


@pytest.mark.parametrize("outermost", [False, True], ids=["any dimension", "the outermost dimension"])
def test_every_change_of_layout_keeps_the_value(outermost):
    """All pairs in one program: compiling each by itself would take minutes."""
    axis = Axis(("data",), N, Backend(outermost=outermost))
    pairs = [(a, b) for a in SOURCES for b in TARGETS if (a != Partial("max") or b != P) and a != b]

    def change(*blocks):
        here = dict(zip(SOURCES, (b[0] for b in blocks), strict=True))
        found = [convert(here[a], SHAPE, (a,), (b,), (axis,)) for a, b in pairs]
        return [x[None] for x in found]

    blocks = [jnp.asarray(np.stack([held(a, i) for i in range(N)])) for a in SOURCES]
    over = functools.partial(jax.shard_map, mesh=mesh_of(N), check_vma=False)
    results = jax.jit(over(change, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))(*blocks)
    for (a, b), result in zip(pairs, results, strict=True):
        np.testing.assert_array_equal(joined(np.asarray(result), b), VALUE, f"{a} -> {b}")


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("shape, dim", [((1,), 0), ((2, 1), 1), ((1, 3), 0)], ids=["row", "rows of one", "row of rows"])
def test_a_single_row_goes_to_one_replica_however_it_lies_in_memory(shape, dim, n):
    """A batch of one example: what LAPACK makes lies by columns, padding by rows, and XLA took both for one layout."""
    shape = (*shape, 10 * n)
    source, target = Split(len(shape) - 1), Split(dim, extent=n)
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def cut(x):
        rows = 2 * jnp.broadcast_to(jnp.eye(x.shape[-2]), (*x.shape[:-2], x.shape[-2], x.shape[-2]))
        solved = lax.linalg.triangular_solve(rows, x, left_side=True, lower=True)
        return convert(solved, shape, (source,), (target,), (Axis(("data",), n),))

    def spec(split):
        return PartitionSpec(*(None,) * split.dim, "data")

    mapped = jax.shard_map(cut, mesh=mesh_of(n), in_specs=spec(source), out_specs=spec(target))
    found = np.asarray(jax.jit(mapped)(value)).take(range(shape[dim]), dim)
    np.testing.assert_allclose(found, value / 2, rtol=1e-6)


# -- several axes at once ---------------------------------------------------------------------------------------------

CUBE = tuple(Axis((name,), 2) for name in "zyx")


def lying(*dims):
    return tuple(map(Split, dims))


@pytest.mark.parametrize(
    "source, target, made",
    [
        ((1, 1, 2), (0, 0, 0), [(0, 1), (2,)]),  # rows of a stack go to their owners: z and y at once, then x
        ((0, 0, 0), (1, 1, 2), [(2,), (0, 1)]),  # and back
        ((1, 1, 1), (0, 0, 0), [(0, 1, 2)]),
        ((0, 1, 1), (0, 2, 2), [(1, 2)]),  # z stays
        ((0, 1, 1), (0, 0, 0), [(1, 2)]),  # inside of z, which stays
        ((1, 1, 2), (2, 0, 0), [(1,), (2,), (0,)]),  # whoever is free goes first
    ],
)
def test_axes_that_make_the_same_move_make_it_in_one_all_to_all(source, target, made):
    found = list(moves(lying(*source), lying(*target), (8, 8, 8), CUBE))
    assert [(m.kind, m.axes) for m in found] == [("all-to-all", axes) for axes in made]


@pytest.mark.parametrize(
    "source, target",
    [
        ((0, 1, 1), (1, 1, 2)),  # z would have to go under y
        ((0, 0, 1), (1, 1, 0)),  # z and y under x, or x under them
    ],
)
def test_axes_that_are_in_each_others_way_gather_something(source, target):
    found = list(moves(lying(*source), lying(*target), (8, 8, 8), CUBE))
    assert "all-gather" in {m.kind for m in found}


def test_every_change_of_split_along_three_axes_keeps_the_value():
    shape, layouts = (8, 8, 8), [lying(*dims) for dims in itertools.product(range(3), repeat=3)]
    pairs = [pair for pair in itertools.permutations(layouts, 2) if sum(a != b for a, b in zip(*pair, strict=True)) > 1]
    pairs = pairs[::9]  # compiling all of them would take a minute
    value = np.arange(8.0**3, dtype=np.float32).reshape(shape)

    def change(*blocks):
        return [convert(x, shape, a, b, CUBE) for x, (a, b) in zip(blocks, pairs, strict=True)]

    specs = ([partition_spec(3, pair[i], CUBE) for pair in pairs] for i in (0, 1))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple("zyx"))
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    given, expected = (tuple(s) for s in specs)
    found = jax.jit(over(change, in_specs=given, out_specs=list(expected)))(*[value] * len(pairs))
    for (a, b), x in zip(pairs, found, strict=True):
        np.testing.assert_array_equal(np.asarray(x), value, f"{a} -> {b}")
