"""Between processes on CPU, a large gradient is scattered in pieces.

gloo sends a block in one message, and large messages are slow: see docs/decisions/003-ring-scatter.md. So a large block
goes around the ring in pieces. Each replica sends what it would send otherwise, (n - 1) / n of the tensor, and in the
plan this remains one reduce-scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..core.layout import Axis


def in_pieces(nbytes: int, axis: Axis) -> bool:
    """Is a block of this size more than one message?"""
    return 0 < axis.backend.message_bytes < nbytes


def scatter_in_pieces(x: jax.Array, dim: int, axis: Axis) -> jax.Array:
    """Reduce-scatter (inside `shard_map`): a sum of one block goes once round the ring, and ends where it belongs."""
    size = x.shape[dim] // axis.size
    here = lax.axis_index(axis.name)

    def term(replica: jax.Array, start: int, length: int) -> jax.Array:
        """This replica's term of what another will keep."""
        return lax.dynamic_slice_in_dim(x, (replica % axis.size) * size + start, length, dim)

    done = []
    for start, length in _cuts(size, x.nbytes // axis.size, axis):
        total = term(here - 1, start, length)
        for hop in range(2, axis.size + 1):
            total = _pass_on(total, axis) + term(here - hop, start, length)
        done.append(total)
    return jnp.concatenate(done, dim)


def _pass_on(x: jax.Array, axis: Axis) -> jax.Array:
    return lax.ppermute(x, axis.name, [(i, (i + 1) % axis.size) for i in range(axis.size)])


def _cuts(size: int, nbytes: int, axis: Axis) -> list[tuple[int, int]]:
    """Start and length of pieces that are one message each, as nearly as whole indices allow."""
    pieces = min(-(-nbytes // axis.backend.message_bytes), size)
    length = -(-size // pieces)
    return [(start, min(length, size - start)) for start in range(0, size, length)]
