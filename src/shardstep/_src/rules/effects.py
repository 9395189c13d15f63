"""Primitives that talk to the outside world: they happen once, on whole values.

debug.print, debug.callback   run on the first replica, on the gathered value
io_callback                   the same; its results are partial: the first replica holds them, the others hold zeros
pure_callback                 every replica calls it with the same whole values (it is pure: who calls does not matter)
shard_map                     over the data axes: written out (`capture/inner_maps.py`); others: see `REFUSED`

In a per-replica step, a callback on a replica's own values is called by each replica, as under `pmap`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import compat
from ..core.layout import VARYING
from ..core.program import Program
from .contract import REPLICATED, Array, Decision, Local, Partial, Placement, Site, register


def once(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """Gathered, then run by the first replica alone."""
    if VARYING in placements:
        return Decision((VARYING,) * len(placements), (VARYING,) * len(site.outputs), emit=_call)
    whole = (REPLICATED,) * len(placements)
    return Decision(whole, tuple(map(_term, site.outputs)), emit=_on_first_replica)


def _term(result: Array) -> Placement:
    """How a result is made of the first replica's and of the zeros of the others."""
    return Partial("max" if result.dtype == bool else "add")


def _call(local: Local, *arrays: jax.Array) -> list[jax.Array]:
    """On this replica. What the results are typed as was written down on the user's mesh; this is another."""
    if "result_avals" not in local.params:
        return local.bind(*arrays)
    here = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in local.params["result_avals"])
    return local.bind(*arrays, result_avals=here)


def _on_first_replica(local: Local, *arrays: jax.Array) -> list[Any]:
    def call(*values: jax.Array) -> list[jax.Array]:
        return [_varying(x, local) for x in _call(local, *values)]

    def skip(*values: jax.Array) -> list[jax.Array]:
        return [_varying(jnp.zeros(block.shape, aval.dtype), local) for block, aval in results]

    avals = local.params.get("result_avals", ())
    results = list(zip(local.outputs, avals, strict=True))
    return lax.cond(lax.axis_index(local.axes) == 0, call, skip, *arrays)


def _varying(x: jax.Array, local: Local) -> jax.Array:
    missing = tuple(n for n in local.axes if n not in compat.varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def everywhere(site: Site, placements: tuple[Placement, ...]) -> Decision:
    placement = VARYING if VARYING in placements else REPLICATED
    return Decision((placement,) * len(placements), (placement,) * len(site.outputs), emit=_call)


_ONCE, _EVERYWHERE = compat.primitives("debug_callback debug_print io_callback"), compat.primitives("pure_callback")

register(once, *_ONCE, per_replica=True)
register(everywhere, *_EVERYWHERE, per_replica=True)


def calls_host(program: Program) -> bool:
    """Does it contain a callback?"""
    return any(e.primitive in _ONCE or e.primitive in _EVERYWHERE for e in program.walk())


# What cannot be seen into, with the way out.
REFUSED: dict[Any, str] = {
    compat.primitive("shard_map"): (
        "the step contains a shard_map that cannot be rewritten: over axes that do not carry the batch, with a"
        " collective that jax.vmap does not know, or with random keys that are not threefry's. A whole step that is"
        " written for one replica is sharded as shardstep.shard(f, mesh, axis_name=...)"
    ),
}
