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
from typing import Any

from . import compat
from .collectives import cost, layout_cost
from .demands import demands_of
from .layout import (
    PARTIAL,
    REPLICATED,
    Array,
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
from .offers import combinations, localise, offers, work
from .program import Atom, Equation, Literal, Program, Var
from .rules import Decision, Site, control_flow, microbatches, replicate, rule_for
from .rules.core import speaks_of_replicas
from .schedule import NOTHING, Bundle, Demand, Fallback, Schedule, Step, Transfer

Demands = Mapping[Atom, tuple[Demand, ...]]


def schedule(
    program: Program,
    axes: tuple[Axis, ...],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout | None],
    wanted: Sequence[tuple[Demand, ...]] | None = None,
    raw: bool = False,
    seen: Sequence[Layout] = (),
    memo: dict[Any, Any] | None = None,
) -> Schedule:
    """Decide a program for given input layouts.

    An output of layout None is left as it comes (with `raw`, even partial). `wanted` adds what the surroundings of a
    loop body want of its results.
    """
    memo = {} if memo is None else memo
    first = Forward(program, axes, {}, memo).run(inputs, outputs, raw, seen)
    demands = demands_of(first, outputs, wanted, seen, memo, schedule)
    final = Forward(program, axes, demands, memo).run(inputs, outputs, raw, seen)
    none = (NOTHING,) * len(axes)
    return replace(final, demands=tuple(demands.get(v, none) for v in program.inputs))


def whole(axes: tuple[Axis, ...]) -> Layout:
    return (REPLICATED,) * len(axes)


class Forms:
    """The layouts in which one value may be read without communication.

    `held` are those that readers are shown (first the one they should see first); `present` are those that replicas
    have in memory. The two differ where a free slice is not made before somebody reads it.
    """

    __slots__ = ("held", "present")

    def __init__(self, layout: Layout, *others: Layout, present: Layout | None = None):
        self.held: list[Layout] = [layout, *(f for f in others if f != layout)]
        self.present: list[Layout] = [layout if present is None else present]

    @property
    def home(self) -> Layout:
        """The layout that readers see first. Once reduced, a value is never seen partial again."""
        return self.living()[0]

    def living(self) -> list[Layout]:
        if len(self.held) == 1:
            return self.held
        reduced = [f for f in self.held if not any(isinstance(p, Partial) for p in f)]
        return reduced or list(self.held)

    def source(self, target: Layout, array: Array, axes: tuple[Axis, ...]) -> Layout:
        """The layout in memory from which `target` is cheapest."""
        if target in self.present:
            return target
        if len(self.present) == 1:
            return self.present[0]
        return min(self.present, key=lambda f: layout_cost(f, target, array, axes))

    def add(self, layout: Layout) -> None:
        self.present.append(layout)
        if layout not in self.held:
            self.held.append(layout)


