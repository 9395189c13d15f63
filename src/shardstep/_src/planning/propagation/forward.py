"""Decide how every equation runs: the planner's half of the interpreter.

Two forward walks and one backward walk over the flat program, on placements alone:

  1. forward:  each equation's rule says what its operands must be and what its results are;
  2. backward: each value learns what its readers will want of it (`Demand`);
  3. forward again, now choosing among right answers the one that moves the fewest bytes, now and later.

The third walk is the schedule that `interpreter.py` runs. Because demands are known, a gradient is reduced once,
straight into the split its optimizer state has; a random mask is drawn slice by slice; a weight is gathered where it
is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core import compat
from ...core.layout import (
    PARTIAL,
    REPLICATED,
    Axis,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    fits,
    is_batch,
    put,
)
from ...core.moves import cost, layout_cost
from ...core.program import Atom, Equation, Literal, Program, Var
from ...core.schedule import NOTHING, Bundle, Demand, Fallback, Ruling, Schedule, Step, Transfer
from ...rules import Decision, Site, replicate, rule_for
from ...rules.contract import speaks_of_replicas
from . import loops as control_flow
from . import microbatches
from .memo import Conversion, Forms, Outcome, Situation, Situations, Wanted, carry_examples
from .preferences import due_at_the_end, nothing_wanted, wanted_of
from .rule_queries import combinations, localise, offers, work

_DRAW = compat.primitive("random_bits")


def schedule(
    program: Program,
    axes: tuple[Axis, ...],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout | None],
    outside: Sequence[tuple[Demand, ...]] | None = None,
    raw: bool = False,
    seen: Sequence[Layout] = (),
    known: Situations | None = None,
) -> Schedule:
    """Decide a program for given input layouts.

    An output of layout None is left as it comes (with `raw`, even partial). `outside` adds what the surroundings of a
    loop body want of its results.
    """
    known = Situations() if known is None else known
    due = due_at_the_end(program, outputs, len(axes), known)
    first = Forward(program, axes, known, due).run(inputs, outputs, raw, seen)
    wanted = wanted_of(first, outputs, outside, seen, known, schedule)
    final = Forward(program, axes, known, wanted).run(inputs, outputs, raw, seen)
    return replace(final, demands=tuple(wanted[v].demands for v in program.inputs))


def whole(axes: tuple[Axis, ...]) -> Layout:
    return (REPLICATED,) * len(axes)


class Forward:
    """One forward walk."""

    def __init__(
        self,
        program: Program,
        axes: tuple[Axis, ...],
        known: Situations,
        wanted: Mapping[Atom, Wanted] | None = None,
        draws: bool = True,
    ):
        self.program = program
        self.axes = axes
        self.known = known
        self.wanted = nothing_wanted(program, len(axes), known) if wanted is None else wanted
        self.draws = draws  # split random numbers that are drawn one row per example
        self.examples: dict[int, Layout] = {}  # how many examples the batch has, and how they are split
        self.inside = False  # is this the body of a loop or branch?
        self.shares = False  # does any state rest split? If not, this is the replicated program: it all-reduces
        self.forms: dict[Atom, Forms] = {}
        self.moved: list[Bundle] = []  # in front of the step that is being decided
        self.fallbacks: list[Fallback] = []
        self.from_batch: set[Atom] = set()  # values that are computed from the examples
        self.meeting: set[Atom] = set()  # values that are read together with them

    def run(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], raw: bool, seen: Sequence[Layout] = ()
    ) -> Schedule:
        self.inside = raw
        self.enter(inputs, seen)
        steps: list[Step] = []
        transfers: list[tuple[Bundle, ...]] = []
        for equation in self.program.equations:
            step = self.decide_loop(equation) if equation.bodies else self.decide(equation, raw)
            steps.append(step)
            transfers.append(self.moved_so_far())
            if step.ruling.gathered:
                self.split_again(equation)
        left = tuple(self.leave(*output, raw) for output in zip(self.program.outputs, outputs, strict=True))
        transfers.append(self.moved_so_far())
        return Schedule(
            self.program,
            self.axes,
            tuple(inputs),
            left,
            tuple(steps),
            tuple(transfers),
            tuple(self.fallbacks),
            met_batch=self.met_batch() if raw else frozenset(),
        )

    def enter(self, inputs: Sequence[Layout], seen: Sequence[Layout]) -> None:
        self.shares = any(isinstance(p, Split) and not p.batch for layout in inputs for p in layout)
        for i, (var, held) in enumerate(zip(self.program.inputs, inputs, strict=True)):
            layout = seen[i] if i < len(seen) else held
            self.forms[var] = self.known.forms((layout, held), (held,), self.wanted[var])
            if any(map(is_batch, layout)):
                self.from_batch.add(var)
                self.examples.update((var.array.shape[p.dim], layout) for p in layout if isinstance(p, Split))
        for var, _ in self.program.constants:
            self.write(var, whole(self.axes))

    def leave(self, atom: Atom, layout: Layout | None, raw: bool) -> Layout:
        if layout is None:
            layout = self.home(atom) if raw else at_rest(self.home(atom))
        return self.hold(atom, layout)

    def moved_so_far(self) -> tuple[Bundle, ...]:
        if not self.moved:
            return ()
        moved, self.moved = tuple(self.moved), []
        return moved

    def body(
        self,
        program: Program,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout | None],
        outside: Sequence[tuple[Demand, ...]] | None = None,
        seen: Sequence[Layout] = (),
    ) -> Schedule:
        """Schedule the body of a loop or branch. `seen`: the layouts in which readers see the first inputs first."""
        placements = [p for layout in (*inputs, *outputs, *seen) for p in layout or ()]
        placements += [s for demands in outside or () for demand in demands for s in demand.splits]
        given = tuple(inputs), tuple(outputs), None if outside is None else tuple(outside), tuple(seen)
        situation = (program, *given, carry_examples(placements))
        if situation not in self.known.bodies:
            decided = schedule(program, self.axes, inputs, outputs, outside, raw=True, seen=seen, known=self.known)
            self.known.bodies[situation] = decided
        return self.known.bodies[situation]

    # -- one equation ---------------------------------------------------------------------------------------------

    def decide(self, equation: Equation, raw: bool) -> Step:
        situation = self.situation(equation)
        outcome = self.known.outcomes.get(situation)
        if outcome is None:
            outcome = self.outcome(equation)
            if not outcome.ruling.gathered:  # each fallback is noted with its own source line
                self.known.outcomes[situation] = outcome
        for i, source, target, forms in outcome.conversions:
            self.convert(equation.inputs[i], source, target, forms)
        if raw:  # asked of bodies and of the unsharded walk only, which leave their outputs as they come
            self.note_batch(equation, equation.inputs if outcome.meets_batch else ())
        self.forms.update(zip(equation.outputs, outcome.results, strict=True))
        return Step(equation, outcome.ruling)

    def situation(self, equation: Equation) -> Situation:
        """Equal for equations that are decided alike: all that `outcome` looks at."""
        drawn = tuple(map(self.examples_of, equation.outputs)) if equation.primitive is _DRAW else None
        operands, results = map(self.forms.get, equation.inputs), map(self.wanted.get, equation.outputs)
        return (equation.kind, self.shares, self.inside, drawn, *operands, *results)

    def outcome(self, equation: Equation) -> Outcome:
        """Decide an equation, and what that means for the values it reads and writes."""
        ruling = self.decide_by_axis(equation)
        forms = {a: self.forms[a] for a in equation.inputs if isinstance(a, Var)}
        conversions = []
        for i, (atom, layout) in enumerate(zip(equation.inputs, ruling.operands, strict=True)):
            if atom in forms and layout not in forms[atom].present:
                source = forms[atom].source(layout, atom.array, self.axes)
                forms[atom] = self.known.added(forms[atom], layout)
                conversions.append(Conversion(i, source, layout, forms[atom]))
        results = tuple(
            self.known.forms((seen, made), (made,), self.wanted[v])
            for v, seen, made in zip(equation.outputs, ruling.seen, ruling.results, strict=True)
        )
        return Outcome(ruling, tuple(conversions), results, any(is_batch(p) for f in forms.values() for p in f.home))

    def decide_loop(self, equation: Equation) -> Step:
        """Or a branch."""
        step = control_flow.decide(self, equation)
        for atom, layout in zip(equation.inputs, step.operands, strict=True):
            self.hold(atom, layout)
        self.note_batch(equation, [equation.inputs[i] for i in control_flow.met_batch(step)])
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
            decision = self.choose(site, equation, k)
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
            visits=any(d.visits for d in per_axis),
            homes=tuple(zip(*(d.homes or d.results for d in per_axis), strict=True)),
        )

    def choose(self, site: Site, equation: Equation, k: int) -> Decision:
        options = [self.options(a, k) for a in equation.inputs]
        held = [self.held(a, k) for a in equation.inputs]
        if all(o == [REPLICATED] for o in options) and not any(site.wants) and not speaks_of_replicas(site.primitive):
            return replicate(site)
        demands = [self.demand(v, k) for v in equation.outputs]
        axis = self.axes[k]
        same = tuple(equation.inputs.index(a) for a in equation.inputs)  # x * x converts x once

        def yields(decision: Decision) -> bool:
            """Do the examples give way to split state? (An embedding split by features would gather all tokens.)"""
            pairs = [(home[0], target) for home, target in zip(held, decision.operands, strict=True)]
            gives_way = any(is_batch(home) and not is_batch(target) for home, target in pairs)
            return gives_way and not decision.visits and any(isinstance(t, Split) and not is_batch(t) for _, t in pairs)

        def score(decision: Decision) -> tuple[bool, float, float]:
            targets = dict.fromkeys(zip(same, decision.operands, strict=True))
            moved = sum(min(cost(p, target, site.inputs[i], axis) for p in held[i]) for i, target in targets) + sum(
                demand.future(placement, array, axis)
                for demand, placement, array in zip(demands, decision.results, site.outputs, strict=True)
            )
            return yields(decision), moved, work(site, decision)

        def in_vain(decision: Decision) -> bool:
            """A loop gathers a table once for all iterations; a sum is reduced for the sake of its other terms too."""
            return decision.visits and (self.inside or any(demand.terms > 1 for demand in demands))

        best, best_score = None, (True, math.inf, math.inf)
        for placements in combinations(options):
            for decision in offers(site, placements):
                if in_vain(decision):
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
        had = ", ".join(sorted({str(p[0]) for p in held if p[0] != REPLICATED}))
        known = rule_for(site.primitive) is not None
        why = f"needs {had} operands whole" if known else f"no rule for this primitive; {had} operands are gathered"
        self.fallbacks.append(Fallback(str(site.primitive), why, moved, equation.line))

    # -- values ---------------------------------------------------------------------------------------------------

    def home(self, atom: Atom) -> Layout:
        return whole(self.axes) if isinstance(atom, Literal) else self.forms[atom].home

    def held(self, atom: Atom, k: int) -> list[Placement]:
        if isinstance(atom, Literal):
            return [REPLICATED]
        found = list(dict.fromkeys(f[k] for f in self.forms[atom].living))
        if self.due(atom, k) and REPLICATED not in found:
            found.append(REPLICATED)
        return found

    def due(self, atom: Atom, k: int) -> bool:
        """Will this block of state be gathered in any case? A new weight that another network follows, say."""
        home = self.home(atom)[k]
        return isinstance(home, Split) and not home.batch and self.demand(atom, k).due

    def options(self, atom: Atom, k: int) -> list[Placement]:
        """The placements in which an operand may be offered to a rule: as it is held, or as its readers want it."""
        if isinstance(atom, Literal):
            return [REPLICATED]
        found = self.held(atom, k)
        demand = self.demand(atom, k)
        home = found[0]
        if is_batch(home):
            return [home]  # work on examples is shared, even where they happen to be held whole as well
        if isinstance(home, Replicated | Partial) and demand.splits:
            found = found + [s for s in demand.splits[:2] if s not in found]
        if home == PARTIAL and self.shares and demand.any and not (demand.splits or demand.full):
            found = found + self.some_split(atom, k)  # a norm of it is all that is read: half an all-reduce will do
        if isinstance(home, Partial) and self.wanted[atom].several:
            # reduced once for all its readers, not once behind each of them
            reduced: list[Placement] = [p for p in found if p != home]
            found = (reduced or ([REPLICATED] if demand.full else [])) + [home]
        return found

    def some_split(self, atom: Var, k: int) -> list[Placement]:
        splits: list[Placement] = [Split(d) for d in range(atom.array.ndim)]
        return [s for s in splits if fits(atom.array.shape, put(self.home(atom), k, s), self.axes)][:1]

    def demand(self, atom: Atom, k: int) -> Demand:
        return NOTHING if isinstance(atom, Literal) else self.wanted[atom].demands[k]

    def want(self, equation: Equation, var: Var, k: int) -> Split | None:
        """How the readers of a result would like it; numbers drawn for each example are drawn where the example is."""
        demand = self.demand(var, k)
        if all(isinstance(a, Literal) for a in equation.inputs):
            return None  # a constant becomes whatever is wanted of it, at no cost: block, term or whole
        if demand.splits and not demand.full:
            return demand.splits[0]
        examples = self.examples_of(var) if equation.primitive is _DRAW else None
        return split.on(0) if examples and isinstance(split := examples[k], Split) else None

    def examples_of(self, var: Var) -> Layout | None:
        """How the batch lies that has as many examples as this value has rows."""
        return self.examples.get(var.array.shape[0]) if var.array.ndim and self.draws else None

    def split_again(self, equation: Equation) -> None:
        """Examples that an equation needed whole are split again behind it (a free slice): its readers share them."""
        for k in range(len(self.axes)):
            examples = [(a, p.dim) for a in equation.inputs if isinstance(p := self.home(a)[k], Split) and p.batch]
            for var in equation.outputs if examples else ():
                layout = self.forms[var].home
                (whole, dim), shape = examples[0], var.array.shape
                cut = microbatches.cuts(whole.array.shape, shape, dim)  # (B, ...) -> (M, B // M, ...)
                splits = [Split(d, batch=True) for d in ((dim, dim + 1) if cut else (dim,))]
                fitting = [again for s in splits if fits(shape, again := put(layout, k, s), self.axes)]
                if fitting and layout[k] == REPLICATED:
                    before = self.forms[var]
                    self.forms[var] = self.known.forms((fitting[0], *before.held), before.present, before.wanted)

    def write(self, var: Var, layout: Layout) -> None:
        self.forms[var] = self.known.forms((layout,), (layout,), self.wanted[var])

    def hold(self, atom: Atom, target: Layout) -> Layout:
        """Convert a value for its reader, and remember that it is now held this way too."""
        if isinstance(atom, Var) and target not in (forms := self.forms[atom]).present:
            source = forms.source(target, atom.array, self.axes)
            self.convert(atom, source, target, self.known.added(forms, target))
        return target

    def convert(self, atom: Atom, source: Layout, target: Layout, forms: Forms) -> None:
        assert isinstance(atom, Var)
        self.moved.append((Transfer(atom, source, target),))
        self.forms[atom] = forms

    def price(self, atom: Atom, target: Layout) -> float:
        """Bytes on the wire to hold a value in this layout."""
        if isinstance(atom, Literal):
            return 0.0
        forms = self.forms[atom]
        return layout_cost(forms.source(target, atom.array, self.axes), target, atom.array, self.axes)

    # -- who meets the examples -----------------------------------------------------------------------------------

    def note_batch(self, equation: Equation, meeting: Sequence[Atom]) -> None:
        """Which values come from the examples, and which meet them? That is what makes a weight a weight."""
        self.meeting.update(meeting)
        if not self.from_batch.isdisjoint(equation.inputs):
            self.from_batch.update(equation.outputs)

    def met_batch(self) -> frozenset[int]:
        """The inputs that met the examples, or that a value was made of, examples apart, which did."""
        reached = self.meeting - self.from_batch
        for equation in reversed(self.program.equations):
            if not reached.isdisjoint(equation.outputs):
                reached.update(a for a in equation.inputs if a not in self.from_batch)
        return frozenset(i for i, var in enumerate(self.program.inputs) if var in reached)


def _fills(decided: Sequence[tuple[str | None, ...]]) -> tuple[str | None, ...]:
    """What some axis wants of the padding: a dimension that is padded along several is mixed along all or none."""
    return tuple(next((f for f in fills if f), None) for fills in zip(*decided, strict=True))


def at_rest(layout: Layout) -> Layout:
    """The nearest layout that a value may keep outside the step."""
    return tuple(p if isinstance(p, Replicated | Varying) or _rests(p) else REPLICATED for p in layout)


def _rests(placement: Placement) -> bool:
    """An ordinary array has equal blocks, in order. (State that is padded knows its layout beforehand.)"""
    return isinstance(placement, Split) and placement.outer == 1 and not placement.extent
