"""Few examples per replica: is it worth a try to let them go to the weights?

A product of examples and a split weight moves one of the two: usually the weight, which many examples then read.
But a weight of 1024 x 1024 is a million numbers, and sixteen examples of it are sixteen thousand. The rules offer both
(`rules/contraction.py`). What is faster depends on the whole step: it is scheduled both ways, and the predicted seconds
decide (`decision.py`).
"""

from __future__ import annotations

from ..core.layout import is_batch
from ..core.schedule import Schedule, Step
from .engines import sent
from .flops import multiplies
from .formatting import duration

WORTH = 0.9  # of the predicted seconds: if less than a tenth is gained, fewer messages are the safer choice
SMALL = 256 << 10  # bytes: what moves less is better packed with others, and thousands of such weights are planned once
LEAST = 16 << 20  # bytes: where less is at stake, messages take their time by being many, not by being long


def may_pay(schedule: Schedule) -> bool:
    """Could the step send so much less, if examples went to weights wherever they are smaller?"""
    return sum(map(_saved, schedule.steps)) > max(LEAST, (1 - WORTH) * sent(schedule))


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


def why(schedule: Schedule, seconds: float, otherwise: float) -> str:
    """What the plan says of it."""
    count = sum(step.ruling.visit is not None and step.ruling.visit.on_trial for step in schedule.steps)
    return (
        f"few examples per replica: they go to the weights in {count} products, predicted step {duration(seconds)}"
        f" instead of {duration(otherwise)}"
    )
