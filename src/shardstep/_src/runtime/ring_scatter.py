"""Between processes on CPU, a large gradient is scattered in pieces.

gloo, which joins JAX's CPU processes, sends a block in one message over one TCP connection, and XLA copies the whole
tensor for it first. On a loaded machine a message of 4 MiB took 3.7 ms and one of 8 MiB 22.6 ms. Why is not
established; the likely cause is the kernel's send buffer (`net.ipv4.tcp_wmem`, at most 4 MiB there).

So a large block goes round the ring in pieces below that size. Each replica sends what it would send
otherwise, (n - 1) / n of the tensor, and in the plan this remains one reduce-scatter.

Steps of the transformer of `benchmarks/workloads.py`, scattered by gloo and in pieces, one process a core (2 cores),
JAX 0.12.0.1, 2026-11-16: 2 processes 351 and 346 ms (no difference: 24 steps, overlapping quartiles), 4 processes 644
and 596 ms (12 steps). Gathering the weights in pieces as well was tried and lost (470 ms with 2 processes): what
arrives in pieces is copied once more to be whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..core.layout import Axis

MESSAGE_BYTES = 2 * 1024 * 1024


def in_pieces(nbytes: int, axis: Axis) -> bool:
    """Is a block of so many bytes more than one message?"""
    return 0 < axis.message_bytes < nbytes


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
    pieces = min(-(-nbytes // axis.message_bytes), size)
    length = -(-size // pieces)
    return [(start, min(length, size - start)) for start in range(0, size, length)]
