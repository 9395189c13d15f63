"""Few examples per replica: is it worth a try to let them go to the weights?

A product of examples and a split weight moves one of the two: usually the weight, which many examples then read.
But a weight of 1024 x 1024 is a million numbers, and sixteen examples of it are sixteen thousand. The rules offer both
(`rules/contraction.py`). What is faster depends on the whole step: it is scheduled both ways, and the predicted seconds
decide (`decision.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.layout import is_batch
from ..core.schedule import Schedule, Step
from .engines import sent
from .flops import multiplies
from .formatting import duration
from .problem import Attempt

WORTH = 0.9  # of the predicted seconds: if less than a tenth is gained, fewer messages are the safer choice
SMALL = 256 << 10  # bytes: what moves less is better packed with others, and thousands of such weights are planned once
LEAST = 16 << 20  # bytes: where less is at stake, messages take their time by being many, not by being long


def may_pay(schedule: Schedule) -> bool:
    """Could the step send so much less, if examples went to weights wherever they are smaller?"""
    return _enough(sum(map(_saved, schedule.steps)), schedule)


def may_pay_in_loops(schedule: Schedule) -> bool:
    """Could loops handle so much less in all their iterations? They gather weights and scatter gradients once, but each
    iteration reads weights and writes gradients.
    """
    return _enough(sum(times * _saved(step) for step, times in in_loops(schedule)), schedule)


def worth(visited: Attempt, otherwise: Attempt) -> bool:
    return visited.seconds < WORTH * otherwise.seconds and visited.fits >= otherwise.fits


def worth_in_loops(visited: Attempt, otherwise: Attempt) -> bool:
    """What is sent in every iteration may be more than what is sent once. It must not be more than everyone sends."""
    little = visited.problem.sends_no_more(visited.schedule) or visited.sent <= otherwise.sent
    return little and worth(visited, otherwise)


def _enough(saved: float, schedule: Schedule) -> bool:
    return saved > max(LEAST, (1 - WORTH) * sent(schedule))


def _saved(step: Step) -> float:
    """Bytes of the weight (or of its gradient) beyond those of the examples that it meets."""
    if not (multiplies(step.equation.primitive) and step.ruling.over_examples):
        return 0.0
    atoms = [*step.equation.inputs, *step.equation.outputs]
    layouts = [*step.operands, *step.ruling.seen]
    nbytes = {True: 0, False: 0}
    for atom, layout in zip(atoms, layouts, strict=True):
        nbytes[any(map(is_batch, layout))] += atom.array.nbytes
    saved = nbytes[False] - nbytes[True]
    return saved if saved >= SMALL else 0


def in_loops(schedule: Schedule, around: int = 1) -> Iterator[tuple[Step, int]]:
    """The equations in the bodies of loops, and how often they run."""
    for step in schedule.steps:
        for body, times in zip(step.bodies, step.times, strict=True):
            yield from ((inner, around * times) for inner in body.steps)
            yield from in_loops(body, around * times)


def _visitors(steps: Iterable[Step]) -> int:
    return sum(step.ruling.visit is not None and step.ruling.visit.on_trial for step in steps)


def why(schedule: Schedule, seconds: float, otherwise: float) -> str:
    """What the plan says of it."""
    return _told(f"in {_visitors(schedule.steps)} products", seconds, otherwise)


def why_in_loops(schedule: Schedule, seconds: float, otherwise: float) -> str:
    return _told(f"in {_visitors(step for step, _ in in_loops(schedule))} products of loops", seconds, otherwise)


def _told(where: str, seconds: float, otherwise: float) -> str:
    return (
        f"few examples per replica: they go to the weights {where}, predicted step {duration(seconds)} instead of"
        f" {duration(otherwise)}"
    )
