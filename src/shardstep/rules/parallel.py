"""Collectives that the user wrote, in per-replica steps. Their axis is the data axis, so they are changes of placement:

    psum(varying)        -> partial       nothing is sent yet: who reads it decides how it is reduced
    pmax(varying)        -> partial(max)
    all_gather(varying)  -> split         each replica holds its own block of what would be gathered
    psum(replicated)     -> n * x
    axis_index           -> varying

Everything else (ppermute, all_to_all, psum_scatter, ...) runs as it was written. On a mesh with several data axes the
user's axis stands for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .. import compat
from ..layout import VARYING
from .core import REPLICATED, Decision, Local, Partial, Placement, Rule, Site, Split, register


def _identity(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    return list(arrays)


def _times_replicas(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    n = lax.axis_size(local.axes)
    return [x * jax.numpy.asarray(n, x.dtype) for x in arrays]


def _own(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Each replica's own value, as the user's collective reads it."""
    return tuple(VARYING if p == VARYING else REPLICATED for p in placements)


def reduction(op: str) -> Rule:
    """psum, pmax, pmin: the terms are in place; reducing them is left to whoever reads the result."""

    def rule(site: Site, placements: tuple[Placement, ...]) -> Decision | None:
        if site.params.get("axis_index_groups") is not None or _other_axes(site):
            return as_written(site, placements)
        if all(p == VARYING for p in placements):
            return Decision(placements, (Partial(op),) * len(placements), emit=_identity)
        if all(p == REPLICATED for p in placements):
            return Decision(placements, placements, emit=_times_replicas if op == "add" else _identity)
        return Decision(_own(site, placements), (VARYING,) * len(placements), emit=_reduce_here(op))

    return rule


def _reduce_here(op: str) -> Callable[..., list[jax.Array]]:
    def emit(local: Local, *arrays: jax.Array) -> list[jax.Array]:
        act = {"add": lax.psum, "max": lax.pmax, "min": lax.pmin}[op]
        return [act(x, local.axes) for x in arrays]

    return emit


def gathered(site: Site, placements: tuple[Placement, ...]) -> Decision | None:
    """all_gather of each replica's own value: the replicas' values side by side, each replica holding its own."""
    if site.params.get("axis_index_groups") is not None or placements != (VARYING,) or _other_axes(site):
        return as_written(site, placements)
    dim, tiled = site.params["all_gather_dimension"], site.params["tiled"]

    def emit(local: Local, x: jax.Array) -> list[jax.Array]:
        return [x if tiled else lax.expand_dims(x, (dim,))]

    return Decision(placements, (Split(dim, batch=True),), emit=emit)


def as_written(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """Run the collective itself, on each replica's own values."""
    return Decision((VARYING,) * len(site.inputs), (VARYING,) * len(site.outputs), emit=_on_mesh_axes)


def _on_mesh_axes(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    """The user's axis name stands for the data axes of the mesh."""
    names: dict[str, Any] = {k: local.axes for k in ("axes", "axis_name") if k in local.params}
    if "axis_name" in names and not isinstance(local.params["axis_name"], tuple):
        names["axis_name"] = local.axes if len(local.axes) > 1 else local.axes[0]
    return local.bind(*arrays, **names)


def index(site: Site, placements: tuple[Placement, ...]) -> Decision:
    return Decision((), (VARYING,), emit=lambda local: [lax.axis_index(local.axes)])


def cast(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """pvary and its kin only change JAX's types."""
    return Decision(placements, placements, emit=_identity)


def _other_axes(site: Site) -> bool:
    """Positional axes (ints, as vmap leaves them) mix the reduction with dimensions of the value."""
    return any(isinstance(a, int) for a in site.params.get("axes", ()))


_P = compat.primitives

register(reduction("add"), *_P("psum psum_invariant"), per_replica=True)
register(reduction("max"), *_P("pmax"), per_replica=True)
register(reduction("min"), *_P("pmin"), per_replica=True)
register(gathered, *_P("all_gather all_gather_invariant"), per_replica=True)
register(as_written, *_P("ppermute all_to_all reduce_scatter ragged_all_to_all pbroadcast"), per_replica=True)
register(index, *_P("axis_index"), per_replica=True)
register(cast, *_P("pvary"), per_replica=True)
