"""On TPU, a gathered weight is written into the memory of the old one by an operation of its own.

It does nothing, and the compiler must not see that. Why, and by how much: docs/decisions/002-written-in-place.md.
"""

from __future__ import annotations

from itertools import chain

import jax
import jax.numpy as jnp
from jax import lax

from ..core.moves import moves
from ..core.schedule import Schedule, Transfer


def gathered_outputs(schedule: Schedule, least: float) -> frozenset[int]:
    """The outputs of at least this size that leave the step just as an all-gather made them."""
    gathered = {
        (t.var, t.target)
        for bundle in chain.from_iterable(schedule.transfers)
        for t in bundle
        if len(bundle) == 1 and t.array.nbytes >= least and _ends_in_gather(t, schedule)
    }
    leaving = zip(schedule.program.outputs, schedule.outputs, strict=True)
    return frozenset(o for o, left in enumerate(leaving) if left in gathered)


def _ends_in_gather(transfer: Transfer, schedule: Schedule) -> bool:
    """(Floats only: what else is gathered is small. Those that travel in another dtype are converted on arrival.)"""
    array = transfer.array
    if transfer.dtype is not None or transfer.wire is not None or not jnp.issubdtype(array.dtype, jnp.floating):
        return False
    kinds = [m.kind for m in moves(transfer.source, transfer.target, array.shape, schedule.axes)]
    return kinds[-1:] == ["all-gather"]


def rewritten(x: jax.Array) -> jax.Array:
    """The same bits: `x | 0`, with a zero that the compiler takes for anything.

    (Bits, because arithmetic need not keep NaNs and the smallest floats as they are.)
    """
    word = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    zero = lax.optimization_barrier(jnp.zeros((), word))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, word) | zero, x.dtype)
