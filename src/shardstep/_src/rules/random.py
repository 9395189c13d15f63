"""Random primitives: the same stream as the plain program, each replica drawing only its own part of it.

    f(keys: split)                      -> split         a key array is mapped key by key
    bits(key: replicated), split wanted -> split         replica r draws the elements of its own block
    generators that carry one state     -> replicated    element i depends on the draws before it

The second line relies on threefry being a function of a counter: with i the row-major index of an element in the
*whole* draw,

    bits[i] = high ^ low  where  (high, low) = threefry2x32(key, (i >> 32, i & 0xffffffff))

so a block needs no draw but its own, and is equal to that block of the whole draw bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from ..core import compat
from ..core.layout import divides
from .contract import REPLICATED, Block, Decision, Local, Placement, Site, Split, register, replicate, splits
from .elementwise import align

# The generators whose vmap treats every key by itself. `rbg` does so for seeds, splits and folds (they are threefry),
# but a vmap of its draws uses the first key for all of them, as `unsafe_rbg` does for its splits too.
_COUNTER_BASED = frozenset({"threefry2x32"})
_DRAWS_KEY_BY_KEY = _COUNTER_BASED
_DERIVES_KEY_BY_KEY = _COUNTER_BASED | {"rbg"}
_EVERY_GENERATOR = None  # moving keys about does not ask what they are for


def keywise(generators: frozenset[str] | None) -> Callable[[Site, tuple[Placement, ...]], list[Decision] | None]:
    """One key in, one row of results out: the dimensions of the key array come first in operand and result."""

    def rule(site: Site, placements: tuple[Placement, ...]) -> list[Decision] | None:
        if not _key_by_key(site, generators):
            return _one_stream(site, placements)
        if splits(placements):
            return [Decision((s,), (s,)) for s in splits(placements) if s.dim < _key_rank(site)] or None
        want = _want(site)
        sliced = [Decision((want,), (want,))] if want and want.dim < _key_rank(site) else []
        return [*sliced, replicate(site)]

    return rule


def random_bits(site: Site, placements: tuple[Placement, ...]) -> list[Decision] | None:
    """Split keys draw row by row; a replicated key draws a block of what it would have drawn."""
    offers = keywise(_DRAWS_KEY_BY_KEY)(site, placements)
    want = _want(site)
    if offers and not splits(placements) and want and want.dim >= _key_rank(site) and _counts(site, want):
        return [Decision((REPLICATED,), (want,), emit=_draw_block), *offers]
    return offers


def fold_in(site: Site, placements: tuple[Placement, ...]) -> list[Decision] | None:
    """Keys and the data folded into them pair up elementwise; either may be one for all."""
    if not _key_by_key(site, _DERIVES_KEY_BY_KEY):
        return _one_stream(site, placements)
    whole = site.outputs[0].shape
    sliced = [Decision(tuple(align(x.shape, whole, s) for x in site.inputs), (s,)) for s in splits(placements)]
    return sliced or [replicate(site)]


def random_gamma(site: Site, placements: tuple[Placement, ...]) -> list[Decision] | None:
    """A key splits itself over the trailing dimensions of alpha, so only the dimensions of the keys can be split."""
    if not _key_by_key(site, _DRAWS_KEY_BY_KEY):
        return _one_stream(site, placements)
    if splits(placements):
        return [Decision((s, s), (s,)) for s in splits(placements) if s.dim < site.inputs[0].ndim] or None
    return [replicate(site)]


def _one_stream(site: Site, placements: tuple[Placement, ...]) -> list[Decision] | None:
    """Every element depends on the whole shape: all replicas draw everything, and readers slice it for free."""
    return None if splits(placements) else [replicate(site)]


def _key_by_key(site: Site, generators: frozenset[str] | None) -> bool:
    if generators is None:
        return True
    dtypes: list[Any] = [x.dtype for x in site.inputs + site.outputs]
    key = next(dtype for dtype in dtypes if jnp.issubdtype(dtype, jax.dtypes.prng_key))
    return compat.key_impl_name(key) in generators


def _key_rank(site: Site) -> int:
    """Key data, draws and derived keys have their own dimensions after those of the key array."""
    return min(site.inputs[0].ndim, site.outputs[0].ndim)


def _want(site: Site) -> Split | None:
    """The split that readers would like, where it cuts the result evenly."""
    want = site.wants[0] if site.wants else None
    return want if want and divides(site.outputs[0].shape, want, site.n) else None


def _counts(site: Site, want: Split) -> bool:
    """Is element i a function of (key, i) alone, with i in 32 bits? Before threefry was `partitionable` it was not."""
    threefry = _key_by_key(site, _COUNTER_BASED) and jax.threefry_partitionable.value
    draws = math.prod(site.outputs[0].shape[_key_rank(site) :])
    return threefry and want.outer == 1 and draws < 2**32


def _draw_block(local: Local, keys: jax.Array) -> list[jax.Array]:
    """Every key draws the elements of this block, and no others."""
    block, rank = local.outputs[0], keys.ndim
    draws = Block(block.shape[rank:], block.local[rank:], block.offsets[rank:])
    index = lax.expand_dims(_row_major_index(draws), range(rank))
    words = lax.expand_dims(jax.random.key_data(keys), range(rank, rank + len(draws.local)))
    none = lax.full_like(index, 0)  # the high word of the counter
    high, low = threefry2x32_p.bind(words[..., 0], words[..., 1], none, index)
    # threefry2x32 forgets over which mesh axes its operands vary; `none` remembers
    return [_word(high | none, low | none, local.params["bit_width"])]


def _row_major_index(block: Block) -> jax.Array:
    """Where each element of the block stands in the whole value, counted row by row."""
    index = jnp.zeros(block.local, jnp.uint32)
    for d, offset in enumerate(block.offsets):
        stride = math.prod(block.shape[d + 1 :])
        here = lax.broadcasted_iota(jnp.uint32, block.local, d) + jnp.asarray(offset, jnp.uint32)
        index = index + here * jnp.uint32(stride)
    return index


def _word(high: jax.Array, low: jax.Array, bit_width: int) -> jax.Array:
    """Two words of 32 bits as one of `bit_width`."""
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width == 64:
        return high.astype(dtype) << jnp.asarray(32, dtype) | low.astype(dtype)
    return (high ^ low).astype(dtype)


_P = compat.primitives

register(random_bits, *_P("random_bits"))
register(keywise(_DERIVES_KEY_BY_KEY), *_P("random_seed random_split"))
register(keywise(_EVERY_GENERATOR), *_P("random_clone random_unwrap random_wrap"))
register(fold_in, *_P("random_fold_in"))
register(random_gamma, *_P("random_gamma"))
register(_one_stream, *_P("iota_2x32_shape rng_bit_generator rng_uniform"))
