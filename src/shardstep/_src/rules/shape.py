"""Shape primitives: elements move, none is computed.

An array is one row of elements, and a split of it is a way to read that row: as `(outer, n, inner)`, of which
replica i holds `[:, i, :]`. A reshape does not touch the row, so whatever dimension the `n` falls into is split:

    (T, B) -> (T*B)     B split  ->  split(0, outer=T)          and back again
    (B, T) -> (B*T)     B split  ->  split(0)                   the major part of a merged dimension
    (H*D) -> (H, D)     split    ->  split(0) where n divides H

The others rename dimensions, and touch the split one or not:

    transpose, squeeze, stack, ...   the split follows its dimension
    unstack, split along its rows    cut along a dimension of the rows first: one all-to-all for all of them
    pad, slice, rev, concatenate     the split stays on dimensions that are left whole
    broadcast, iota, empty           new dimensions are split where their readers want them so
    any of them, of a partial        moving elements commutes with the sum (max, min): still partial
    identities                       every operand keeps what it has
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..core import compat
from ..core.layout import divides
from ..core.user_shardings import hint
from .contract import (
    PARTIAL,
    REPLICATED,
    Decision,
    Local,
    Placement,
    Rule,
    Site,
    Split,
    partials,
    register,
    replicate,
    splits,
)

# Where a split of the operands lands in the results; None: nowhere.
Carry = Callable[[Site, Split], Split | None]


def movement(carry: Carry, sizes: str | None = None, copies: bool = False) -> Rule:
    """The rule of a primitive that only moves elements.

    `sizes` names the parameter that spells out the size of each result dimension and must become local. What
    `copies` its operand lets a partial be reduced first, while it is small.
    """

    def rule(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision] | Decision | None:
        if found := splits(placements):
            return [_split(site, s, landed, sizes) for s in found if (landed := _land(carry, site, s))] or None
        return replicate(site) if copies and _grows(site) else jointly(site, placements)

    return rule


def _land(carry: Carry, site: Site, split: Split) -> Split | None:
    landed = carry(site, split)
    return landed if landed and all(divides(x.shape, landed, site.n) for x in site.outputs) else None


def _split(site: Site, split: Split, landed: Split, sizes: str | None) -> Decision:
    operands = tuple(split if x.shape else REPLICATED for x in site.inputs)  # pad's value is a scalar
    params = site.with_params(**{sizes: site.local(site.params[sizes], landed)}) if sizes else None
    return Decision(operands, (landed,) * len(site.outputs), params)


def jointly(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """Moving terms moves their sum; a replicated operand becomes a term that one replica holds."""
    ops = partials(placements)
    if ops == [PARTIAL] or (len(ops) == 1 and placements.count(ops[0]) == len(placements)):
        return Decision((ops[0],) * len(placements), (ops[0],) * len(site.outputs))
    return replicate(site)


def _grows(site: Site) -> bool:
    return site.outputs[0].size > site.inputs[0].size


# ------------------------------------------------ where a split lands -------------------------------------------------


def _reshaped(site: Site, split: Split) -> Split | None:
    """Find the dimension of the result into which the `n` of `(outer, n, inner)` falls."""
    old, new = site.inputs[0].shape, site.outputs[0].shape
    if site.dimensions is not None or 0 in old:
        return None
    if split.extent:
        return _reshaped_with_padding(split, old, new)
    outer = math.prod(old[: split.dim]) * split.outer
    for dim in range(len(new)):
        before = math.prod(new[:dim])
        if outer % before == 0 and new[dim] % (outer // before * site.n) == 0:
            return split.on(dim, outer // before)
    return None


def _reshaped_with_padding(split: Split, old: tuple[int, ...], new: tuple[int, ...]) -> Split | None:
    """`(B, T) -> (B*T)`: padded rows stay whole, so a dimension that starts where the split one does may hold them."""
    row = math.prod(old[split.dim + 1 :])
    for dim in range(len(new)):
        rows, rest = divmod(split.extent * row, math.prod(new[dim + 1 :]))
        if new[dim] > 1 and math.prod(new[:dim]) == math.prod(old[: split.dim]) and not rest:
            return Split(dim, batch=split.batch, extent=rows)
    return None


def reshape(site: Site, placements: tuple[Placement, ...]) -> Decision | Sequence[Decision] | None:
    wanted = site.wants[0] if site.wants else None
    if wanted is not None and wanted.permuted and placements == (Split(0),):
        # each replica makes microbatches of its own examples: for readers that accept any order
        sizes = site.local(site.new_sizes, wanted)
        return Decision(placements, (wanted,), site.with_params(new_sizes=sizes))
    return movement(_reshaped, "new_sizes")(site, placements)


def _transposed(site: Site, split: Split) -> Split:
    return split.on(site.permutation.index(split.dim), split.outer)


def _squeezed(site: Site, split: Split) -> Split | None:
    if split.dim in site.dimensions:  # one row, padded to one for each replica
        return None
    return split.on(split.dim - sum(d < split.dim for d in site.dimensions), split.outer)


def _stacked(site: Site, split: Split) -> Split:
    return split.on(split.dim + (split.dim >= site.axis), split.outer)


def _unstacked(site: Site, split: Split) -> Split | None:
    return None if split.dim == site.axis else split.on(split.dim - (split.dim > site.axis), split.outer)


def _apart(carry: Carry, back: Carry) -> Rule:
    """Rows that lie apart on different replicas are cut another way first, as their readers want them, or gathered.

    `carry` says where a split beside the rows lands, `back` where one of the results comes from.
    """

    def rule(site: Site, placements: tuple[Placement, ...]) -> Decision | Sequence[Decision] | None:
        if not any(s.dim == site.axis and not s.batch for s in splits(placements)):
            return movement(carry)(site, placements)
        free = [Split(d) for d in range(site.outputs[0].ndim)]
        asked = [w for w in dict.fromkeys(site.wants) if w is not None]
        found = [(s, w) for w in (*asked, *free) if (s := back(site, w)) and _land(carry, site, s) == w]
        return [*(_split(site, s, w, None) for s, w in found[: max(len(asked), 1)]), replicate(site)]

    return rule


def _tiled(site: Site, split: Split) -> Split:
    """Copies stand before what they copy: `(reps, outer, n, inner)`."""
    return split.on(split.dim, split.outer * site.reps[split.dim])


def _beside(dims: Callable[[Site], Sequence[int]]) -> Carry:
    """The split stays where it is, unless the primitive works along its dimension."""
    return lambda site, split: None if split.dim in dims(site) else split


def _padded(site: Site) -> list[int]:
    return [d for d, padding in enumerate(site.padding_config) if any(padding)]


def _sliced(site: Site) -> list[int]:
    """A slice that steps over nothing takes its dimension whole."""
    return [
        d for d, (old, new) in enumerate(zip(site.inputs[0].shape, site.outputs[0].shape, strict=True)) if old != new
    ]


# --------------------------------------------------- new dimensions ---------------------------------------------------


def _wanted(site: Site) -> Split | None:
    want = site.wants[0] if site.wants else None
    return want if want and divides(site.outputs[0].shape, want, site.n) else None


def broadcast_in_dim(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision] | Decision | None:
    (operand,), (whole,), dims = site.inputs, site.outputs, site.broadcast_dimensions

    def lands(old: Placement, new: Split) -> Decision:
        return Decision((old,), (new,), site.with_params(shape=site.local(site.shape, new)))

    if found := splits(placements):
        dim = int(dims[found[0].dim])
        if operand.shape[found[0].dim] != whole.shape[dim]:
            return None  # every replica needs copies of the one padded row
        landing = found[0].on(dim, found[0].outer)
        return lands(found[0], landing) if divides(whole.shape, landing, site.n) else None
    if partials(placements) and not _grows(site):
        return jointly(site, placements)
    if (want := _wanted(site)) is None:
        return replicate(site)
    kept = want.dim in dims and operand.shape[dims.index(want.dim)] == whole.shape[want.dim]
    source = want.on(dims.index(want.dim), want.outer) if kept else REPLICATED  # new and size-1 dimensions: copies
    return [lands(source, want), replicate(site)]


def iota(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision] | Decision:
    """Counting starts at the block's own offset."""
    want = _wanted(site)
    if want is None or (want.dim == site.dimension and want.outer > 1):
        return replicate(site)
    params = site.with_params(shape=site.local(site.shape, want))
    return [Decision((), (want,), params, _count_from_offset), replicate(site)]


