"""Collectives that the user wrote, in per-replica steps. Their axis is the data axis, so they are changes of placement:

    psum(varying)        -> partial       nothing is sent yet: who reads it decides how it is reduced
    pmax(varying)        -> partial(max)
    all_gather(varying)  -> split         each replica holds its own block of what would be gathered
    all_gather(replicated) -> n copies
    psum(replicated)     -> n * x
    axis_index           -> varying

Everything else (ppermute, all_to_all, psum_scatter, ...) runs as it was written. On a mesh with several data axes the
user's axis stands for all of them together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import compat
from ..core.layout import VARYING
from .contract import REPLICATED, Decision, Local, Partial, Placement, Rule, Site, Split, register


def _identity(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    return list(arrays)


def reduction(op: str) -> Rule:
    """psum, pmax, pmin: the terms are in place; the readers of the result reduce them."""

    def rule(site: Site, placements: tuple[Placement, ...]) -> Decision:
        if site.params.get("axis_index_groups") is not None or _other_axes(site):
            return as_written(site, placements)
        operands = tuple(VARYING if p == VARYING else REPLICATED for p in placements)
        results = tuple(Partial(op) if p == VARYING else REPLICATED for p in operands)

        def emit(local: Local, *arrays: jax.Array) -> list[jax.Array]:
            """What every replica has already counts once for each of them."""
            n = lax.axis_size(local.axes) if op == "add" else 1
            return [
                x if p == VARYING or n == 1 else x * jnp.asarray(n, x.dtype)
                for x, p in zip(arrays, operands, strict=True)
            ]

        return Decision(operands, results, emit=emit, apart=True)

    return rule


def gathered(site: Site, placements: tuple[Placement, ...]) -> Decision | None:
    """all_gather of each replica's own value: the replicas' values side by side, each replica holding its own.

    Of a value that all replicas share: copies of it side by side, which all replicas share too.
    """
    if placements != (VARYING,):
        return Decision((REPLICATED,), (REPLICATED,), emit=_copies)
    if site.params.get("axis_index_groups") is not None or _other_axes(site):
        return as_written(site, placements)
    dim, tiled = site.params["all_gather_dimension"], site.params["tiled"]

    def emit(local: Local, x: jax.Array) -> list[jax.Array]:
        return [x if tiled else lax.expand_dims(x, (dim,))]

    return Decision(placements, (Split(dim, batch=True),), emit=emit)


def _copies(local: Local, x: jax.Array) -> list[jax.Array]:
    dim, tiled = local.params["all_gather_dimension"], local.params["tiled"]
    before, after = local.inputs[0].shape, local.outputs[0].shape
    if tiled:
        return [jnp.concatenate([x] * (after[dim] // max(before[dim], 1) or 1), dim)]
    return [jnp.broadcast_to(lax.expand_dims(x, (dim,)), after)]


def as_written(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """Run the collective itself, on each replica's own values."""
    return Decision((VARYING,) * len(site.inputs), (VARYING,) * len(site.outputs), emit=_on_mesh_axes)


def _on_mesh_axes(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    """The user's axis name means the data axes of the mesh."""
    names: dict[str, Any] = {k: local.axes for k in ("axes", "axis_name") if k in local.params}
    if "axis_name" in names and not isinstance(local.params["axis_name"], tuple):
        names["axis_name"] = local.axes if len(local.axes) > 1 else local.axes[0]
    return local.bind(*arrays, **names)


def index(site: Site, placements: tuple[Placement, ...]) -> Decision:
    return Decision((), (VARYING,), emit=lambda local: [lax.axis_index(local.axes)])


def cast(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """pvary and its kin only change JAX's types."""
    return Decision(placements, placements, emit=_identity, apart=True)


def _other_axes(site: Site) -> bool:
    """Positional axes (ints, as vmap leaves them) mix the reduction with dimensions of the value."""
    return any(isinstance(a, int) for a in site.params.get("axes", ()))


_P = compat.primitives

AS_WRITTEN = frozenset(_P("ppermute all_to_all reduce_scatter ragged_all_to_all pbroadcast"))
COMMUNICATING = AS_WRITTEN | frozenset(_P("psum psum_invariant pmax pmin all_gather all_gather_invariant"))

register(reduction("add"), *_P("psum psum_invariant"), per_replica=True)
register(reduction("max"), *_P("pmax"), per_replica=True)
register(reduction("min"), *_P("pmin"), per_replica=True)
register(gathered, *_P("all_gather all_gather_invariant"), per_replica=True)
register(as_written, *AS_WRITTEN, per_replica=True)
register(index, *_P("axis_index"), per_replica=True)
register(cast, *_P("pvary"), per_replica=True)
