"""Decide how every equation runs: the planner's half of the interpreter.

Two forward walks and one backward walk over the flat program, on placements alone:

  1. forward:  each equation's rule says what its operands must be and what its results are;
  2. backward: each value learns what its readers will want of it (`Preference`);
  3. forward again, now choosing among right answers the one that takes the least time, now and later (`price.py`).

The third walk is the schedule that `interpreter.py` runs. Because preferences are known, a gradient is reduced once,
straight into the split its optimizer state has; a random mask is drawn slice by slice; a weight is gathered where it
is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp

from ...core import compat
from ...core.layout import (
    PARTIAL,
    REPLICATED,
    Axis,
    Layout,
    Placement,
    Split,
    Varying,
    cut,
    fits,
    is_batch,
    put,
    whole,
)
from ...core.moves import cost
from ...core.program import Atom, Equation, Literal, Program, Var
from ...core.schedule import Bundle, Fallback, Ruling, Schedule, Step, Visit
from ...rules import Decision, Site, replicate, rule_for
from ...rules.contract import speaks_of_replicas
from . import inside, loops, microbatches
from .boundary import Boundary
from .in_loops import InLoops
from .meetings import Meetings
from .memo import Conversion, Memo, MemoKey, Outcome, Preferences
from .preferences import due_at_the_end, no_preferences, preferences_of
from .rule_queries import after, combinations, localise, nests, repeated, valid_decisions, work
from .values import Values

_DRAW = compat.primitive("random_bits")


def schedule(program: Program, axes: tuple[Axis, ...], boundary: Boundary, memo: Memo | None = None) -> Schedule:
    """Decide a program whose values enter and leave as the boundary says."""
    memo = Memo() if memo is None else memo
    due = due_at_the_end(program, boundary.outputs, len(axes), memo)
    first = Forward(program, axes, memo, due).run(boundary)
    preferences = preferences_of(first, boundary, memo, schedule)
    final = Forward(program, axes, memo, preferences).run(boundary)
    return replace(final, preferences=tuple(preferences[v].by_axis for v in program.inputs))


def remembered(program: Program, axes: tuple[Axis, ...], boundary: Boundary, memo: Memo) -> Schedule:
    """The same, decided once."""
    return memo.schedules.get((program, boundary), lambda: schedule(program, axes, boundary, memo))


class Forward(Values):
    """One forward walk."""

    def __init__(
        self,
        program: Program,
        axes: tuple[Axis, ...],
        memo: Memo,
        preferences: Mapping[Atom, Preferences] | None = None,
        draws: bool = True,
    ):
        super().__init__(axes, memo, no_preferences(program, len(axes), memo) if preferences is None else preferences)
        self.program = program
        self.draws = draws  # split random numbers that are drawn one row per example
        self.examples: dict[int, Layout] = {}  # how many examples the batch has, and how they are split
        self.drawn: tuple[tuple[int, Layout], ...] = ()  # those of what the step makes itself
        self.inside = False  # is this the body of a loop or branch?
        self.visits = False  # may examples go to weights?
        self.fallbacks: list[Fallback] = []
        self.hoisted: set[Atom] = set()  # what was gathered in front of the loop whose body this is
        self.meetings: Meetings | None = None

    def run(self, boundary: Boundary) -> Schedule:
        self.inside, self.visits, self.drawn = boundary.inside, boundary.visits, boundary.drawn
        self.meetings = Meetings() if boundary.notes_batch else None
        self.enter(boundary)
        steps: list[Step] = []
        transfers: list[tuple[Bundle, ...]] = []
        for equation in self.program.equations:
            step = self.decide_loop(equation) if equation.bodies else self.decide(equation)
            steps.append(step)
            transfers.append(self.moved_so_far() if self.moved else ())
            if step.ruling.gathered:
                self.split_again(equation)
        leaving = zip(self.program.outputs, boundary.outputs, strict=True)
        left = tuple(self.leave(*output, boundary.leaves_partial) for output in leaving)
        transfers.append(self.moved_so_far())
        return Schedule(
            self.program,
            self.axes,
            boundary.inputs,
            left,
            tuple(steps),
            tuple(transfers),
            tuple(self.fallbacks),
            met_batch=self.meetings.inputs(self.program) if self.meetings else frozenset(),
        )

    def enter(self, boundary: Boundary) -> None:
        self.shares = any(isinstance(p, Split) and not p.batch for layout in boundary.inputs for p in layout)
        for i, (var, held) in enumerate(zip(self.program.inputs, boundary.inputs, strict=True)):
            layout = boundary.seen[i] if i < len(boundary.seen) else held
            self.forms[var] = self.memo.forms((layout, held), (held,), self.preferences[var])
            if layout != held:
                self.hoisted.add(var)
            if any(map(is_batch, layout)):
                if self.meetings:
                    self.meetings.from_batch.add(var)
                self.examples.update((var.array.shape[p.dim], layout) for p in layout if isinstance(p, Split))
        self.examples.update(self.drawn)
        rows, everywhere = dict(self.drawn), whole(self.axes)
        for var, _ in self.program.constants:
            layout = rows.get(var.array.shape[0], everywhere) if var.array.ndim else everywhere
            self.forms[var] = self.memo.forms((layout, everywhere), (everywhere,), self.preferences[var])
            if self.meetings and layout != everywhere:
                self.meetings.from_batch.add(var)

    def leave(self, atom: Atom, layout: Layout | None, partial: bool) -> Layout:
        if layout is None:
            layout = self.primary(atom) if partial else at_rest(atom.array.shape, self.primary(atom), self.axes)
        return self.hold(atom, layout)

    @property
    def gathers_once(self) -> bool:
        """Does a loop over layers find them gathered? Not one that is inside of another."""
        return self.memo.in_loops.gathers_once and not self.inside

    @property
    def in_loops(self) -> InLoops:
        return self.memo.in_loops

    def body(self, program: Program, boundary: Boundary) -> Schedule:
        """Schedule the body of a loop or branch."""
        if self.drawn or self.in_loops.visits:
            boundary = replace(boundary, drawn=self.drawn, visits=self.in_loops.visits)
        return remembered(program, self.axes, boundary, self.memo)

    # -- one equation ---------------------------------------------------------------------------------------------

    def decide(self, equation: Equation) -> Step:
        key = self.key(equation)
        outcome = self.memo.outcomes.get(key)
        if outcome is None:
            outcome = self.outcome(equation)
            if not outcome.ruling.gathered:  # each fallback is noted with its own source line
                self.memo.outcomes[key] = outcome
        for i, source, target, forms in outcome.conversions:
            self.convert(equation.inputs[i], source, target, forms)
        if self.meetings:
            self.meetings.note(equation, equation.inputs if outcome.meets_batch else ())
            if equation.primitive is _DRAW and outcome.ruling.over_examples:
                self.meetings.from_batch.update(equation.outputs)
        self.forms.update(zip(equation.outputs, outcome.results, strict=True))
        return Step(equation, outcome.ruling)

    def key(self, equation: Equation) -> MemoKey:
        """Equal for equations that are decided alike: all that `outcome` looks at."""
        drawn = tuple(map(self.examples_of, equation.outputs)) if equation.primitive is _DRAW else None
        operands, results = map(self.forms.get, equation.inputs), map(self.preferences.get, equation.outputs)
        return (self.memo.kinds[equation], self.shares, self.inside, self.visits, drawn, *operands, *results)

    def outcome(self, equation: Equation) -> Outcome:
        """Decide an equation, and what that means for the values it reads and writes."""
        ruling = self.decide_by_axis(equation)
        forms = {a: self.forms[a] for a in equation.inputs if isinstance(a, Var)}
        conversions = []
        for i, (atom, layout) in enumerate(zip(equation.inputs, ruling.operands, strict=True)):
            if atom in forms and layout not in forms[atom].materialized:
                source = forms[atom].source(layout, atom.array, self.axes, self.memo.price)
                forms[atom] = self.memo.added(forms[atom], layout)
                conversions.append(Conversion(i, source, layout, forms[atom]))
        results = tuple(
            self.memo.forms(self.shown(v, seen, made), (made,), self.preferences[v])
            for v, seen, made in zip(equation.outputs, ruling.seen, ruling.results, strict=True)
        )
        return Outcome(ruling, tuple(conversions), results, any(is_batch(p) for f in forms.values() for p in f.primary))

    def shown(self, var: Var, seen: Layout, made: Layout) -> tuple[Layout, ...]:
        """The layouts in which readers see a result."""
        if not self.memo.sums_at_once or PARTIAL not in seen or not jnp.issubdtype(var.array.dtype, jnp.inexact):
            return seen, made
        return (tuple(REPLICATED if p == PARTIAL else p for p in seen),)

    def decide_loop(self, equation: Equation) -> Step:
        """Or a branch."""
        step = loops.decide(self, equation)
        for atom, layout in zip(equation.inputs, step.operands, strict=True):
            self.hold(atom, layout)
        if self.meetings:
            self.meetings.note(equation, [equation.inputs[i] for i in loops.met_batch(step)])
        for var, layout in zip(equation.outputs, step.results, strict=True):
            self.write(var, layout)
        return step

    def decide_by_axis(self, equation: Equation) -> Ruling:
        """Ask the rule axis by axis; what one axis decides is the local equation that the next axis sees."""
        arrays = tuple(a.array for a in equation.inputs)
        results = tuple(v.array for v in equation.outputs)
        site = Site(equation.primitive, equation.params, arrays, results, 1)
        per_axis: list[Decision] = []
        fallbacks = len(self.fallbacks)
        for k, axis in enumerate(self.axes):
            site = replace(site, n=axis.size, wants=tuple(self.want(equation, v, k) for v in equation.outputs))
            decision = self.choose(site, equation, per_axis)
            per_axis.append(decision)
            site = localise(site, decision)
        emits = [d.emit for d in per_axis if d.emit is not None]
        return Ruling(
            tuple(zip(*(d.operands for d in per_axis), strict=True)) if arrays else (),
            tuple(zip(*(d.results for d in per_axis), strict=True)),
            site.params,
            site.outputs,
            emits[-1] if emits else None,
            apart=all(d.apart for d in per_axis),
            fill=_fills([d.fill for d in per_axis if d.fill]),
            gathered=len(self.fallbacks) > fallbacks,
            visit=_visit(per_axis),
        )

    def choose(self, site: Site, equation: Equation, outer: Sequence[Decision]) -> Decision:
        """The best decision for the axis after those that decided already."""
        k = len(outer)
        options = [
            list(dict.fromkeys(after(outer, i, p, site) for p in self.options(a, k)))
            for i, a in enumerate(equation.inputs)
        ]
        held = [self.usable(a, k) for a in equation.inputs]
        price = self.memo.price
        byte = price.wire(1.0, k)
        works = price.peak is not None and inside.is_product_of_state(site, held)
        if works:
            options = [inside.more_splits(o, x, site.n) for o, x in zip(options, site.inputs, strict=True)]
        if all(o == [REPLICATED] for o in options) and not any(site.wants) and not speaks_of_replicas(site.primitive):
            return replicate(site)
        preferences = [self.preference(v, k) for v in equation.outputs]
        axis = self.axes[k]
        same = tuple(equation.inputs.index(a) for a in equation.inputs)  # x * x converts x once

        def yields(decision: Decision) -> bool:
            """Do the examples give way to split state? (An embedding split by features would gather all tokens.)"""
            pairs = [(home[0], target) for home, target in zip(held, decision.operands, strict=True)]
            gives_way = any(is_batch(home) and not is_batch(target) for home, target in pairs)
            return gives_way and not decision.visit and any(isinstance(t, Split) and not is_batch(t) for _, t in pairs)

        def score(decision: Decision) -> tuple[bool, float, float, bool]:
            targets = dict.fromkeys(zip(same, decision.operands, strict=True))
            moved = sum(min(cost(p, target, site.inputs[i], axis) for p in held[i]) for i, target in targets) + sum(
                preference.future(placement, array, axis)
                for preference, placement, array in zip(preferences, decision.results, site.outputs, strict=True)
            )
            seconds = moved * byte + repeated(site, decision)
            seconds += inside.work(site, decision, price) if works else 0.0
            shares = any(map(is_batch, decision.results))
            return yields(decision), seconds, work(site, decision), not shares

        def in_vain(decision: Decision) -> bool:
            """Loops gather a table once for all iterations, unless they are to be visited; a sum is reduced for the
            sake of its other terms too.
            """
            if decision.visit is None:
                return False
            waits = self.inside and not self.visits
            waits |= any(preference.terms > 1 for preference in preferences)
            return waits or (decision.visit.on_trial and not self.visits)

        best, best_score = None, (True, math.inf, math.inf, True)
        for placements in combinations(options):
            for decision in valid_decisions(site, placements):
                if in_vain(decision) or not nests(outer, decision):
                    continue
                if (found := score(decision)) < best_score and math.isfinite(found[1]):
                    best, best_score = decision, found
        if best is None:
            best = replicate(site)
            self.note_fallback(equation, site, held, best, axis)
        return best

    def note_fallback(
        self, equation: Equation, site: Site, held: list[list[Placement]], best: Decision, axis: Axis
    ) -> None:
        moved = sum(
            min(cost(p, target, array, axis) for p in placements)
            for placements, target, array in zip(held, best.operands, site.inputs, strict=True)
        )
        # what was gathered in front of this loop was gathered for the first equation that needs it whole
        for atom, placements in zip(equation.inputs, held, strict=True):
            if atom in self.hoisted:
                moved += cost(placements[0], REPLICATED, atom.array, axis)
                self.hoisted.discard(atom)
        had = ", ".join(sorted({str(p[0]) for p in held if p[0] != REPLICATED}))
        known = rule_for(site.primitive) is not None
        why = f"needs {had} operands whole" if known else f"no rule for this primitive; {had} operands are gathered"
        self.fallbacks.append(Fallback(str(site.primitive), why, moved, equation.line))

    def want(self, equation: Equation, var: Var, k: int) -> Split | None:
        """How the readers of a result would like it; numbers drawn for each example are drawn where the example is."""
        preference = self.preference(var, k)
        if all(isinstance(a, Literal) for a in equation.inputs):
            return None  # a constant becomes whatever is wanted of it, at no cost: block, term or whole
        if preference.splits and not preference.full:
            return preference.splits[0]
        examples = self.examples_of(var) if equation.primitive is _DRAW else None
        return split.on(0) if examples and isinstance(split := examples[k], Split) else None

    def examples_of(self, var: Var) -> Layout | None:
        """The layout of the batch that has as many examples as this value has rows."""
        return self.examples.get(var.array.shape[0]) if var.array.ndim and self.draws else None

    def split_again(self, equation: Equation) -> None:
        """Examples that an equation needed whole are split again after it (a free slice): its readers share them."""
        for k in range(len(self.axes)):
            examples = [(a, p.dim) for a in equation.inputs if isinstance(p := self.primary(a)[k], Split) and p.batch]
            for var in equation.outputs if examples else ():
                layout = self.forms[var].primary
                (gathered, dim), shape = examples[0], var.array.shape
                is_cut = microbatches.cuts(gathered.array.shape, shape, dim)  # (B, ...) -> (M, B // M, ...)
                dims = [d for d in ((dim, dim + 1) if is_cut else (dim,)) if d < len(shape)]
                splits = [Split(d, batch=True) for d in dims]
                if dims and len(self.axes) == 1 and shape[dims[-1]] > 1:  # shared with padding, if not evenly
                    splits.append(cut(shape, dims[-1], self.axes[k].size, batch=True))
                fitting = [again for s in splits if fits(shape, again := put(layout, k, s), self.axes)]
                if fitting and layout[k] == REPLICATED:
                    before = self.forms[var]
                    self.forms[var] = self.memo.forms(
                        (fitting[0], *before.visible), before.materialized, before.preferences
                    )


def _visit(per_axis: Sequence[Decision]) -> Visit | None:
    """Those who visit along one axis are at home along the others."""
    visiting = any(d.visit for d in per_axis)
    on_trial = any(d.visit and d.visit.on_trial for d in per_axis)
    return Visit(tuple(zip(*(d.seen for d in per_axis), strict=True)), on_trial) if visiting else None


def _fills(decided: Sequence[tuple[str | None, ...]]) -> tuple[str | None, ...]:
    """What some axis wants of the padding: a dimension that is padded along several is mixed along all or none."""
    return tuple(next((f for f in fills if f), None) for fills in zip(*decided, strict=True))


def at_rest(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> Layout:
    """The nearest layout that a value of this shape may keep outside the step.

    An inner axis divides the block that the outer ones leave: where one of those is gathered because it was padded, the
    inner split stays only if it divides what there is then.
    """
    resting: Layout = whole(axes)
    for k, placement in enumerate(layout):
        kept = put(resting, k, placement)
        if isinstance(placement, Varying) or (_rests(placement) and fits(shape, kept, axes)):
            resting = kept
    return resting


def _rests(placement: Placement) -> bool:
    """An ordinary array has equal blocks, in order. (State that is padded knows its layout beforehand.)"""
    return isinstance(placement, Split) and placement.outer == 1 and not placement.extent