def _count_from_offset(local: Local) -> list[jax.Array]:
    dim, dtype = local.params["dimension"], local.params["dtype"]
    block = local.outputs[0]
    # count in integers: a low-precision sum of offset and index would round twice
    count = lax.broadcasted_iota(np.int32, block.local, dim) + block.offsets[dim]
    return [lax.convert_element_type(count, dtype)]


def empty(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision] | Decision:
    if (want := _wanted(site)) is None:
        return replicate(site)
    return [Decision((), (want,), site.with_params(shape=site.local(site.shape, want))), replicate(site)]


def scalar(site: Site, placements: tuple[Placement, ...]) -> Decision:
    return replicate(site)


# ----------------------------------------------------- identities -----------------------------------------------------


def identity(site: Site, placements: tuple[Placement, ...]) -> Decision:
    return Decision(placements, placements, emit=_barrier, apart=True)


def _barrier(local: Local, *arrays: Any) -> list[Any]:
    """One barrier for each kind of value (differing between replicas along these axes or those), as JAX's types ask."""
    passed = list(arrays)
    kinds = [compat.varying_axes(x) for x in arrays]
    for kind in dict.fromkeys(kinds):
        members = [i for i, k in enumerate(kinds) if k == kind]
        for i, x in zip(members, local.bind(*(arrays[i] for i in members)), strict=True):
            passed[i] = x
    return passed


