"""Which replica owns which row of which stack: the longest first, so that no replica waits for another.

    3 rows of A and 3 of B, for 8 replicas      A  0 1 2 . . . . .
                                                B  . . . 0 1 2 . .

A stack has as many *slots* for each replica as it takes to hold all rows. Where rows do not fill them, a replica that
has much to do already gets one row less. What stands in an empty slot is a copy; nobody computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence

Slots = tuple[int | None, ...]  # of a stack: the row in each slot


def balanced(stacks: Sequence[tuple[int, float]], replicas: int) -> tuple[list[Slots], int]:
    """The slots of stacks of so many rows, each row at this cost; and the replica that has most to do."""
    loads = [0.0] * replicas
    apart = _apart(replicas)
    found: dict[int, Slots] = {}
    for i in sorted(range(len(stacks)), key=lambda i: -stacks[i][1]):
        rows, cost = stacks[i]
        every, some = divmod(rows, replicas)
        more = set(sorted(apart, key=loads.__getitem__)[:some])
        for r in more:
            loads[r] += cost
        found[i] = _slots([every + (r in more) for r in range(replicas)])
    return [found[i] for i in range(len(stacks))], max(apart, key=loads.__getitem__)


def _slots(held: Sequence[int]) -> Slots:
    """So many rows for each replica, in order, and empty slots after them."""
    each, slots, row = max(held), list[int | None](), 0
    for rows in held:
        slots += [*range(row, row + rows), *[None] * (each - rows)]
        row += rows
    return tuple(slots)


def _apart(replicas: int) -> list[int]:
    """The replicas, neighbours far from one another: groups of them that own rows together have equally many."""
    bits = max(replicas - 1, 1).bit_length()
    return sorted(range(replicas), key=lambda r: int(f"{r:0{bits}b}"[::-1], 2))
