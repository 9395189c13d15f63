"""Products of state with state, by time: whole on every replica, or split inside.

    gram = x x'       x split along the dimension that is summed: each replica has a term, and all add them up
    x gram            gram whole, x split along the other one: each replica makes its part

The wire does not tell which is better: repeating a product sends nothing. Here its work is a cost, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core import compat
from ...core.layout import REPLICATED, VARYING, Array, Placement, Split, divides, is_batch
from ...rules import Decision, Site
from .price import Price
from .rule_queries import localise

_DOT = compat.primitive("dot_general")


def is_product_of_state(site: Site, held: Sequence[Sequence[Placement]]) -> bool:
    """No examples take part, and no value that is a replica's own."""
    mine = (p for placements in held for p in placements)
    return site.primitive is _DOT and not any(p == VARYING or is_batch(p) for p in mine)


def more_splits(options: Sequence[Placement], array: Array, n: int) -> list[Placement]:
    """Any dimension may be split, whoever reads the value otherwise."""
    even = (Split(d) for d in range(array.ndim) if divides(array.shape, Split(d), n))
    return list(dict.fromkeys((*options, *even, REPLICATED)))


def work(site: Site, decision: Decision, price: Price) -> float:
    """Seconds of one replica."""
    local = localise(site, decision)
    return price.product(_DOT, local.params, local.inputs, local.outputs)
