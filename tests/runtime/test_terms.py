"""Sums whose terms are exchanged, and 8-bit blocks: what arrives, and how far it is from an exact sum."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from launch import WORKERS
from steps import mesh_of

from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Axis, Split
from shardstep._src.core.moves import priced_moves, sent, sized_moves
from shardstep._src.core.program import Var
from shardstep._src.core.schedule import Transfer
from shardstep._src.core.wire import BLOCK, Wire
from shardstep._src.runtime.packing import transfer

N = 4
INT8, BF16 = Wire(np.dtype(np.int8)), Wire(jnp.dtype(jnp.bfloat16))


def moved(bundle, *held, widens=False):
    """What each replica holds of the bundle's values after the transfer, from what each holds before."""
    axis = Axis(("data",), N, Backend(widens=widens))

    def change(*blocks):
        return [x[None] for x in transfer([b[0] for b in blocks], bundle, (axis,))]

    over = functools.partial(jax.shard_map, mesh=mesh_of(N), check_vma=True)
    run = jax.jit(over(change, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")))
    return [np.asarray(x) for x in run(*map(jnp.asarray, held))]


def changed(shape, source, target, wire, dtype=jnp.float32):
    return Transfer(Var(Array(shape, jnp.dtype(dtype))), (source,), (target,), wire=wire)


# -- against a float64 sum --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[8, pytest.param(64, marks=pytest.mark.slow)])
def sums(request):
    done = subprocess.run(
        [sys.executable, WORKERS / "sums.py", str(request.param)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(done.stdout)


def test_gradients_added_in_float32_are_the_exact_sum_rounded_once(sums):
    """bf16 gradients: what float64 and one rounding give, to the bit; added in bf16 they are off by far more."""
    _, found = sums
    for leaf in found["reduce"]["leaves"]:
        assert leaf["differing"] == 0 and leaf["error"] == leaf["rounding"] > 0
        assert leaf["in order"] > 2 * leaf["error"]


def test_they_send_what_bfloat16_sums_send(sums):
    n, found = sums
    held = sum(rows * columns for rows, columns in ((512, 128), (384, 131 if 384 % n == 0 else 0)))
    (scattered,) = (b for kind, dtype, b in found["reduce"]["sent"] if kind == "all-to-all" and b > 1000)
    assert scattered == round((n - 1) / n * 2 * held)  # a reduce-scatter in bfloat16
    assert {dtype for _, dtype, b in found["reduce"]["sent"]} == {"bfloat16"}


def test_terms_are_rounded_and_their_sum_is_not(sums):
    """`reduce_dtype=bfloat16` beside `reduce="float32"`: float32 gradients in half the bytes."""
    n, found = sums
    for leaf in found["narrow"]["leaves"]:
        assert 0 < leaf["error"] <= n * leaf["largest term"] * 2**-9


def test_eight_bits_are_as_exact_as_their_blocks(sums):
    """Half a step of each term's scale at most; what is small travels as it is."""
    n, found = sums
    for leaf, (rows, columns) in zip(found["int8"]["leaves"], ((512, 128), (384, 131), (7, 5)), strict=True):
        if rows * columns < n * 8 * BLOCK:
            assert leaf["exact"]
        else:
            assert 0 < leaf["error"] <= n * leaf["largest term"] / 254 * 1.01
    exact = next(b for kind, dtype, b in found["plain"]["sent"] if kind == "reduce-scatter" and dtype == "float32")
    if n == 8:  # all large leaves, in a quarter of the bytes and a scale for each block
        assert sum(b for _, dtype, b in found["int8"]["sent"] if dtype == "int8") <= exact * (1 / 4 + 1 / BLOCK) + 1000


# -- what is moved ----------------------------------------------------------------------------------------------------

SHAPE = (32, 3 * BLOCK)
TERMS = np.random.default_rng(0).normal(size=(N, *SHAPE)).astype(np.float32)


@pytest.mark.parametrize("widens", [False, True], ids=["16-bit floats", "their bits"])
@pytest.mark.parametrize("target", [Split(0), Split(1), Split(0, 2), Split(0, extent=36), REPLICATED], ids=str)
@pytest.mark.parametrize("wire", [BF16, INT8], ids=str)
def test_sums(wire, target, widens):
    (got,) = moved((changed(SHAPE, PARTIAL, target, wire),), TERMS, widens=widens)
    exact = TERMS.sum(0)
    room = np.pad(exact, ((0, 4 if getattr(target, "extent", 0) else 0), (0, 0)))
    tolerance = N * np.abs(TERMS).max() * (2**-9 if wire is BF16 else 1 / 254) * (2 if target == REPLICATED else 1)
    for r in range(N):
        expected = room
        if isinstance(target, Split):
            seen = room.reshape(*room.shape[: target.dim], target.outer, N, -1, *room.shape[target.dim + 1 :])
            expected = seen.take(r, target.dim + 1).reshape(got[r].shape)
        np.testing.assert_allclose(got[r], expected, atol=tolerance, rtol=0)
        assert target != REPLICATED or np.array_equal(got[r], got[0])


@pytest.mark.parametrize("kind", ["sums", "whole sums", "gathers"])
def test_small_tensors_share_a_message(kind):
    """Packed or alone, the same values and the same bytes."""
    shapes = [(32, 64), (16, 16), (8, 128)]
    source, target = {
        "sums": (PARTIAL, Split(0)),
        "whole sums": (PARTIAL, REPLICATED),
        "gathers": (Split(0), REPLICATED),
    }[kind]
    rng = np.random.default_rng(1)
    local = [s if source == PARTIAL else (s[0] // N, *s[1:]) for s in shapes]
    held = [rng.integers(-127, 128, (N, *s)).astype(np.float32) for s in local]
    for h in held:
        h.reshape(N, -1)[:, ::32] = 127  # every block has the scale 1: nothing is lost
    bundle = tuple(changed(s, source, target, INT8) for s in shapes)
    together = moved(bundle, *held)
    alone = [moved((t,), h)[0] for t, h in zip(bundle, held, strict=True)]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a, b) if kind != "whole sums" else np.testing.assert_allclose(a, b, atol=4)


@pytest.mark.parametrize("dim, extent", [(0, 32), (1, 136)])
def test_padding_is_not_felt(dim, extent):
    """Padding may hold anything, also where an element shares a scale with it."""
    shape = (30, 134)
    value = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    room = [(0, extent - shape[d] if d == dim else 0) for d in range(2)]
    full = np.pad(value, room, constant_values=np.nan)
    blocks = np.stack(np.split(full, N, dim))
    (got,) = moved((changed(shape, Split(dim, extent=extent), REPLICATED, INT8),), blocks)
    np.testing.assert_allclose(got[0], value, atol=np.abs(value).max() / 254 * 1.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_still_seen(bad):
    """A step that scales its loss looks for overflow in its gradients."""
    terms = TERMS.copy()
    terms[1, 5, 7] = bad
    (got,) = moved((changed(SHAPE, PARTIAL, Split(0), INT8),), terms)
    assert not np.isfinite(got[0][5, 7])
    far = got[2]
    assert np.isfinite(far).all()  # other blocks


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_blocks(value):
    terms = np.zeros_like(TERMS)
    terms[0] = value
    (got,) = moved((changed(SHAPE, PARTIAL, Split(0), INT8),), terms)
    np.testing.assert_allclose(got, np.full(got.shape, np.float32(value)), rtol=1e-2, atol=1.2e-38)


def test_nothing_else_is_rounded():
    """Slices and all-to-alls of whole values, sums by maximum: as without a wire."""
    value = TERMS[0]
    for source, target in ((REPLICATED, Split(0)), (Split(0), Split(1))):
        held = np.stack([value] * N) if source == REPLICATED else np.stack(np.split(value, N, 0))
        (got,) = moved((changed(SHAPE, source, target, INT8),), held)
        np.testing.assert_array_equal(got, np.stack(np.split(value, N, target.dim)))
    bf16 = changed(SHAPE, Split(0), REPLICATED, BF16)
    np.testing.assert_array_equal(moved((bf16,), np.stack(np.split(value, N, 0)))[0][0], value)


@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("target", [Split(0), REPLICATED], ids=str)
def test_terms_in_bfloat16_cost_what_their_sum_costs(n, target):
    array, axes = Array((128, 64), jnp.dtype(jnp.bfloat16)), (Axis(("data",), n),)
    ours = sized_moves((PARTIAL,), (target,), array.shape, axes, BF16)
    found = [s for move, held in ours for s in sent(move, held, array.dtype, axes[0])]
    summed = sum(b for _, b in priced_moves((PARTIAL,), (target,), array, axes))
    assert sum(s.bytes for s in found) == summed
    assert [s.kind for s in found] == ["all-to-all", "all-gather"][: 1 if target == Split(0) else 2]
