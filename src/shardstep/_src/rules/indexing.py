"""Indexing primitives: where an element comes from, or goes to, is itself data.

Each of them is a nest of loops. A loop names the dimension it walks in each array, operands first, then the result:

    gather          operand  indices           result
      window          d        -                 o        a dimension that every slice takes whole
      lookup          -        i                 o        one slice for each index: the batch of an embedding lookup
      batching        d        i                 o        take_along_axis, vmap

    scatter         operand  indices  updates  result
      window          d        -        u        d
      lookup          -        i        u        -        terms of one sum: partial (the gradient of a lookup)
      batching        d        i        u        d

Iterations of a loop are independent, so a split of any array it walks is a split of the loop: every array that has
the loop is split there, the others are replicated. A dimension that the indices point into has no loop. There the
replicas share the work by ownership: each index belongs to the one replica whose block it falls into.

    gather  from a split dimension  ->  partial     the owner reads the row, the others hold zero
    scatter into a split dimension  ->  split       the owner writes the row, the others drop it

Examples point into state, an embedding table say. As a rule the state is gathered for them. But where all the rows they
point at are fewer than one replica's block of the table has, the indices go to the table instead: every replica serves
all of them, by row or by feature, as it is split. What it read goes back to the examples, what it is to add comes from
them, and the table itself never moves.

For indices that every replica knows, gather is linear in its operand, scatter-add in operand and updates together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import compat
from ..core.layout import Array, is_batch
from ..core.schedule import Visit
from .contract import (
    PARTIAL,
    REPLICATED,
    Block,
    Decision,
    Emit,
    Local,
    Partial,
    Placement,
    Rule,
    Site,
    Split,
    partials,
    register,
    replicate,
)

Loop = tuple[int | None, ...]  # the dimension it walks in each operand and in the result, None where it has none
Offers = Sequence[Decision] | Decision | None

CLIP, FILL_OR_DROP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP


def _split_loops(loops: Sequence[Loop], placements: Sequence[Placement]) -> Iterator[tuple[Loop, Split]]:
    """The loops that some operand is split along, those of the batch first."""
    found = [(i, p) for i, p in enumerate(placements) if isinstance(p, Split)]
    seen = set()
    for i, split in sorted(found, key=lambda at: not at[1].batch):
        for loop in loops:
            if loop[i] == split.dim and (loop, split.outer, split.extent) not in seen:
                seen.add((loop, split.outer, split.extent))
                yield loop, split


def _along(loop: Loop, split: Split) -> tuple[Placement, ...]:
    return tuple(REPLICATED if dim is None else split.on(dim, split.outer) for dim in loop)


def _has_split(placements: Sequence[Placement]) -> bool:
    return any(isinstance(p, Split) for p in placements)


# ---------------------------------------- dynamic_slice, dynamic_update_slice -----------------------------------------


def _whole(shape: Sequence[int], window: Sequence[int]) -> list[int]:
    """The dimensions that a window of the array takes whole; where it starts cannot matter there."""
    return [d for d, (size, taken) in enumerate(zip(shape, window, strict=True)) if size == taken]


def dynamic_slice(site: Site, placements: tuple[Placement, ...]) -> Offers:
    starts = len(placements) - 1
    loops = [(d, *[None] * starts, d) for d in _whole(site.inputs[0].shape, site.slice_sizes)]
    if _has_split(placements):
        return [_window(site, loop, split) for loop, split in _split_loops(loops, placements)] or None
    if isinstance(placements[0], Partial):
        return Decision((placements[0], *[REPLICATED] * starts), (placements[0],))
    return replicate(site)


def _window(site: Site, loop: Loop, split: Split) -> Decision:
    """A window dimension is split: every slice is cut down with it."""
    *operands, result = _along(loop, split)
    params = site.with_params(slice_sizes=site.local(site.slice_sizes, operands[0]))
    return Decision(tuple(operands), (result,), params)


def dynamic_update_slice(site: Site, placements: tuple[Placement, ...]) -> Offers:
    starts = len(placements) - 2
    loops = [(d, d, *[None] * starts, d) for d in _whole(site.inputs[0].shape, site.inputs[1].shape)]
    if _has_split(placements):
        offers = [_along(loop, split) for loop, split in _split_loops(loops, placements)]
        return [Decision(tuple(operands), (result,)) for *operands, result in offers] or None
    if term := _one_term(placements[:2]):
        return Decision((term, term, *[REPLICATED] * starts), (term,))
    return replicate(site)


def _one_term(placements: Sequence[Placement]) -> Partial | None:
    """The partial that all of these can be: a replicated value is a term of a sum that one replica holds."""
    ops = partials(placements)
    return ops[0] if ops == [PARTIAL] or (ops and list(placements) == ops * len(placements)) else None


# ------------------------------------------------------- gather -------------------------------------------------------


def _others(ndim: int, *taken: Sequence[int]) -> list[int]:
    return [d for d in range(ndim) if not any(d in dims for dims in taken)]


def _gather_loops(site: Site) -> tuple[list[Loop], list[Loop]]:
    """(window loops, lookup and batching loops)."""
    dims, operand, result = site.dimension_numbers, site.inputs[0], site.outputs[0]
    sliced = _others(operand.ndim, dims.collapsed_slice_dims, dims.operand_batching_dims)
    whole = _whole(operand.shape, site.slice_sizes)
    windows: list[Loop] = [(d, None, int(o)) for d, o in zip(sliced, dims.offset_dims, strict=True) if d in whole]
    beside = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    # the dimensions of indices, the last of which holds one index, come out in order
    return windows, [(beside.get(i), i, o) for i, o in enumerate(_others(result.ndim, dims.offset_dims))]


def gather(site: Site, placements: tuple[Placement, ...]) -> Offers:
    if _has_split(placements):
        windows, lookups = _gather_loops(site)
        offers = [Decision((a, b), (r,)) for a, b, r in (_along(*at) for at in _split_loops(lookups, placements))]
        by_state = [_window(site, loop, split) for loop, split in _split_loops(windows, placements)]
        by_state += _owned_rows(site, placements)
        homes = [_along(*at)[-1] for at in _split_loops(lookups, placements) if at[1].batch]
        if homes and not is_batch(placements[0]) and _are_few(site, site.outputs[0]):
            by_state = [replace(d, visit=Visit((homes[0],))) for d in by_state]
        return (offers + by_state) or None
    operand, result = placements[0], site.outputs[0]
    # a partial that is copied many times is reduced first, while it is small
    if isinstance(operand, Partial) and _fill_is_a_term(site, operand) and result.size <= site.inputs[0].size:
        return Decision((operand, REPLICATED), (operand,))
    return replicate(site)


def _fill_is_a_term(site: Site, operand: Partial) -> bool:
    """Every replica fills in the same value: right for a maximum, and for a sum if it is 0 or NaN."""
    fill = site.fill_value
    return site.mode != FILL_OR_DROP or operand != PARTIAL or fill == 0 or fill != fill


def _owned_rows(site: Site, placements: tuple[Placement, ...]) -> list[Decision]:
    """`table[i]` with the table split along the dimension that `i` points into: a sum with one term for each row."""
    split, dims = placements[0], site.dimension_numbers
    if not _is_pointed_into(split, dims.collapsed_slice_dims, dims.start_index_map):
        return []
    if not jnp.issubdtype(site.inputs[0].dtype, np.number):
        return []
    if _meets_batch(split, placements[1:]) and not _are_few(site, site.outputs[0]):
        return []
    return [Decision((split, REPLICATED), (PARTIAL,), emit=_gather_owned)]


def _are_few(site: Site, rows: Array) -> bool:
    """May every replica look at all rows that are read or written? They are no more than its own block of the table."""
    return rows.size * site.n <= site.inputs[0].size


def _is_pointed_into(split: Placement | None, single: Sequence[int], indexed: Sequence[int]) -> TypeGuard[Split]:
    """Is this a split into blocks of a dimension that indices address element by element?"""
    return isinstance(split, Split) and split.outer == 1 and split.dim in single and split.dim in indexed


def _meets_batch(split: Split, others: Sequence[Placement]) -> bool:
    """Gathering many examples for the sake of a split of the state would be the wrong way round."""
    return not split.batch and any(isinstance(p, Split) and p.batch for p in others)


def _gather_owned(local: Local, operand: jax.Array, indices: jax.Array) -> list[jax.Array]:
    params, block = dict(local.params), local.inputs[0]
    dims, mode, fill = params["dimension_numbers"], params["mode"], params["fill_value"]
    point = _Pointers(block, dims.start_index_map, dims.collapsed_slice_dims, params["slice_sizes"])
    indices = point.signed(indices)
    # XLA clamps an index of a gather, so a broken promise is a clamped one
    target = indices if mode == FILL_OR_DROP else point.clipped(indices)
    params |= dict(mode=FILL_OR_DROP, fill_value=0)
    rows = lax.gather(operand, point.within_block(target), dims, **_without(params, "dimension_numbers"))
    if mode == FILL_OR_DROP and fill != 0:  # outside of the whole array: no owner, so the first block fills in
        outside = jnp.any(indices != point.clipped(indices), axis=-1)
        beside = _others(rows.ndim, dims.offset_dims)
        outside = lax.broadcast_in_dim(outside & point.is_first(), rows.shape, beside)
        rows = jnp.where(outside, jnp.asarray(fill, rows.dtype), rows)
    return [rows]


def _without(params: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in params.items() if k not in names}


class _Pointers:
    """The last dimension of `indices`: component k points into dimension `indexed[k]` of the operand.

    Only dimensions addressed element by element (`single`) are cut into owned blocks; in the others a replica's
    window starts where the whole window does.
    """

    def __init__(self, block: Block, indexed: Sequence[int], single: Sequence[int], window: Sequence[int]):
        self.offsets = [block.offsets[d] if d in single else 0 for d in indexed]
        self.last = [block.shape[d] - 1 if d in single else block.local[d] - window[d] for d in indexed]

    @staticmethod
    def signed(indices: jax.Array) -> jax.Array:
        """Wide enough for any offset, and able to point before the block."""
        return indices.astype(np.int64 if indices.dtype.itemsize == 8 else np.int32)

    def clipped(self, indices: jax.Array) -> jax.Array:
        return jnp.clip(indices, 0, jnp.asarray(self.last, indices.dtype))

    def within_block(self, indices: jax.Array) -> jax.Array:
        """Counted from the block's first element; what another replica owns falls outside, and so does padding."""
        return jnp.where(indices > jnp.asarray(self.last, indices.dtype), -1, indices - self._stack(indices))

    def is_first(self) -> jax.Array:
        return jnp.all(self._stack(jnp.zeros((), np.int32)) == 0)

    def _stack(self, like: jax.Array) -> jax.Array:
        return jnp.stack([jnp.asarray(o).astype(like.dtype) for o in self.offsets])


