"""Contractions: every primitive whose dimensions can be named like the indices of an einsum.

Splitting one *index* cuts every operand that has it; operands without it stay whole. What becomes of the
result is read off the einsum:

    bik,bkj->bij    b split   -> split       a batch of small products
    ik,kj->ij       i split   -> split       x: batch meets W: replicated
    ik,kj->ij       k split   -> partial     the sum over k is cut into n terms: the weight gradient
    ik,kj->ij       i, j both -> i or j      one of the two is gathered; if only one is of the batch, that one stays
    f(partial, y)             -> partial     f is linear in each factor: sum_i f(x_i, y) = f(sum_i x_i, y)

Examples may also *visit* split weights: every replica multiplies all of them with its part of the weight, and what they
come back with goes home. Where a replica has few examples, that moves less than the weight:

    ik,kj->ij    i of the batch, j of the state    x is gathered; the result comes with j split, home is i
    ik,kj->ij    i of the batch, k of the state    x comes with k split; the terms of the result are added at home
    ik,ij->kj    i of the batch, j wanted          the weight gradient is made where it is wanted, and never moves

`by_index` turns such a list of indices into a rule. Reductions, pooling, Fourier transforms and per-example linear
algebra are lists of indices too; they are in `reduction.py` and `linalg.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core import compat
from ..core.schedule import Visit
from .contract import REPLICATED, Decision, Partial, Placement, Rule, Site, Split, register, replicate, splits


@dataclass(frozen=True)
class Index:
    """One index of an einsum: where it sits in each operand and each result (None: it does not occur there).

    A place is a split: `Split(d)` when the index is dimension d, `Split(d, outer=g)` when dimension d holds a
    pair (g, index) in row-major order. `counted_by` names the parameter that holds the size of this index.
    """

    size: int
    operands: tuple[Split | None, ...]
    results: tuple[Split | None, ...]
    counted_by: str | None = None

    def outer(self, operand: int, split: Split, n: int) -> int | None:
        """The `k` for which this split of the operand reads the index as (k, rest) and cuts rest in n; or None."""
        return self._outer(self.operands[operand], split, n)

    def wanted(self, result: int, split: Split, n: int) -> int | None:
        """The same for a result."""
        return self._outer(self.results[result], split, n)

    def _outer(self, place: Split | None, split: Split, n: int) -> int | None:
        if place is None or place.dim != split.dim or split.outer % place.outer:
            return None
        if split.extent:  # padding is at the end of a dimension, so the index must be all of it, everywhere
            alone = all(p is None or p.outer == 1 for p in self.operands + self.results)
            return 1 if alone and not self.counted_by else None
        k = split.outer // place.outer
        return k if self.size > 0 and self.size % (k * n) == 0 else None

    def split(self, site: Site, k: int, op: str, batch: bool = False, extent: int = 0) -> Decision:
        """Cut this index; a result that lacks it was reduced over it, so each replica has one term."""

        def cut(place: Split | None, otherwise: Placement) -> Placement:
            return otherwise if place is None else Split(place.dim, place.outer * k, batch, extent=extent)

        reduced = extent and None in self.results
        return Decision(
            tuple(cut(place, REPLICATED) for place in self.operands),
            tuple(cut(place, Partial(op)) for place in self.results),
            {**site.params, self.counted_by: site.params[self.counted_by] // site.n} if self.counted_by else None,
            fill=tuple(None if place is None else op for place in self.operands) if reduced else (),
        )


@dataclass(frozen=True)
class ByIndex:
    """The rule of a primitive that treats each of its `indices` independently of the others.

    The primitive reduces with `op` over the indices that its results lack, and commutes with `op` in each operand
    of `linear`. Dimensions that hold no index (they are mixed by something other than `op`) cannot stay split.
    """

    indices: Callable[[Site], Iterable[Index]]
    linear: tuple[int, ...] = ()
    op: str = "add"

    def __call__(self, site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision] | None:
        op, found = self.op, list(self.indices(site))
        followed = _follow(site, placements, found, op)
        if splits(placements) and not followed:
            return None
        if _has_batch(placements):
            # the batch is never gathered to keep a sum open
            return [*followed, *(_visits(site, placements, found, op) if followed else ())]
        deferred = [i for i in self.linear if placements[i] == Partial(op)]
        offers = [*followed, *(_defer(site, i, op) for i in deferred)]
        if len(deferred) > 1:  # a product of sums: scatter both along an index they share
            offers += [index.split(site, 1, op) for index in found if _shared(index, deferred, site.n)]
        return offers if followed else [*offers, replicate(site)]


def by_index(indices: Callable[[Site], Iterable[Index]], linear: Sequence[int] = (), op: str = "add") -> Rule:
    """A list of indices as a rule: see `ByIndex`."""
    return ByIndex(indices, tuple(linear), op)


def _has_batch(placements: Sequence[Placement]) -> bool:
    return any(split.batch for split in splits(placements))


def _follow(site: Site, placements: Sequence[Placement], indices: list[Index], op: str) -> list[Decision]:
    """One decision for each index that some operand is split on. Where batch and state meet, the state yields."""
    batch = _has_batch(placements)
    decisions = [
        index.split(site, k, op, batch, split.extent)
        for i, split in enumerate(placements)
        if isinstance(split, Split) and split.batch == batch
        for index in indices
        if (k := index.outer(i, split, site.n))
    ]
    return list({(d.operands, d.results): d for d in decisions}.values())


def _visits(site: Site, placements: Sequence[Placement], indices: list[Index], op: str) -> Iterator[Decision]:
    """The examples go to where the weight is, or to where its gradient is wanted."""
    homes = _follow(site, placements, indices, op)[0].results
    state = [(i, p) for i, p in enumerate(placements) if isinstance(p, Split) and not p.batch]
    if not any(isinstance(home, Partial) for home in homes):
        cuts = [(index, split, index.outer(i, split, site.n)) for i, split in state for index in indices]
        visit = Visit(homes, on_trial=True)
    else:
        wanted = [split for split in site.wants[:1] if split is not None and not split.batch and not state]
        cuts = [(index, split, index.wanted(0, split, site.n)) for split in wanted for index in indices]
        visit = Visit(on_trial=True)
    for index, split, k in cuts:
        if k:
            yield replace(index.split(site, k, op, extent=split.extent), visit=visit)


def _defer(site: Site, operand: int, op: str) -> Decision:
    """Leave the reduction of one operand for later: the results are terms of the same reduction."""
    whole = replicate(site)
    operands = tuple(Partial(op) if i == operand else p for i, p in enumerate(whole.operands))
    return Decision(operands, (Partial(op),) * len(whole.results))


def _shared(index: Index, operands: Sequence[int], n: int) -> bool:
    return all((place := index.operands[i]) and index.outer(i, place, n) for i in operands)


def _dot_general(site: Site) -> Iterator[Index]:
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = site.dimension_numbers
    lhs, rhs = site.inputs
    lhs_free = [d for d in range(lhs.ndim) if d not in (*lhs_summed, *lhs_batch)]
    rhs_free = [d for d in range(rhs.ndim) if d not in (*rhs_summed, *rhs_batch)]
    result = map(Split, range(site.outputs[0].ndim))  # batch dimensions first, then those of lhs, then those of rhs
    for i, j in zip(lhs_batch, rhs_batch, strict=True):
        yield Index(lhs.shape[i], (Split(i), Split(j)), (next(result),))
    for i in lhs_free:
        yield Index(lhs.shape[i], (Split(i), None), (next(result),))
    for j in rhs_free:
        yield Index(rhs.shape[j], (None, Split(j)), (next(result),))
    for i, j in zip(lhs_summed, rhs_summed, strict=True):
        yield Index(lhs.shape[i], (Split(i), Split(j)), (None,))


def _conv_general_dilated(site: Site) -> Iterator[Index]:
    """A convolution is an einsum over everything but space, with groups as its batch index:

        features grouped    lhs[n, (g, c)]   rhs[(g, o), c]  ->  result[n, (g, o)]
        batch grouped       lhs[(g, n), c]   rhs[(g, o), c]  ->  result[n, (g, o)]

    Forward, the examples are n. The weight gradient is a convolution too, with the examples at c: contracted
    even if the forward features were grouped, since JAX exchanges the two groupings when it transposes.
    """
    (lhs_n, lhs_c, *lhs_space), (rhs_o, rhs_c, *rhs_space), (out_n, out_o, *out_space) = site.dimension_numbers
    lhs, rhs = (x.shape for x in site.inputs)
    by_feature, by_batch = site.feature_group_count, site.batch_group_count  # at least one of them is 1
    groups = by_feature * by_batch
    group = Split(lhs_c) if by_feature > 1 else Split(lhs_n)
    count = "feature_group_count" if by_feature > 1 else "batch_group_count"
    yield Index(lhs[lhs_n] // by_batch, (Split(lhs_n, by_batch), None), (Split(out_n),))
    yield Index(lhs[lhs_c] // by_feature, (Split(lhs_c, by_feature), Split(rhs_c)), (None,))
    yield Index(rhs[rhs_o] // groups, (None, Split(rhs_o, groups)), (Split(out_o, groups),))
    yield Index(groups, (group, Split(rhs_o)), (Split(out_o),), counted_by=count)
    for axis, (i, j, k) in enumerate(zip(lhs_space, rhs_space, out_space, strict=True)):
        if rhs[j] == 1 and _unmoved(site, axis):  # a 1x1 convolution reads one place only
            yield Index(lhs[i], (Split(i), None), (Split(k),))


def _unmoved(site: Site, axis: int) -> bool:
    """Along this axis of space, is place i of the result computed around place i of the operand?"""
    strided = site.window_strides[axis] != 1 or site.lhs_dilation[axis] != 1
    return not strided and tuple(site.padding[axis]) == (0, 0)


def _ragged_dot_general(site: Site) -> Iterator[Index]:
    """Which rows meet which expert is only known at run time: no index is independent of the others."""
    return iter(())


_P = compat.primitives

register(by_index(_dot_general, linear=(0, 1)), *_P("dot_general"))
register(by_index(_conv_general_dilated, linear=(0, 1)), *_P("conv_general_dilated"))
register(by_index(_ragged_dot_general, linear=(0, 1)), *_P("ragged_dot_general"))
