"""The backward walk: what the readers of each value want of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...core.layout import REPLICATED, Layout, Partial, Placement, Replicated, Split, is_batch
from ...core.program import Atom, Equation, Literal, Program
from ...core.schedule import NOTHING, Demand, Schedule, Step
from ...rules import Site
from . import loops as control_flow
from .memo import Forms, Situations, Wanted
from .rule_queries import carried, condensed, trial_for


def nothing_wanted(program: Program, count: int, known: Situations) -> dict[Atom, Wanted]:
    """What is known of the readers of each value, along so many axes, before they are asked."""
    one, several = (known.wanted((NOTHING,) * count, several) for several in (False, True))
    return {atom: several if uses > 1 else one for atom, uses in program.uses.items()}


def due_at_the_end(
    program: Program, outputs: Sequence[Layout | None], count: int, known: Situations
) -> dict[Atom, Wanted]:
    """The same, if no reader was asked yet but it is known how the values leave."""
    wanted = nothing_wanted(program, count, known)
    for atom, layout in zip(program.outputs, outputs, strict=True):
        if layout is not None and not isinstance(atom, Literal):
            due = tuple(Demand(due=True) if isinstance(p, Replicated) else NOTHING for p in layout)
            wanted[atom] = known.both(wanted[atom], known.wanted(due))
    return wanted


def wanted_of(
    first: Schedule,
    outputs: Sequence[Layout | None],
    outside: Sequence[tuple[Demand, ...]] | None,
    seen: Sequence[Layout],
    known: Situations,
    reschedule: Callable[..., Schedule],
) -> dict[Atom, Wanted]:
    """What the readers of each value want of it, seen from the end of the program."""
    backward = Backward(first, seen, known, reschedule)
    for i, (atom, layout) in enumerate(zip(first.program.outputs, outputs, strict=True)):
        for k in range(len(first.axes)):
            if layout is not None:
                backward.ask(atom, k, demand_for(layout[k]))
            if outside is not None:
                backward.ask(atom, k, outside[i][k])
    for step in reversed(first.steps):
        backward.visit(step)
    return backward.wanted


def demand_for(placement: Placement) -> Demand:
    match placement:
        case Split():
            return Demand((placement,))
        case Replicated():
            return Demand(full=True, due=True)
    return NOTHING


class Backward:
    def __init__(self, first: Schedule, seen: Sequence[Layout], known: Situations, reschedule: Callable[..., Schedule]):
        self.axes = first.axes
        self.known = known
        self.wanted = nothing_wanted(first.program, len(first.axes), known)
        self.nothing = (NOTHING,) * len(first.axes)
        self.uses = first.program.uses
        self.reschedule = reschedule
        self.homes: dict[Atom, Forms] = dict(zip(first.program.inputs, map(self.home, first.inputs), strict=True))
        self.homes.update(zip(first.program.inputs, map(self.home, seen), strict=False))
        rulings = {step.ruling for step in first.steps}
        homes = {ruling: tuple(map(self.home, ruling.seen)) for ruling in rulings}
        for step in first.steps:
            self.homes.update(zip(step.equation.outputs, homes[step.ruling], strict=True))
        self.program = first.program

    @functools.cached_property
    def producers(self) -> dict[Atom, Equation]:
        return {v: e for e in self.program.equations for v in e.outputs}

    def home(self, layout: Layout) -> Forms:
        """A value that is held in one layout, whoever wants it."""
        return self.known.forms((layout,), (layout,), self.known.wanted(self.nothing))

    def ask(self, atom: Atom, k: int, demand: Demand) -> None:
        if demand is NOTHING or isinstance(atom, Literal):
            return
        asked = self.known.wanted((*self.nothing[:k], demand, *self.nothing[k + 1 :]))
        self.wanted[atom] = self.known.both(self.wanted[atom], asked)

    def demand_only(self, atom: Atom, k: int, demand: Demand) -> None:
        """Replace whatever was asked before."""
        before = self.wanted[atom]
        demands = (*before.demands[:k], demand, *before.demands[k + 1 :])
        self.wanted[atom] = self.known.wanted(demands, before.several)

    def visit(self, step: Step) -> None:
        equation = step.equation
        if equation.bodies:
            control_flow.demand(self, step)
            return
        asked = map(self.wanted.get, equation.outputs)
        situation = (step.ruling, *map(self.homes.get, equation.inputs), *asked)
        requests = self.known.requests.get(situation)
        if requests is None:
            requests = self.known.requests[situation] = self.requests(step)
        for i, wanted in requests:
            atom = equation.inputs[i]
            self.wanted[atom] = self.known.both(self.wanted[atom], wanted)

    def requests(self, step: Step) -> tuple[tuple[int, Wanted], ...]:
        """What an equation wants of its operands, given what is wanted of its results."""
        found: dict[int, list[Demand]] = {}
        for k in range(len(self.axes)):
            for i, demand in self.along(step, k):
                value = step.equation.pattern[i]  # of `x * x` both operands are one value
                if value >= 0:
                    demands = found.setdefault(value, list(self.nothing))
                    demands[k] = demands[k] | demand
        return tuple((i, self.known.wanted(tuple(demands))) for i, demands in found.items())

    def along(self, step: Step, k: int) -> Iterator[tuple[int, Demand]]:
        """The same along axis k: an operand, and a demand."""
        equation = step.equation
        homes = [self.homes[a].home[k] if a in self.homes else REPLICATED for a in equation.inputs]
        meets_batch = any(map(is_batch, homes))
        for i, (home, layout) in enumerate(zip(homes, step.operands, strict=True)):
            target = layout[k]
            if isinstance(target, Split):
                yield i, Demand((target,))
            elif isinstance(target, Replicated) and (isinstance(home, Split) or (meets_batch and not is_batch(home))):
                yield i, Demand(full=True)
        if meets_batch:
            return
        summed_up = self.answer(equation, k, condensed)
        summed = sum(isinstance(h, Partial) for h in homes) if isinstance(step.results[0][k], Partial) else 1
        for r, demand in enumerate(self.wanted[v].demands[k] for v in equation.outputs):
            terms = demand.terms * max(summed, 1)
            for split in demand.splits[:2]:
                if trial := self.answer(equation, k, trial_for, r, split):
                    for i, placement in enumerate(trial.operands):
                        if isinstance(placement, Split):
                            yield i, Demand((placement,), terms=terms)
            full = demand.full and not isinstance(step.results[r][k], Split)  # a split result is gathered as it is
            if full or demand.any:
                for i in self.answer(equation, k, carried, r):
                    # of the sums of rows, little is to be gathered: nobody has to hold the rows whole for that
                    yield i, Demand(full=full and i not in summed_up, any=demand.any, terms=terms)
        for i in summed_up:
            yield i, Demand(any=True)

    def answer(self, equation: Equation, k: int, question: Callable[..., Any], *about: Any) -> Any:
        """Ask the rules, once for each kind of equation."""
        key = (equation.kind, k, question, *about, *(is_batch(p) for p in about if isinstance(p, Split)))
        if key not in self.known.answers:
            arrays, results = (tuple(a.array for a in atoms) for atoms in (equation.inputs, equation.outputs))
            # Shapes along the other axes do not matter for what is asked here: a trial on whole shapes will do.
            site = Site(equation.primitive, equation.params, arrays, results, self.axes[k].size)
            self.known.answers[key] = question(site, *about)
        return self.known.answers[key]
