"""Sums whose terms can all be made where the sum is wanted.

A table that is read twice (to look up tokens and to score them) has a gradient of two terms. If the examples of only
one of them visit (`rules/contraction.py`), nothing is gained: the sum is reduced for the sake of the other. If those of
all terms do, it never moves. So whether a term may visit is a question about all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.layout import PARTIAL, Axis, Placement, Split, is_batch
from ...core.moves import cost
from ...core.program import Atom, Equation
from ...rules import Decision, Site
from .rule_queries import trial_for, valid_decisions


@dataclass(frozen=True)
class Apart:
    """What is asked about sums, and what is known of their terms from a first walk."""

    axes: tuple[Axis, ...]
    producers: Mapping[Atom, Equation]
    uses: Mapping[Atom, int]
    held: Callable[[Atom, int], Placement]
    answer: Callable[..., Any]  # of the rules, to a question about an equation
    on_trial: bool  # may examples go to weights, wherever that sends less?

    def pays(self, equation: Equation, k: int, split: Split) -> bool:
        """Is less sent if each term of this sum is made where it is wanted than if the sum is reduced?"""
        return self._terms(equation, k, split) < cost(PARTIAL, split, equation.outputs[0].array, self.axes[k])

    def _terms(self, equation: Equation, k: int, split: Split) -> float:
        """Bytes that a replica sends to make all terms so; infinite if that is not possible."""
        trial = self.answer(equation, k, trial_for, 0, split)
        if trial is None or len(equation.outputs) > 1:
            return math.inf
        operands = zip(equation.inputs, trial.operands, strict=True)
        return sum(self._term(a, k, target) for a, target in operands if self.held(a, k) == PARTIAL)

    def _term(self, atom: Atom, k: int, target: Placement) -> float:
        equation = self.producers.get(atom)
        if equation is None or equation.bodies or self.uses[atom] > 1 or not isinstance(target, Split):
            return math.inf
        held = tuple(self.held(a, k) for a in equation.inputs)
        if not any(map(is_batch, held)):
            return self._terms(equation, k, target)
        visit = self.answer(equation, k, visiting, target, held, self.on_trial)
        if visit is None:
            return math.inf
        moved = zip(equation.inputs, held, visit.operands, strict=True)
        return sum(cost(home, there, a.array, self.axes[k]) for a, home, there in moved)


def visiting(site: Site, target: Split, held: Sequence[Placement], on_trial: bool) -> Decision | None:
    """What a rule offers to examples that go where their sum is wanted, if anything."""
    asked = replace(site, wants=(target,) * len(site.outputs))
    for decision in valid_decisions(asked, tuple(held)):
        if decision.visit and decision.results[0] == target and (on_trial or not decision.visit.on_trial):
            return decision
    return None