# ------------------------------------------------------ scatter -------------------------------------------------------


def _scatter_loops(site: Site) -> tuple[list[Loop], list[Loop]]:
    """(window and batching loops, lookup loops)."""
    dims, (operand, _, updates) = site.dimension_numbers, site.inputs
    written = _others(operand.ndim, dims.inserted_window_dims, dims.operand_batching_dims)
    pairs = zip(written, dims.update_window_dims, strict=True)
    windows: list[Loop] = [(d, None, int(u), d) for d, u in pairs if operand.shape[d] == updates.shape[u]]
    beside = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True))
    lookups = [
        (beside.get(i), i, u, beside.get(i)) for i, u in enumerate(_others(updates.ndim, dims.update_window_dims))
    ]
    return windows + [at for at in lookups if at[0] is not None], [at for at in lookups if at[0] is None]


# Given that nothing is split: may the sum (max, min) be left for later? Answers the placements of the operands.
Linearity = Callable[[Site, tuple[Placement, ...]], tuple[Placement, ...] | None]


def scatter(write: Callable[..., jax.Array], combines: str | None, linear: Linearity) -> Rule:
    """The rule of a scatter that `write`s; `combines` names the reduction that it is, if it is one."""

    def rule(site: Site, placements: tuple[Placement, ...]) -> Offers:
        if _has_split(placements):
            independent, lookups = _scatter_loops(site)
            offers = [_along(*at) for at in _split_loops(independent, placements)]
            decisions = [Decision(tuple(operands), (result,)) for *operands, result in offers]
            if combines:
                decisions += _terms(Partial(combines), lookups, placements)
            return (decisions + _owned_updates(site, placements, write)) or None
        if operands := linear(site, placements):
            return Decision(operands, (partials(placements)[0],))
        return [*_owned_updates(site, placements, write), replicate(site)]

    return rule


