"""On TPU, a gathered weight is written into the memory of the old one by an operation of its own.

A step that donates its state returns a weight in the buffer that the old weight came in. The TPU's compiler lets no
all-gather write there: it copies the old weight out of the buffer when the step begins, and the gathered one into it
when the step ends, and has room for both. An operation between the gather and the result may write there, and then
one pass over the weight is left, and no copy of the old one. It has to do nothing, and the compiler must not see that
it does.

Thousands of estimated cycles and MB of temporaries, without and with it (libtpu 0.0.50, Adam, four weights):

    v3:4x4, 4 MiB each       314, 29     235,  6        v5e:4x4, 32 MiB each     528,  70    1057,  20
    v3:4x4, 16 MiB          1151, 115    847, 23        v5e:4x4, 64 MiB         2965, 270    2648, 154
    v4:2x2x4, 16 MiB         890, 34     715, 18        v5e:4x4, 128 MiB        8886, 675    6436, 609
    v5p:4x4x4, 2 MiB          89, 11      81,  4        v6e:4x4, 32 MiB          502, 137     524,  36
    v5p:4x4x4, 16 MiB        345, 89     308, 23        v6e:4x4, 64 MiB         1669, 339    1046,   3

v5e and v6e have so much memory near the core that smaller weights are gathered there and sent on from there, which
costs no cycles.
"""

from __future__ import annotations

from itertools import chain

import jax
import jax.numpy as jnp
from jax import lax

from ..core.moves import moves
from ..core.schedule import Schedule, Transfer


def gathered_outputs(schedule: Schedule, least: float) -> frozenset[int]:
    """The outputs of at least so many bytes that leave the step as an all-gather made them."""
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
    if transfer.dtype is not None or not jnp.issubdtype(array.dtype, jnp.floating):
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
