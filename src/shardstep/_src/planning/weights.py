"""Weights at rest, by time within memory: replicated, or sharded?

One of the two is planned first: the one that suits the platform where both take as long (`at_rest.choose_weights`). The
other is planned as well if the first one does not fit, or if a bound on what the other could save is worth it:

    sharded first      loops gather in each iteration what would be gathered once, after the update
    replicated first   few examples could go to weights and tables, which would then not move

The predicted seconds of both decide. What sends more than the replicated step is not taken for the sake of speed, only
if nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import visits
from .costs import wire_time
from .formatting import duration, size
from .problem import Attempt

WORTH = 0.9  # of the predicted seconds: for less, the layout that suits the platform is the safer choice
_INSTEAD = {
    "sharded": ("replicated", "to gather them in the step would take longer"),
    "replicated": ("sharded", "the examples are few and go to tables and weights, which then do not move"),
}


def reconsidered(chosen: Attempt, plan: Callable[[str, str], Attempt]) -> Attempt:
    """What "auto" takes: what was planned first, or weights kept the other way, planned by `plan(weights, why)`."""
    if chosen.fits and not might_save(chosen):
        return chosen
    instead, why = _INSTEAD[chosen.weights]
    other = plan(instead, why)
    if not chosen.fits and other.peak < chosen.peak:
        return replace(other, why_weights=_larger(chosen))
    if not chosen.fits:
        return _noting(chosen, _larger(other))
    if _sends_more(other) and other.sent > chosen.sent:
        return chosen
    if not other.fits:
        return _noting(chosen, _larger(other))
    less = _sends_more(chosen) and other.sent < chosen.sent
    if other.seconds <= (1.0 if less else WORTH) * chosen.seconds:
        told = f"{other.why_weights} (predicted step {duration(other.seconds)} instead of {duration(chosen.seconds)})"
        return replace(other, why_weights=told)
    return _noting(chosen, _slower(other, less))


def might_save(chosen: Attempt) -> bool:
    """Could the other way be so much faster that it is worth planning? The wire is asked first: its time is known."""
    if chosen.weights == "replicated":
        schedule = chosen.schedule
        may_pay = visits.may_pay(schedule) or visits.may_pay_in_loops(schedule)
        return may_pay or any(step.ruling.visit for step in schedule.steps)
    if _sends_more(chosen):
        return True
    replicas = chosen.problem.replicas
    looped = [c for c in chosen.schedule.collectives if c.kind == "all-gather" and c.times > 1]
    saved = wire_time(looped, replicas.axes, replicas.topology)
    least = (1 - WORTH) * wire_time(chosen.schedule.collectives, replicas.axes, replicas.topology)
    return saved > least and saved > (1 - WORTH) * chosen.seconds


def _sends_more(attempt: Attempt) -> bool:
    return not attempt.problem.sends_no_more(attempt.schedule)


def _noting(chosen: Attempt, why_not: str) -> Attempt:
    return replace(chosen, why_weights=f"{chosen.why_weights}; {why_not}")


def _larger(other: Attempt) -> str:
    limit = size(other.problem.memory or 0)
    return f"memory: {other.weights} weights would need {size(other.peak)} of {limit} per device"


def _slower(other: Attempt, less: bool) -> str:
    if less:
        return f"{other.weights} weights would send less, but the step is predicted to take {duration(other.seconds)}"
    return f"with {other.weights} weights the step is predicted to take {duration(other.seconds)}"