def _terms(term: Partial, lookups: Sequence[Loop], placements: tuple[Placement, ...]) -> list[Decision]:
    """Each replica combines the updates it has; for a sum, one of them holds the operand.

    An operand that is split already would have to be gathered for that: its owner updates it instead.
    """
    held = placements[0]
    if isinstance(held, Split):
        return []
    operand = term if term in (PARTIAL, held) else REPLICATED  # every replica may count it into a maximum
    found = _split_loops(lookups, placements)
    fill = (None, None, term.op)  # an update that is padding goes to some place or other, and adds nothing there
    return [
        Decision((operand, *_along(loop, split)[1:3]), (term,), fill=fill if split.extent else ())
        for loop, split in found
    ]


def _owned_updates(site: Site, placements: tuple[Placement, ...], write: Callable[..., jax.Array]) -> list[Decision]:
    """The operand is split, or its readers want it so: who owns a part of it writes the updates that belong there."""
    held, dims = placements[0], site.dimension_numbers
    split = held if isinstance(held, Split) else site.wants[0] if site.wants else None
    custom = write is lax.scatter and site.update_jaxpr is not None  # x.at[i].apply(f)
    if split is None or custom or not site.divides(0, split):
        return []
    visits = split is not held and _meets_batch(split, placements)
    if visits and not _are_few(site, site.inputs[2]):
        return []
    if _is_pointed_into(split, dims.inserted_window_dims, dims.scatter_dims_to_operand_dims):
        return [
            Decision(
                (split, REPLICATED, REPLICATED), (split,), emit=_scatter_owned(write), visit=Visit() if visits else None
            )
        ]
    windows = [_along(loop, split) for loop in _scatter_loops(site)[0] if visits and loop[0] == split.dim]
    return [Decision(tuple(operands), (result,), visit=Visit()) for *operands, result in windows]