class Forward:
    """One forward walk."""

    def __init__(
        self, program: Program, axes: tuple[Axis, ...], demands: Demands, memo: dict[Any, Any], draws: bool = True
    ):
        self.program = program
        self.memo = memo  # decisions taken before, by kind of equation
        self.draws = draws  # split random numbers that are drawn one row per example
        self.examples: dict[int, Layout] = {}  # how many examples the batch has, and how they are split
        self.axes = axes
        self.shares = False  # does any state rest split? If not, this is the replicated program: it all-reduces
        self.demands = demands
        self.forms: dict[Var, Forms] = {}
        self.uses = program.uses
        self.transfers: list[list[Bundle]] = [[]]  # those in front of the step that is being decided come last
        self.fallbacks: list[Fallback] = []
        self.origins: dict[Var, int] = {}  # bit i: computed from input i alone, examples apart
        self.from_batch: set[Var] = set()
        self.met: int = 0

    def run(
        self, inputs: Sequence[Layout], outputs: Sequence[Layout | None], raw: bool, seen: Sequence[Layout] = ()
    ) -> Schedule:
        self.shares = any(isinstance(p, Split) and not p.batch for layout in inputs for p in layout)
        for i, (var, held) in enumerate(zip(self.program.inputs, inputs, strict=True)):
            layout = seen[i] if i < len(seen) else held
            self.forms[var] = Forms(layout, held, present=held)
            if any(map(is_batch, layout)):
                self.from_batch.add(var)
                self.examples.update((var.array.shape[p.dim], layout) for p in layout if isinstance(p, Split))
            else:
                self.origins[var] = 1 << i
        for var, _ in self.program.constants:
            self.forms[var] = Forms(whole(self.axes))
        steps = []
        for equation in self.program.equations:
            step = self.decide(equation)
            self.transfers.append([])
            if raw:  # asked of bodies and of the unsharded walk only, which leave their outputs as they come
                self.note_origins(equation, step)
            for var, layout in zip(equation.outputs, step.results, strict=True):
                self.forms[var] = Forms(layout)
            if step.gathered:
                self.split_again(equation)
            steps.append(step)
        left = tuple(self.leave(*output, raw) for output in zip(self.program.outputs, outputs, strict=True))
        met = frozenset(i for i in range(len(inputs)) if self.met >> i & 1)
        return Schedule(
            self.program,
            self.axes,
            tuple(inputs),
            left,
            tuple(steps),
            tuple(map(tuple, self.transfers)),
            tuple(self.fallbacks),
            met_batch=met,
        )

    def leave(self, atom: Atom, layout: Layout | None, raw: bool) -> Layout:
        if layout is None:
            layout = self.home(atom) if raw else at_rest(self.home(atom))
        return self.hold(atom, layout)

    def body(
        self,
        program: Program,
        inputs: Sequence[Layout],
        outputs: Sequence[Layout | None],
        wanted: Sequence[tuple[Demand, ...]] | None = None,
        seen: Sequence[Layout] = (),
    ) -> Schedule:
        """Schedule the body of a loop or branch. `seen`: the layouts in which readers see the first inputs first."""
        return schedule(program, self.axes, inputs, outputs, wanted, raw=True, seen=seen, memo=self.memo)

    # -- one equation ---------------------------------------------------------------------------------------------

    def decide(self, equation: Equation) -> Step:
        step = control_flow.decide(self, equation) if equation.bodies else self.decide_simple(equation)
        for atom, layout in zip(equation.inputs, step.operands, strict=True):
            if isinstance(atom, Var) and layout not in self.forms[atom].present:
                self.hold(atom, layout)
        return step

    def decide_simple(self, equation: Equation) -> Step:
        """Steps repeat themselves: every leaf goes through the same optimizer, every layer through the same block."""
        situation = self.situation(equation)
        known = self.memo.get(situation)
        if known is None:
            known = self.decide_by_axis(equation)
            if not known.gathered:  # each fallback is noted with its own source line
                self.memo[situation] = known
        return known.of(equation)

    def situation(self, equation: Equation) -> Any:
        """Equal for equations that are decided alike: all that `choose` looks at."""
        drawn = is_draw(equation) and tuple(self.examples_of(v) for v in equation.outputs)
        operands, results = [self.view(a) for a in equation.inputs], [self.asked(v) for v in equation.outputs]
        return equation.kind, tuple(operands), tuple(results), drawn, self.shares

    def view(self, atom: Atom) -> Any:
        """A value as `choose` sees it."""
        if isinstance(atom, Literal):
            return None
        held = self.forms[atom].living()
        return tuple(held), tuple([is_batch(p) for f in held for p in f]), self.asked(atom), self.uses[atom] > 1

    def asked(self, atom: Atom) -> Any:
        """What is wanted of a value, with what equality leaves out: whether a split carries the examples."""
        demands = self.demands.get(atom)
        return demands and (demands, tuple([s.batch for d in demands for s in d.splits]))

    def decide_by_axis(self, equation: Equation) -> Step:
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
        return Step(
            equation,
            tuple(zip(*(d.operands for d in per_axis), strict=True)) if arrays else (),
            tuple(zip(*(d.results for d in per_axis), strict=True)),
            site.params,
            emits[-1] if emits else None,
            apart=all(d.apart for d in per_axis),
            fill=_fills([d.fill for d in per_axis if d.fill]),
            gathered=len(self.fallbacks) > fallbacks,
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
            return gives_way and any(isinstance(t, Split) and not is_batch(t) for _, t in pairs)

        def score(decision: Decision) -> tuple[bool, float, float]:
            targets = dict.fromkeys(zip(same, decision.operands, strict=True))
            moved = sum(min(cost(p, target, site.inputs[i], axis) for p in held[i]) for i, target in targets) + sum(
                demand.future(placement, array, axis)
                for demand, placement, array in zip(demands, decision.results, site.outputs, strict=True)
            )
            return yields(decision), moved, work(site, decision)

        best, best_score = None, (True, math.inf, math.inf)
        for placements in combinations(options):
            for decision in offers(site, placements):
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
        return list(dict.fromkeys(f[k] for f in self.forms[atom].living()))

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
        if isinstance(home, Partial) and self.uses[atom] > 1:
            # reduced once for all its readers, not once behind each of them
            reduced: list[Placement] = [p for p in found if p != home]
            found = (reduced or ([REPLICATED] if demand.full else [])) + [home]
        return found

    def some_split(self, atom: Var, k: int) -> list[Placement]:
        splits: list[Placement] = [Split(d) for d in range(atom.array.ndim)]
        return [s for s in splits if fits(atom.array.shape, put(self.home(atom), k, s), self.axes)][:1]

    def demand(self, var: Atom, k: int) -> Demand:
        found = self.demands.get(var)
        return found[k] if found else NOTHING

    def want(self, equation: Equation, var: Var, k: int) -> Split | None:
        """How the readers of a result would like it; numbers drawn for each example are drawn where the example is."""
        demand = self.demand(var, k)
        if all(isinstance(a, Literal) for a in equation.inputs):
            return None  # a constant becomes whatever is wanted of it, at no cost: block, term or whole
        if demand.splits and not demand.full:
            return demand.splits[0]
        examples = self.examples_of(var) if is_draw(equation) else None
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
                    self.forms[var].held.insert(0, fitting[0])

    def hold(self, atom: Atom, target: Layout) -> Layout:
        """Convert a value for its reader, and remember that it is now held this way too."""
        if isinstance(atom, Literal):
            return target
        forms = self.forms[atom]
        source = forms.source(target, atom.array, self.axes)
        if source != target:
            self.transfers[-1].append((Transfer(atom, source, target),))
            forms.add(target)
        return target

    def price(self, atom: Atom, target: Layout) -> float:
        """Bytes on the wire to hold a value in this layout."""
        if isinstance(atom, Literal):
            return 0.0
        forms = self.forms[atom]
        return layout_cost(forms.source(target, atom.array, self.axes), target, atom.array, self.axes)

    # -- who meets the examples -----------------------------------------------------------------------------------

    def note_origins(self, equation: Equation, step: Step) -> None:
        """Which inputs is a value made of, and which of them met the examples? That is what makes a weight a weight."""
        variables = [a for a in equation.inputs if isinstance(a, Var)]
        if equation.bodies:
            meeting = [equation.inputs[i] for i in control_flow.met_batch(step)]
        else:
            meets = any(is_batch(p) for v in variables for p in self.forms[v].home)
            meeting = list(variables) if meets else []
        for atom in meeting:
            self.met |= self.origins.get(atom, 0) if isinstance(atom, Var) else 0
        if any(v in self.from_batch for v in variables) or not step.results:
            self.from_batch.update(equation.outputs)
        else:
            origins = 0
            for v in variables:
                origins |= self.origins.get(v, 0)
            self.origins.update(dict.fromkeys(equation.outputs, origins))


def _fills(decided: Sequence[tuple[str | None, ...]]) -> tuple[str | None, ...]:
    """What some axis wants of the padding: a dimension that is padded along several is mixed along all or none."""
    return tuple(next((f for f in fills if f), None) for fills in zip(*decided, strict=True))


def is_draw(equation: Equation) -> bool:
    return equation.primitive is compat.primitive("random_bits")


def at_rest(layout: Layout) -> Layout:
    """The nearest layout that a value may keep outside the step."""
    return tuple(p if isinstance(p, Replicated | Varying) or _rests(p) else REPLICATED for p in layout)


def _rests(placement: Placement) -> bool:
    """An ordinary array has equal blocks, in order. (State that is padded knows its layout beforehand.)"""
    return isinstance(placement, Split) and placement.outer == 1 and not placement.extent
