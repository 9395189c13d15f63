"""Sums and gathers whose terms and blocks travel as `core/wire.py` says (inside `shard_map`).

Each replica sends every other the terms of the block that the other keeps, and adds what it got for its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..core.layout import Axis
from ..core.wire import BLOCK, SCALE, Wire


def scatter_terms(blocks: jax.Array, wire: Wire, axis: Axis) -> jax.Array:
    """The sum over the replicas of what each has for this one: `blocks[r]` is a replica's term for replica r."""
    n, *block = blocks.shape
    sent = _encoded(blocks, wire, axis)
    got = lax.all_to_all(sent, axis.name, split_axis=0, concat_axis=0, tiled=True)
    terms = _decoded(got, (n, *block), wire, axis)
    if wire.pairs:
        return in_pairs([t.astype(blocks.dtype) for t in terms])
    return jnp.sum(terms, axis=0).astype(blocks.dtype)


def gather_row(x: jax.Array, wire: Wire, axis: Axis) -> jax.Array:
    """One row for each replica, the same on all of them."""
    sent = _encoded(x[None], wire, axis)
    got = lax.all_gather(sent, axis.name, axis=0, tiled=True, to="invarying")
    return _decoded(got, (axis.size, *x.shape), wire, axis).astype(x.dtype)


def in_pairs(terms: Sequence[jax.Array]) -> jax.Array:
    """Neighbours first, then the sums of neighbours: of a power of two. Each sum is rounded to its dtype."""
    terms = [_rounded(t) for t in terms]
    while len(terms) > 1:
        terms = [_rounded(a + b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _rounded(x: jax.Array) -> jax.Array:
    """XLA may carry 16-bit floats in 32 bits from one operation to the next, and does so where it fuses the two."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def reduce_terms(x: jax.Array, wire: Wire, axis: Axis) -> jax.Array:
    """The sum over the replicas, whole: each adds a part of it, and all gather the parts."""
    flat = x.ravel()
    flat = jnp.pad(flat, (0, -flat.size % axis.size))
    parts = scatter_terms(flat.reshape(axis.size, -1), wire, axis)
    return gather_row(parts, wire, axis).ravel()[: x.size].reshape(x.shape)


def _encoded(x: jax.Array, wire: Wire, axis: Axis) -> jax.Array:
    """Rows as they travel. (XLA's CPU backend widens 16-bit floats whatever it does with them, integers not.)"""
    if wire.scaled:
        return _scaled(x)
    narrow = x.astype(wire.dtype)
    bits = axis.backend.widens and narrow.dtype.itemsize == 2
    return lax.bitcast_convert_type(narrow, jnp.uint16) if bits else narrow


def _decoded(got: jax.Array, shape: tuple[int, ...], wire: Wire, axis: Axis) -> jax.Array:
    """The rows again, in float32."""
    if wire.scaled:
        return _unscaled(got, shape)
    arrived = got if got.dtype == wire.dtype else lax.bitcast_convert_type(got, wire.dtype)
    return arrived if wire.pairs else arrived.astype(jnp.float32)


def _scaled(x: jax.Array) -> jax.Array:
    """Rows of bytes: 8 bits for each element, then the bytes of the scales.

    The largest element of a block becomes 127. A block with an element that is not finite arrives as NaN, so that a
    step that looks for overflow still finds it. (That is asked for outright: XLA's maximum may pass over a NaN.)
    """
    rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
    blocks = rows.reshape(rows.shape[0], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=2)
    scales = jnp.where(jnp.all(jnp.isfinite(blocks), axis=2), largest / 127, jnp.nan)
    steps = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    eighths = jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8).reshape(rows.shape)
    told = lax.bitcast_convert_type(scales.astype(SCALE), jnp.int8).reshape(rows.shape[0], -1)
    return jnp.concatenate([eighths, told], axis=1)


def _unscaled(got: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    n, nbytes = got.shape
    held = nbytes * BLOCK // (BLOCK + SCALE.itemsize)
    scales = lax.bitcast_convert_type(got[:, held:].reshape(n, -1, SCALE.itemsize), SCALE)
    rows = got[:, :held].reshape(n, -1, BLOCK).astype(jnp.float32) * scales[..., None]
    return rows.reshape(n, -1)[:, : math.prod(shape[1:])].reshape(shape)