def _scatter_owned(write: Callable[..., jax.Array]) -> Emit:
    def emit(local: Local, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> list[jax.Array]:
        params, block = dict(local.params), local.inputs[0]
        dims, mode = params["dimension_numbers"], params["mode"]
        written = _others(operand.ndim, dims.inserted_window_dims, dims.operand_batching_dims)
        window = dict(zip(written, (updates.shape[u] for u in dims.update_window_dims), strict=True))
        indexed, single = dims.scatter_dims_to_operand_dims, dims.inserted_window_dims
        point = _Pointers(block, indexed, single, [window.get(d, 1) for d in range(operand.ndim)])
        indices = point.signed(indices)
        target = point.within_block(point.clipped(indices) if mode == CLIP else indices)
        params |= dict(mode=FILL_OR_DROP)  # XLA drops what a scatter writes outside, promised or not
        params = _without(params, "dimension_numbers", "update_jaxpr", "update_consts")
        return [write(operand, target, updates, dims, **params)]

    return emit


def _in_operand_and_updates(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    operand, indices, updates = placements
    term = _one_term((operand, updates)) if indices == REPLICATED else None
    return (term, REPLICATED, term) if term == PARTIAL else None


def _if_unique(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """Overwriting moves elements, so long as no two updates race for one place."""
    operand, indices, updates = placements
    term = _one_term((operand, updates)) if indices == REPLICATED else None
    return (term, REPLICATED, term) if term and site.unique_indices and site.update_jaxpr is None else None


def _in_operand(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    return placements if placements == (PARTIAL, REPLICATED, REPLICATED) else None


def _idempotent(op: str) -> Linearity:
    """max of partial maxima: a replicated array may take part on every replica."""

    def linear(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
        return placements if partials(placements) == [Partial(op)] and placements[1] == REPLICATED else None

    return linear


_P = compat.primitives

register(dynamic_slice, *_P("dynamic_slice"))
register(dynamic_update_slice, *_P("dynamic_update_slice"))
register(gather, *_P("gather"))
register(scatter(lax.scatter, None, _if_unique), *_P("scatter"))
register(scatter(lax.scatter_add, "add", _in_operand_and_updates), *_P("scatter_add"))
register(scatter(lax.scatter_sub, "add", _in_operand_and_updates), *_P("scatter_sub"))
register(scatter(lax.scatter_mul, None, _in_operand), *_P("scatter_mul"))
register(scatter(lax.scatter_max, "max", _idempotent("max")), *_P("scatter_max"))
register(scatter(lax.scatter_min, "min", _idempotent("min")), *_P("scatter_min"))
