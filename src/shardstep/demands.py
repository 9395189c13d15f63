"""The backward walk: what the readers of each value want of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .layout import REPLICATED, Layout, Partial, Placement, Replicated, Split, is_batch
from .offers import carried, condensed, trial_for
from .program import Atom, Equation, Literal
from .rules import Site, control_flow
from .schedule import NOTHING, Demand, Schedule, Step


def demands_of(
    first: Schedule,
    outputs: Sequence[Layout | None],
    wanted: Sequence[tuple[Demand, ...]] | None,
    seen: Sequence[Layout],
    memo: dict[Any, Any],
    reschedule: Callable[..., Schedule],
) -> dict[Atom, tuple[Demand, ...]]:
    """What the readers of each value want of it, seen from the end of the program."""
    backward = Backward(first, seen, memo, reschedule)
    for i, (atom, layout) in enumerate(zip(first.program.outputs, outputs, strict=True)):
        for k in range(len(first.axes)):
            if layout is not None:
                backward.ask(atom, k, demand_for(layout[k]))
            if wanted is not None:
                backward.ask(atom, k, wanted[i][k])
    for step in reversed(first.steps):
        backward.visit(step)
    return backward.demands


def demand_for(placement: Placement) -> Demand:
    match placement:
        case Split():
            return Demand((placement,))
        case Replicated():
            return Demand(full=True)
    return NOTHING


class Backward:
    def __init__(
        self, first: Schedule, seen: Sequence[Layout], memo: dict[Any, Any], reschedule: Callable[..., Schedule]
    ):
        self.axes = first.axes
        self.memo = memo
        self.demands: dict[Atom, tuple[Demand, ...]] = {}
        self.nothing = (NOTHING,) * len(first.axes)
        self.uses = first.program.uses
        self.producers = {v: e for e in first.program.equations for v in e.outputs}
        self.reschedule = reschedule
        self.homes: dict[Atom, Layout] = dict(zip(first.program.inputs, first.inputs, strict=True))
        self.homes.update(zip(first.program.inputs, seen, strict=False))
        for step in first.steps:
            self.homes.update(zip(step.equation.outputs, step.results, strict=True))

    def ask(self, atom: Atom, k: int, demand: Demand) -> None:
        if demand is NOTHING or isinstance(atom, Literal):
            return
        known = list(self.demands.get(atom, self.nothing))
        known[k] = known[k] | demand
        self.demands[atom] = tuple(known)

    def demand_only(self, atom: Atom, k: int, demand: Demand) -> None:
        """Replace whatever was asked before."""
        known = list(self.demands.get(atom, self.nothing))
        known[k] = demand
        self.demands[atom] = tuple(known)

    def visit(self, step: Step) -> None:
        equation = step.equation
        if equation.bodies:
            control_flow.demand(self, step)
            return
        for k in range(len(self.axes)):
            self.visit_axis(step, k)

    def visit_axis(self, step: Step, k: int) -> None:
        equation = step.equation
        homes = [self.homes[a][k] if a in self.homes else REPLICATED for a in equation.inputs]
        meets_batch = any(map(is_batch, homes))
        asked = [self.demands.get(v, self.nothing)[k] for v in equation.outputs]
        for atom, home, layout in zip(equation.inputs, homes, step.operands, strict=True):
            target = layout[k]
            if isinstance(target, Split):
                self.ask(atom, k, Demand((target,)))
            elif isinstance(target, Replicated) and (isinstance(home, Split) or (meets_batch and not is_batch(home))):
                self.ask(atom, k, Demand(full=True))
        if meets_batch:
            return
        summed = sum(isinstance(h, Partial) for h in homes) if isinstance(step.results[0][k], Partial) else 1
        for r, demand in enumerate(asked):
            terms = demand.terms * max(summed, 1)
            for split in demand.splits[:2]:
                if trial := self.asked_before(equation, k, trial_for, r, split):
                    for atom, placement in zip(equation.inputs, trial.operands, strict=True):
                        if isinstance(placement, Split):
                            self.ask(atom, k, Demand((placement,), terms=terms))
            full = demand.full and not isinstance(step.results[r][k], Split)  # a split result is gathered as it is
            if full or demand.any:
                for i in self.asked_before(equation, k, carried, r):
                    self.ask(equation.inputs[i], k, Demand(full=full, any=demand.any, terms=terms))
        for i in self.asked_before(equation, k, condensed):
            self.ask(equation.inputs[i], k, Demand(any=True))

    def asked_before(self, equation: Equation, k: int, question: Callable[..., Any], *about: Any) -> Any:
        """Ask the rules, once for each kind of equation."""
        key = (equation.kind, k, question, *about, *(is_batch(p) for p in about if isinstance(p, Split)))
        if key not in self.memo:
            arrays, results = (tuple(a.array for a in atoms) for atoms in (equation.inputs, equation.outputs))
            # Shapes along the other axes do not matter for what is asked here: a trial on whole shapes will do.
            site = Site(equation.primitive, equation.params, arrays, results, self.axes[k].size)
            self.memo[key] = question(site, *about)
        return self.memo[key]
