"""How sums and blocks travel, where the user asked for another way than the collective's own.

A collective that sums adds in the dtype that it sends, in an order of its own. Here the terms themselves are exchanged
(one all-to-all, which sends what a reduce-scatter sends), and the replica that keeps a block adds the terms that it
got for it, in float32. What then is needed whole is gathered: an all-reduce in two halves.

    bfloat16    as they are: no more bytes, and one rounding in place of one for each replica
    int8        in blocks of `BLOCK` elements, each with its own float32 scale: a quarter of float32's bytes

`core/moves.py` prices what `runtime/terms.py` performs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

BLOCK = 128  # elements that share a scale; a row of a TPU's tile
SCALE = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Wire:
    """In which dtype terms and blocks travel, and how terms are added."""

    dtype: Any
    pairs: bool = False  # in pairs, in the order of the replicas (see core/fixed_order.py)

    @property
    def scaled(self) -> bool:
        """Do blocks of elements travel with a scale?"""
        return jnp.issubdtype(self.dtype, jnp.integer)

    def nbytes(self, elements: float) -> float:
        """Of a message with this many elements."""
        if not self.scaled:
            return elements * jnp.dtype(self.dtype).itemsize
        return -(-elements // BLOCK) * (BLOCK + SCALE.itemsize)

    def __str__(self) -> str:
        return f"{jnp.dtype(self.dtype)}{', in pairs' if self.pairs else ''}"
