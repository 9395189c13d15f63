"""The backward walk: what the readers of each value want of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...core.layout import PARTIAL, REPLICATED, Layout, Partial, Placement, Replicated, Split, is_batch
from ...core.program import Atom, Equation, Literal, Program
from ...core.schedule import NO_PREFERENCE, Preference, Schedule, Step
from ...rules import Site
from . import loops
from .apart import Apart
from .boundary import Boundary
from .memo import Forms, Memo, Preferences
from .microbatches import PERMUTED, Reschedule, may_permute
from .rule_queries import carried, condensed, trial_for


def no_preferences(program: Program, count: int, memo: Memo) -> dict[Atom, Preferences]:
    """What is known of the readers of each value, along `count` axes, before they are asked."""
    one, several = (memo.preferences((NO_PREFERENCE,) * count, several) for several in (False, True))
    return {atom: several if uses > 1 else one for atom, uses in program.uses.items()}


def due_at_the_end(
    program: Program, outputs: Sequence[Layout | None], count: int, memo: Memo
) -> dict[Atom, Preferences]:
    """The same, if no reader was asked yet but it is known how the values leave."""
    preferences = no_preferences(program, count, memo)
    for atom, layout in zip(program.outputs, outputs, strict=True):
        if layout is not None and not isinstance(atom, Literal):
            due = tuple(Preference(due=True) if isinstance(p, Replicated) else NO_PREFERENCE for p in layout)
            preferences[atom] = memo.both(preferences[atom], memo.preferences(due))
    return preferences


def preferences_of(first: Schedule, boundary: Boundary, memo: Memo, reschedule: Reschedule) -> dict[Atom, Preferences]:
    """What the readers of each value want of it, seen from the end of the program."""
    backward = Backward(first, boundary, memo, reschedule)
    for i, (atom, layout) in enumerate(zip(first.program.outputs, boundary.outputs, strict=True)):
        for k in range(len(first.axes)):
            if layout is not None:
                backward.ask(atom, k, preference_for(layout[k]))
            if boundary.outside is not None:
                backward.ask(atom, k, boundary.outside[i][k])
    for step in reversed(first.steps):
        backward.visit(step)
    return backward.preferences


def preference_for(placement: Placement) -> Preference:
    match placement:
        case Split():
            return Preference((placement,))
        case Replicated():
            return Preference(full=True, due=True)
    return NO_PREFERENCE


class Backward:
    def __init__(self, first: Schedule, boundary: Boundary, memo: Memo, reschedule: Reschedule):
        self.axes = first.axes
        self.memo = memo
        self.preferences = no_preferences(first.program, len(first.axes), memo)
        self.nothing = (NO_PREFERENCE,) * len(first.axes)
        self.unasked = memo.preferences(self.nothing)
        self.uses = first.program.uses
        self.reschedule = reschedule
        self.forms: dict[Atom, Forms] = dict(zip(first.program.inputs, map(self.held_in, first.inputs), strict=True))
        self.forms.update(zip(first.program.inputs, map(self.held_in, boundary.seen), strict=False))
        rulings = {step.ruling for step in first.steps}
        forms = {ruling: tuple(map(self.held_in, ruling.seen)) for ruling in rulings}
        for step in first.steps:
            self.forms.update(zip(step.equation.outputs, forms[step.ruling], strict=True))
        self.program = first.program
        self.boundary = boundary

    @functools.cached_property
    def producers(self) -> dict[Atom, Equation]:
        return {v: e for e in self.program.equations for v in e.outputs}

    @functools.cached_property
    def apart(self) -> Apart:
        return Apart(self.axes, self.producers, self.uses, self.placed, self.answer, self.boundary.visits)

    def placed(self, atom: Atom, k: int) -> Placement:
        return self.forms[atom].primary[k] if atom in self.forms else REPLICATED

    def held_in(self, layout: Layout) -> Forms:
        """A value that is held in one layout, whatever its readers want."""
        return self.memo.forms((layout,), (layout,), self.unasked)

    def ask(self, atom: Atom, k: int, preference: Preference) -> None:
        if preference is NO_PREFERENCE or isinstance(atom, Literal):
            return
        asked = self.memo.preferences((*self.nothing[:k], preference, *self.nothing[k + 1 :]))
        self.preferences[atom] = self.memo.both(self.preferences[atom], asked)

    def prefer_only(self, atom: Atom, k: int, preference: Preference) -> None:
        """Replace whatever was asked before."""
        before = self.preferences[atom]
        preferences = (*before.by_axis[:k], preference, *before.by_axis[k + 1 :])
        self.preferences[atom] = self.memo.preferences(preferences, before.several)

    def visit(self, step: Step) -> None:
        equation = step.equation
        if equation.bodies:
            self.visit_bodies(step)
            return
        asked = map(self.preferences.get, equation.outputs)
        apart = tuple(self.comes_apart(step, k) for k in range(len(self.axes)))
        key = (step.ruling, *map(self.forms.get, equation.inputs), *asked, apart)
        requests = self.memo.requests.get(key)
        if requests is None:
            requests = self.memo.requests[key] = self.requests(step, apart)
        for i, preferences in requests:
            atom = equation.inputs[i]
            self.preferences[atom] = self.memo.both(self.preferences[atom], preferences)

    def visit_bodies(self, step: Step) -> None:
        """What the bodies of a loop or branch want of the values that enter them."""
        equation = step.equation
        for k in range(len(self.axes)):
            for atom, preference in zip(equation.inputs, loops.entering(step, k), strict=True):
                self.ask(atom, k, preference)
            scanned = loops.scanned_over(equation)
            if scanned and may_permute(self, step, k):
                for atom in scanned:
                    self.prefer_only(atom, k, Preference((PERMUTED,)))

    def comes_apart(self, step: Step, k: int) -> bool:
        """Is this a sum of terms that are better all made where it is wanted? Loops add up, and reduce once, unless
        weights are to be visited there.
        """
        waits = self.boundary.inside and not self.boundary.visits
        if waits or [layout[k] for layout in step.results] != [PARTIAL]:
            return False
        wanted = self.preferences[step.equation.outputs[0]].by_axis[k]
        several = [self.placed(a, k) for a in step.equation.inputs].count(PARTIAL) > 1
        return several and bool(wanted.splits) and self.apart.pays(step.equation, k, wanted.splits[0])

    def requests(self, step: Step, apart: Sequence[bool]) -> tuple[tuple[int, Preferences], ...]:
        """What an equation wants of its operands, given what is wanted of its results."""
        found: dict[int, list[Preference]] = {}
        for k in range(len(self.axes)):
            for i, preference in self.along(step, k, apart[k]):
                value = step.equation.pattern[i]  # of `x * x` both operands are one value
                if value >= 0:
                    preferences = found.setdefault(value, list(self.nothing))
                    preferences[k] = preferences[k] | preference
        return tuple((i, self.memo.preferences(tuple(preferences))) for i, preferences in found.items())

    def along(self, step: Step, k: int, apart: bool) -> Iterator[tuple[int, Preference]]:
        """The same along axis k: an operand, and a preference. The terms of what comes apart share no reduction."""
        equation = step.equation
        held = [self.placed(a, k) for a in equation.inputs]
        meets_batch = any(map(is_batch, held))
        stays = [not meets_batch and home == layout[k] for home, layout in zip(held, step.operands, strict=True)]
        for i, (home, layout) in enumerate(zip(held, step.operands, strict=True)):
            target = layout[k]
            if stays[i]:
                continue
            if isinstance(target, Split):
                yield i, Preference((target,))
            elif isinstance(target, Replicated) and (isinstance(home, Split) or (meets_batch and not is_batch(home))):
                yield i, Preference(full=True)
        if meets_batch and len(equation.outputs) == 1:
            return
        summed_up = self.answer(equation, k, condensed)
        sums = any(isinstance(layout[k], Partial) for layout in step.results[:1])  # a callback has no results
        summed = sum(isinstance(h, Partial) for h in held) if sums and not apart else 1
        for r, preference in enumerate(self.preferences[v].by_axis[k] for v in equation.outputs):
            if meets_batch and any(is_batch(held[i]) for i in self.answer(equation, k, carried, r)):
                continue  # of a barrier, the other results have nothing to do with the examples
            terms = preference.terms * max(summed, 1)
            for split in preference.splits[:2]:
                if trial := self.answer(equation, k, trial_for, r, split):
                    for i, placement in enumerate(trial.operands):
                        if isinstance(placement, Split):
                            yield i, Preference((placement,), terms=terms)
                elif not _enlarges(equation):
                    # No split leads there, so that a split result is on its way from another: of a sum that is copied
                    # into a stack, a split that moves again may be less than all copies.
                    for i in self.answer(equation, k, carried, r):
                        yield i, Preference(any=True, terms=terms)
            full = preference.full and not isinstance(step.results[r][k], Split)  # a split result is gathered as it is
            if full or preference.any:
                for i in self.answer(equation, k, carried, r):
                    # of the sums of rows, little is to be gathered: nobody has to hold the rows whole for that
                    yield i, Preference(full=full and i not in summed_up, any=preference.any, terms=terms)
        for i in () if meets_batch else summed_up:
            yield i, Preference(any=True)
        # What was left as it happened to lie is asked for last: readers of the results may know better.
        yield from ((i, preference_for(h)) for i, h in enumerate(held) if stays[i] and isinstance(h, Split))

    def answer(self, equation: Equation, k: int, question: Callable[..., Any], *about: Any) -> Any:
        """Ask the rules, once for each kind of equation."""

        def find_out() -> Any:
            arrays, results = (tuple(a.array for a in atoms) for atoms in (equation.inputs, equation.outputs))
            # Shapes along the other axes do not matter for what is asked here: a trial on whole shapes will do.
            site = Site(equation.primitive, equation.params, arrays, results, self.axes[k].size)
            return question(site, *about)

        return self.memo.answers.get((self.memo.kinds[equation], k, question, *about), find_out)


def _enlarges(equation: Equation) -> bool:
    """Are the results larger than what they are made of, as in a broadcast? Then the operands move instead."""
    read, made = (sum(math.prod(a.array.shape) for a in atoms) for atoms in (equation.inputs, equation.outputs))
    return made > read
