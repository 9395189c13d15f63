"""What may be asked of the rules: which decisions are right here, and which split of an operand leads where."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...core.layout import REPLICATED, VARYING, Array, Partial, Placement, Split, cut, divides, is_padded, local_shape
from ...core.pieces import STACKED
from ...rules import Decision, Site, replicate, rule_for
from ...rules.contract import minds_padding, speaks_of_replicas


def localise(site: Site, decision: Decision) -> Site:
    """The equation that the next axis sees."""
    inputs = tuple(
        Array(local_shape(a.shape, p, site.n), a.dtype) for a, p in zip(site.inputs, decision.operands, strict=True)
    )
    outputs = tuple(
        Array(local_shape(a.shape, p, site.n), a.dtype) for a, p in zip(site.outputs, decision.results, strict=True)
    )
    params = site.params if decision.params is None else decision.params
    return Site(site.primitive, params, inputs, outputs, 1)


def valid_decisions(site: Site, placements: tuple[Placement, ...]) -> Iterator[Decision]:
    """The decisions that are right for these placements and cut every value evenly.

    A split that the axes before leave nothing to cut for (they hold the value whole, and it divides only their block)
    is none that a rule could keep: the value is offered whole.
    """
    placements = tuple(
        REPLICATED if isinstance(p, Split) and not divides(a.shape, p, site.n) else p
        for a, p in zip(site.inputs, placements, strict=True)
    )
    if VARYING in placements and not speaks_of_replicas(site.primitive):
        # a replica's own value: the equation runs on each replica, as the user wrote it
        operands = tuple(VARYING if p == VARYING else REPLICATED for p in placements)
        yield Decision(operands, (VARYING,) * len(site.outputs))
        return
    rule = rule_for(site.primitive)
    if all(p == REPLICATED for p in placements) and not speaks_of_replicas(site.primitive):
        yield replicate(site)
        if not any(site.wants):
            return
    if any(map(is_padded, placements)) and not minds_padding(site.primitive):
        return
    offered = zip(site.inputs, placements, strict=True)
    if any(isinstance(p, Split) and not divides(a.shape, p, site.n) for a, p in offered):
        return  # another axis has cut this dimension already, and left too little
    found = rule(site, placements) if rule else None
    if found is None:
        return
    for decision in [found] if isinstance(found, Decision) else found:
        pairs = zip(site.inputs + site.outputs, decision.operands + decision.results, strict=True)
        if all(not isinstance(p, Split) or divides(a.shape, p, site.n) for a, p in pairs):
            yield decision


def nests(outer: Sequence[Decision], inner: Decision) -> bool:
    """May an axis decide so after these?

    Where an outer axis pads a dimension, the padding is at the end of the last block, and a replica finds it by its
    block's first index. A split with an `outer` factor takes rows from all over a block: its first index says nothing.
    Nor may a block be padded once more: its padding would lie between examples.
    """
    return not any(
        isinstance(p, Split) and isinstance(q, Split) and q.dim == p.dim and (p.extent or (p.outer > 1 and q.extent))
        for decision in outer
        for p, q in zip(inner.operands + inner.results, decision.operands + decision.results, strict=True)
    )


def after(outer: Sequence[Decision], i: int, placement: Placement, site: Site) -> Placement:
    """Operand i as it is offered to an axis after these: their block is cut as it is, or not at all."""
    if not isinstance(placement, Split) or not placement.extent:
        return placement
    if not any(isinstance(q := decision.operands[i], Split) and q.dim == placement.dim for decision in outer):
        return placement
    even = replace(placement, extent=0)
    return even if divides(site.inputs[i].shape, even, site.n) else REPLICATED


def combinations(options: list[list[Placement]]) -> Iterator[tuple[Placement, ...]]:
    """Every way to offer the operands; with many operands, those that change one or all of them."""
    if math.prod(map(len, options)) <= 32:
        yield from itertools.product(*options)
        return
    home = tuple(o[0] for o in options)
    yield home
    yield tuple(o[-1] for o in options)
    for i, choices in enumerate(options):
        for choice in choices[1:]:
            yield (*home[:i], choice, *home[i + 1 :])


def work(site: Site, decision: Decision) -> float:
    """Elements touched per replica: of two right answers that move the same bytes, take the smaller."""
    pairs = zip(site.inputs + site.outputs, decision.operands + decision.results, strict=True)
    return sum(a.size / (site.n if isinstance(p, Split) else 1) for a, p in pairs)


def repeated(site: Site, decision: Decision) -> float:
    """Seconds per replica for a stack of equal work."""
    if site.primitive is not STACKED:
        return 0.0
    owned = any(isinstance(p, Split) for p in decision.operands)
    return site.piece.worth * site.piece.done(site.outputs[0].shape[0] // (site.n if owned else 1))


def trial_for(site: Site, r: int, split: Split) -> Decision | None:
    """Which splits of the operands make result r come out as `split`?"""
    for i in sorted(range(len(site.inputs)), key=lambda i: -site.inputs[i].size):
        ndim = site.inputs[i].ndim
        for dim in sorted(range(ndim), key=lambda d: d != split.dim):
            for outer in dict.fromkeys((1, split.outer)):
                tried = split.on(dim, outer)
                same = site.inputs[i].shape[dim] == site.outputs[r].shape[split.dim]  # padding suits one size only
                if divides(site.inputs[i].shape, tried, site.n) and (same or not split.extent):
                    placements = tuple(tried if j == i else REPLICATED for j in range(len(site.inputs)))
                    for decision in valid_decisions(site, placements):
                        if decision.results[r] == split and decision.operands[i] == tried:
                            return decision
    return None


def carried(site: Site, r: int) -> list[int]:
    """The operands that pass a split on to result r: a reader that wants r whole wants them whole."""
    return [i for i in range(len(site.inputs)) if _some_split(site, i, lambda d: isinstance(d.results[r], Split))]


def condensed(site: Site) -> list[int]:
    """The operands that a sum makes small: any split of them will do, since what is left to reduce is little."""
    largest = max((a.size for a in site.outputs), default=0)
    return [
        i
        for i, array in enumerate(site.inputs)
        if array.size >= 16 * largest and _some_split(site, i, lambda d: all(isinstance(p, Partial) for p in d.results))
    ]


def _some_split(site: Site, i: int, accept: Callable[[Decision], bool]) -> bool:
    """Is there a split of operand i (all others replicated) for which the rule offers an acceptable decision?"""
    for dim in range(site.inputs[i].ndim):
        tried = cut(site.inputs[i].shape, dim, site.n)
        if divides(site.inputs[i].shape, tried, site.n):
            placements = tuple(tried if j == i else REPLICATED for j in range(len(site.inputs)))
            if any(d.operands[i] == tried and accept(d) for d in valid_decisions(site, placements)):
                return True
    return False
