"""Layers that are scanned, and microbatches: gathered and scattered once, or in every iteration (`in_loops.py`)?

Asked for by `Options.layers`. Otherwise as little is sent as can be, unless that does not fit: then the fastest way
that does, and if none does, the smallest. Layers that are gathered one by one to begin with are gathered once where
`weights="auto"` finds that they fit and that it is faster. Where a replica has few examples in every iteration, they
go to the weights if that is faster (`visits.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..core.options import moves_weights
from ..core.schedule import Schedule
from . import visits
from .problem import Attempt, Problem
from .propagation.in_loops import LITTLE_HELD, LITTLE_SENT, ONCE, SUMS_SPLIT, VISITED, InLoops

Plan = Callable[[Problem, str, str], Attempt]  # a problem, how weights rest, and why

_TOLD = {
    ONCE: "scanned layers are gathered once, before their loops",
    SUMS_SPLIT: "what loops add up is scattered in every iteration",
    LITTLE_HELD: "scanned layers are gathered one by one, and what loops add up is scattered in every iteration",
}
_TO_FIT = "to fit into memory"


class Resting(NamedTuple):
    """How weights rest, why, and whether that is for the planner to say."""

    weights: str
    why: str
    auto: bool


def chosen(problem: Problem, resting: Resting, plan: Plan) -> Attempt:
    """As little sent as can be; or loops that hold more, or less."""
    first = plan(problem.with_loops(LITTLE_SENT), resting.weights, resting.why)
    asked, sharded = problem.options.layers, resting.weights == "sharded"
    if not any(step.bodies for step in first.schedule.steps):
        return first

    def again(how: InLoops, why: str) -> Attempt:
        told = f"{resting.why}; {_TOLD[how]} ({why})"
        return plan(problem.with_loops(how), resting.weights, told)

    if not asked and not moves_weights(problem.options) and visits.may_pay_in_loops(first.schedule):
        visited = plan(problem.with_loops(VISITED), resting.weights, resting.why)
        if visits.worth_in_loops(visited, first):
            why = visits.why_in_loops(visited.schedule, visited.seconds, first.seconds)
            first = replace(visited, why_weights=f"{visited.why_weights}; {why}")
    if sharded and asked == "each":
        return _if_other(first, again(LITTLE_HELD, "as asked"))
    if sharded and _gathers_layers(first.schedule):
        if asked == "once":
            return again(ONCE, "as asked")
        if asked is None and resting.auto and problem.memory is not None:
            once = again(ONCE, "there is memory for all of them, and it is predicted to be faster")
            if once.fits and once.seconds < first.seconds:
                return once
    if first.fits or asked:
        return first
    others = [again(how, _TO_FIT) for how in (SUMS_SPLIT, LITTLE_HELD)]
    fitting = [other for other in others if other.fits]
    return min(fitting, key=lambda a: a.seconds) if fitting else min((first, *others), key=lambda a: a.peak)


def beyond_xla(attempt: Attempt) -> str:
    """What XLA does not do by itself: what it sends and keeps in the iterations of loops is its own choice."""
    how = attempt.problem.memo.in_loops
    return "to hold less by scattering in every iteration of a loop" if how.scatters and not how.visits else ""


def _if_other(first: Attempt, other: Attempt) -> Attempt:
    """Without loops inside of loops there is nothing more to be gathered one by one."""
    return first if other.sent == first.sent else other


def _gathers_layers(schedule: Schedule) -> bool:
    """Does a loop gather in its iterations?"""
    return any(c.kind == "all-gather" and c.loop and c.times > 1 for c in schedule.collectives)