def dropped(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """The user's sharding no longer holds along the data axes: shardstep chooses the layout. The values pass
    through; along other axes of the mesh the wish still stands."""
    return Decision(placements, placements, emit=_pass_through, apart=True)


def _pass_through(local: Local, *arrays: Any) -> list[Any]:
    wish = hint(local.params.get("sharding") or local.params.get("dst_sharding"))
    return [x if wish is None else lax.with_sharding_constraint(x, wish) for x in arrays]


def tie(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """tie(x, y) is y, computed after x."""
    return Decision(placements, placements[1:])


_P = compat.primitives

register(reshape, *_P("reshape"))
register(movement(_transposed), *_P("transpose"))
register(movement(_squeezed), *_P("squeeze"))
register(movement(_stacked), *_P("stack"))
register(_apart(_unstacked, _stacked), *_P("unstack"))
register(movement(_tiled, copies=True), *_P("tile"))
register(movement(_beside(_padded)), *_P("pad"))
register(movement(_beside(_sliced), "limit_indices"), *_P("slice"))
register(movement(_beside(lambda site: site.dimensions)), *_P("rev"))
register(movement(_beside(lambda site: [site.dimension])), *_P("concatenate"))
register(_apart(_beside(lambda site: [site.axis]), _beside(lambda site: [site.axis])), *_P("split"))
register(movement(_beside(lambda site: [])), *_P("zeros_like"))
register(broadcast_in_dim, *_P("broadcast_in_dim"))
register(iota, *_P("iota"))
register(empty, *_P("empty"))
register(scalar, *_P("empty2"))
register(identity, *_P("stop_gradient optimization_barrier"), per_replica=True)
register(dropped, *_P("sharding_constraint reshard layout_constraint device_put"), per_replica=True)
register(tie, *_P("tie"))
