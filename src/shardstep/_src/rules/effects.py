"""Primitives that talk to the outside world: they happen once, on whole values.

debug.print, debug.callback   run on the first replica, on the gathered value
pure_callback                 every replica calls it with the same whole values (it is pure: who calls does not matter)
io_callback, shard_map        refused: see `REFUSED`
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from ..core import compat
from .contract import REPLICATED, Decision, Local, Placement, Site, register, replicate


def once(site: Site, placements: tuple[Placement, ...]) -> Decision:
    """Gathered, then run by the first replica alone."""
    whole = tuple(REPLICATED for _ in placements)
    return Decision(whole, tuple(REPLICATED for _ in site.outputs), emit=_on_first_replica)


def _on_first_replica(local: Local, *arrays: jax.Array) -> list[Any]:
    def call(*values: jax.Array) -> list[jax.Array]:
        return local.bind(*values)

    def skip(*values: jax.Array) -> list[jax.Array]:
        return []

    lax.cond(lax.axis_index(local.axes) == 0, call, skip, *arrays)
    return []


def everywhere(site: Site, placements: tuple[Placement, ...]) -> Decision:
    return replicate(site)


register(once, *compat.primitives("debug_callback debug_print"))
register(everywhere, *compat.primitives("pure_callback"))

# What cannot be done N times instead of once, or cannot be seen into, with the way out.
REFUSED: dict[Any, str] = {
    compat.primitive("io_callback"): (
        "io_callback would run once on every replica. Return what it needs from the step and call it outside, or use"
        " jax.debug.callback, which runs once"
    ),
    compat.primitive("shard_map"): (
        "the step contains a shard_map of its own. Shard the function inside it as a per-replica step:"
        " shardstep.shard(f, mesh, axis_name=...)"
    ),
}
