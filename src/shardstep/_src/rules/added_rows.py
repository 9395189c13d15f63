"""Add to one row of a stack, in place: what a loop does with a row that it would otherwise stack and add afterwards.

    stack, row, i  ->  stack with  stack[i] + row  in place of  stack[i]

No step contains it and no rule decides it: `planning/added_in_loops.py` puts it into loops, in the layout in which the
sum would have been formed.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Primitive

from .contract import Local

ADDED = Primitive("add_to_row")  # never bound: `add_to_row` is what is emitted
ADDED.multiple_results = True


def add_to_row(local: Local, stack: Any, row: Any, i: Any) -> list[Any]:
    """The row is read and written at one place, so that compilers need no second stack."""
    starts, taken = (i, *[0] * row.ndim), (1, *row.shape)
    nonnegative = [False] * stack.ndim
    held = lax.dynamic_slice(stack, starts, taken, allow_negative_indices=nonnegative)
    sums = held + row.reshape(taken)
    return [lax.dynamic_update_slice(stack, sums, starts, allow_negative_indices=nonnegative)]
