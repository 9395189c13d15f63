"""Rewrite the step, or leave it as it is and let XLA partition it?

The rewritten step sends no more than the replicated one, unless the step reads whole what is kept split: then gathers
come on top. Where they would cost more than leaving the step to XLA, it is left to XLA: the "annotate" engine is plain
`jax.jit` with the planned NamedShardings, and the optimizer's state still rests sharded. A single replica has nothing
to share, and runs the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from ..capture.step import Captured
from ..core.errors import ShardstepError
from ..core.layout import Array, Layout, is_padded
from ..core.schedule import Schedule
from .plan_table import size

# Norms of rows and columns are reduced on their own where their dimension is split. That has been seen to add 1.3 %
# (adaptive gradient clipping, SM3, weight normalisation); XLA would have to do the same.
ENOUGH = 1.02


class Choice(NamedTuple):
    engine: str
    why: str


def enough(ours: float, replicated: float) -> bool:
    """Does the rewritten step send no more than the replicated one, messages of a few bytes apart?"""
    return ours <= ENOUGH * replicated + 1024


def sent(schedule: Schedule) -> float:
    """Bytes that a replica sends in one step."""
    return sum(c.total for c in schedule.collectives)


def choose(
    asked: str,
    axis_name: str | None,
    uneven: bool,
    ours: float,
    replicated: float,
    annotated: float,
    shares: bool = True,
    explicit: bool = False,
    alone: bool = False,
) -> Choice:
    """Which engine runs the step, given what a replica would send: rewritten, replicated, left to XLA.

    `uneven`: the replicas do not divide the batch. `shares`: would any state rest sharded, left to XLA? `explicit`:
    shardings are part of the types around the step. `alone`: there is one replica.
    """
    if asked == "annotate":
        _check_annotates(axis_name, uneven, explicit)
    if asked != "auto":
        return Choice(asked, "as asked")
    if alone and axis_name is None and not explicit:
        return Choice("annotate", "one replica has nothing to share")
    if enough(ours, replicated):
        return Choice("rewrite", "sends no more than the replicated step")
    more = f"rewritten, the step sends {size(ours)}, {ours / replicated:.2f} times as much as replicated"
    if axis_name is not None:
        return Choice("rewrite", f"{more}; XLA cannot partition a per-replica step")
    if explicit:
        return Choice("rewrite", f"{more}; on a mesh with Explicit axes XLA leaves the partition to the step")
    if not shares:
        return Choice("rewrite", f"{more}; left to XLA, which does not pad, no state would rest sharded")
    if ours <= ENOUGH * annotated or uneven:
        return Choice("rewrite", f"{more}; left to XLA it would not send less")
    return Choice("annotate", f"{more}; left to XLA it should send {size(annotated)}")


def estimate(baseline: Schedule, rewritten: Schedule, weights: Iterable[Array], replicas: int) -> float:
    """What the step sends when XLA partitions it, as far as that can be known before it is compiled.

    Gradients are all-reduced, new weights are gathered, and what no rule could keep split is gathered there too.
    """
    share = (replicas - 1) / replicas
    gathered = share * sum(array.nbytes for array in weights)
    return sent(baseline) + gathered + sum(f.bytes for f in rewritten.fallbacks)


def _check_annotates(axis_name: str | None, uneven: bool, explicit: bool) -> None:
    if explicit:
        raise ShardstepError(
            "engine='annotate' needs a mesh with Auto axes, which XLA partitions: jax.make_mesh(..., axis_types=...),"
            " and no jax.set_mesh with Explicit axes around the call. Or leave engine='rewrite'."
        )
    if axis_name is not None:
        raise ShardstepError(
            f"engine='annotate' with axis_name={axis_name!r}: XLA can partition a step for the whole batch, not one for"
            " a single replica. Write the step without collectives, or leave engine='rewrite'."
        )
    if uneven:
        raise ShardstepError(
            "engine='annotate' needs a batch that the replicas divide: XLA does not pad it. Pass such a batch, or leave"
            " engine='rewrite'."
        )


def unpadded(layout: Layout, everywhere: Layout) -> Layout:
    """How a leaf rests when XLA partitions the step: whole where it would have to be padded."""
    return everywhere if any(map(is_padded, layout)) else layout


def annotated(
    step: Callable[..., Any], captured: Captured, resting: Sequence[NamedSharding], donated: tuple[int, ...]
) -> Any:
    """The step as its user wrote it, from and to arrays; state comes and goes as it rests, XLA lays out the rest."""
    constants = {i for i, _ in captured.out_constants}
    leaving: list[NamedSharding | None] = [None] * len(captured.program.outputs)
    for i, o in captured.state.items():
        leaving[o] = resting[i]

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = captured.call.rebuild(leaves)
        results = jax.tree.leaves(step(*args, **kwargs))
        return [x for i, x in enumerate(results) if i not in constants]

    return jax.jit(flat, in_shardings=tuple(resting), out_shardings=leaving, donate_argnums=donated)
