"""Rewrite the step, or leave it as it is and let XLA partition it?

The rewritten step sends no more than the replicated one, unless the step reads whole what is kept split: then gathers
come on top. Where they would cost more than leaving the step to XLA, it is left to XLA: the "annotate" engine is plain
`jax.jit` with the planned NamedShardings, and optimizer state is still sharded at rest. A single replica has nothing
to share, and runs the step as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..core.errors import ShardstepError
from ..core.layout import Array, Layout, is_padded
from ..core.schedule import Schedule
from .formatting import size

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
    """Bytes sent per replica and step."""
    return sum(c.total for c in schedule.collectives)


@dataclass(frozen=True)
class Question:
    """What the choice of an engine depends on."""

    rewritten: float  # bytes sent per replica and step, if the step is rewritten
    replicated: float  # in the replicated step
    annotated: float  # if the step is left to XLA
    axis_name: str | None = None  # of a per-replica step
    uneven: bool = False  # do the replicas not divide the batch?
    shares: bool = True  # would any state be sharded at rest, left to XLA?
    explicit: bool = False  # are shardings part of the types around the step?
    alone: bool = False  # is there one replica only?
    asks: str = ""  # the option that XLA's own collectives cannot do
    owned: float = 0.0  # work of the update that replicas share: bytes that could be sent while all repeat it


def choose(asked: str, question: Question) -> Choice:
    """Which engine runs the step."""
    if asked == "annotate":
        _check_annotates(question)
    if asked != "auto":
        return Choice(asked, "as asked")
    ours, replicated = question.rewritten, question.replicated
    if question.alone and question.axis_name is None and not question.explicit:
        return Choice("annotate", "one replica has nothing to share")
    if question.asks:
        return Choice("rewrite", f"{question.asks} needs it")
    if enough(ours, replicated):
        return Choice("rewrite", "sends no more than the replicated step")
    more = f"rewritten, the step sends {size(ours)}, {ours / replicated:.2f} times as much as replicated"
    if question.axis_name is not None:
        return Choice("rewrite", f"{more}; XLA cannot partition a per-replica step")
    if question.explicit:
        return Choice("rewrite", f"{more}; on a mesh with Explicit axes XLA leaves the partition to the step")
    if not question.shares:
        return Choice("rewrite", f"{more}; left to XLA, which does not pad, no state would be sharded at rest")
    if ours <= ENOUGH * question.annotated or question.uneven:
        return Choice("rewrite", f"{more}; left to XLA it would not send less")
    if ours <= question.annotated + question.owned:
        return Choice("rewrite", f"{more}; left to XLA every replica would repeat work that is shared here")
    return Choice("annotate", f"{more}; left to XLA it should send {size(question.annotated)}")


def estimate(baseline: Schedule, rewritten: Schedule, weights: Iterable[Array], replicas: int) -> float:
    """What the step sends when XLA partitions it, as far as that can be known before it is compiled.

    Gradients are all-reduced, new weights are gathered, and what no rule could keep split is gathered there too.
    """
    share = (replicas - 1) / replicas
    gathered = share * sum(array.nbytes for array in weights)
    return sent(baseline) + gathered + sum(f.bytes for f in rewritten.fallbacks)


def _check_annotates(question: Question) -> None:
    if question.explicit:
        raise ShardstepError(
            "engine='annotate' needs a mesh with Auto axes, which XLA partitions: jax.make_mesh(..., axis_types=...),"
            " and no jax.set_mesh with Explicit axes around the call. Or leave engine='rewrite'."
        )
    if question.axis_name is not None:
        raise ShardstepError(
            f"engine='annotate' with axis_name={question.axis_name!r}: XLA can partition a step for the whole batch,"
            " not one for a single replica. Write the step without collectives, or leave engine='rewrite'."
        )
    if question.uneven:
        raise ShardstepError(
            "engine='annotate' needs a batch that the replicas divide: XLA does not pad it. Pass such a batch, or leave"
            " engine='rewrite'."
        )


def unpadded(layout: Layout, everywhere: Layout) -> Layout:
    """A leaf's layout at rest when XLA partitions the step: whole where it would have to be padded."""
    return everywhere if any(map(is_padded, layout)) else layout
