"""Which values are the examples? Where the user did not say, what sends and computes least.

The rewrite is right for every choice, so that a choice can only be dear, never wrong. A classifier's batch has one
leading size, and shares all products without being moved: it is taken at once. Whatever else there is (a teacher's
weights among the arguments, nodes and edges, time before examples, data that the step draws itself) is planned with and
without, and compared.

The update has no say: its products are shared out later, however the examples are split (`ownership.py`). Planned as it
is here, repeated by everyone, it would speak for splitting features, since gradients are then split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from ..capture.arguments import shape_of
from ..capture.batch import Examples, Unit
from ..capture.step import Captured
from ..core.layout import Array, Axis, Layout, block_shape, is_batch, joined, whole
from ..core.program import Equation
from ..core.schedule import Schedule, Step
from ..machine.replicas import Replicas
from ..machine.topology import Topology
from .flops import multiplies
from .propagation.boundary import Boundary
from .propagation.forward import remembered
from .propagation.memo import Memo
from .propagation.price import multiplying
from .roles import drawn_of, examples_of
from .update_work import update_of

_MOST_TRIED = 24
_WORTH_DRAWING = 0.8
_OTHERWISE = "Say otherwise with batch_argnums=, batch_argnames= and batch_axis="


def choose_batch(captured: Captured, replicas: Replicas, memo: Memo) -> Captured:
    """The step with its examples where they cost least. `memo`: of all replicas as one axis."""
    if captured.axis_name is not None or (captured.batch and not captured.examples.units):
        return captured
    search = _Search(captured, replicas, memo)
    return captured.with_examples(search.run())


@dataclass(frozen=True)
class Cost:
    """What a layout of the batch costs per replica."""

    sent: float  # bytes
    seconds: float  # no latencies, no overlap: to compare with, not to promise


def cost_of(captured: Captured, decided: Schedule, topology: Topology, update: AbstractSet[Equation]) -> Cost:
    """Reduced gradients are not counted: they are the price of sharing examples at all, whichever values those are."""
    inputs = captured.program.inputs
    weights = {inputs[i].array.shape for i in captured.state}
    sent = sum(c.total for c in decided.collectives if c.kind != "all-reduce" or c.shape not in weights)
    blocks = (
        block_shape(v.array.shape, layout, decided.axes) for v, layout in zip(inputs, decided.inputs, strict=True)
    )
    held = sum(Array(block, v.array.dtype).nbytes for v, block in zip(inputs, blocks, strict=True))
    products = sum(t * multiplying(step, decided.axes, topology.chip.peak) for step, t in _steps(decided, update))
    # Passes count by what they make: a lookup reads few rows of a table, however large that is. What is split is also
    # smaller at rest; that decides between choices that are otherwise alike.
    made = sum(t * step.ruling.bytes_made for step, t in _steps(decided, update))
    passes = (made + 0.01 * held) / topology.chip.memory
    return Cost(sent, sent / min(ring.rate for ring in topology.rings) + products + passes)


def _steps(decided: Schedule, update: AbstractSet[Equation]) -> Iterator[tuple[Step, int]]:
    """What is not the update, and how often it runs: instead of loops and branches, what they hold."""
    for step in decided.steps:
        if step.equation in update:
            continue
        if not step.bodies:
            yield step, 1
        for body, times in zip(step.bodies, step.times, strict=True):
            yield from ((inside, times * t) for inside, t in _steps(body, update))


class _Search:
    """Choices are planned as the replicated step would run: state whole, gradients all-reduced."""

    def __init__(self, captured: Captured, replicas: Replicas, memo: Memo):
        self.captured, self.replicas, self.memo = captured, replicas, memo
        self.axes = (joined(replicas.axes),)
        self.costs: dict[frozenset[Unit], Cost] = {}
        self.plans: dict[frozenset[Unit], Schedule] = {}

    def run(self) -> Examples:
        given = [u for u in self.captured.examples.units if u.inputs]
        drawn = [u for u in self.captured.examples.units if u.drawn]
        every = frozenset(given)
        if given and len({self.size(u) for u in given}) == 1 and self.is_plain(every):
            return self.told(every)
        best = self.transposed(self.compared(given), every) if given else frozenset(drawn)
        best = self.drawing(best, drawn)
        return self.told(best)

    def compared(self, units: list[Unit]) -> frozenset[Unit]:
        """All together, each alone; then whatever is better with one more or one less."""
        sizes = Counter(self.size(u) for u in units)
        alike = [frozenset(u for u in units if self.size(u) == size) for size, count in sizes.items() if count > 1]
        for choice in (frozenset(units), *alike, *(frozenset([u]) for u in units)):
            self.cost(choice)
        best = self.best()
        while len(self.costs) < _MOST_TRIED:
            for choice in [best ^ {u} for u in units if best != {u}]:
                self.cost(choice)
            if self.best() == best:
                break
            best = self.best()
        return best

    def transposed(self, best: frozenset[Unit], every: frozenset[Unit]) -> frozenset[Unit]:
        """Time-major examples: is dimension 1 better? Features are not: products over them send more."""
        if self.captured.examples.axis is not None or (best == every and self.is_plain(best)):
            return best
        call = self.captured.call
        shapes = [shape_of(call.leaves[i])[0] for u in every for i, _ in u.inputs]
        sizes = Counter(shape[1] for shape in shapes if len(shape) > 1 and shape[1] > 1)
        for size, _ in sizes.most_common(2):
            for units in dict.fromkeys((every, best)):
                turned = frozenset(u for u in (u.along(size, call) for u in units) if u.inputs)
                if turned and self.cost(turned) < self.cost(best) and self.sent(turned) <= self.sent(best):
                    best = turned
        return best

    def drawing(self, best: frozenset[Unit], drawn: list[Unit]) -> frozenset[Unit]:
        """What the step draws itself is taken for examples where arguments are none (frozen networks, say)."""
        given = any(u.inputs for u in best)
        if given and self.shares_products(best):
            return best
        enough = _WORTH_DRAWING * self.cost(best) if given else math.inf
        for u in drawn:
            for choice in (frozenset([u]), best | {u}):
                if self.cost(choice) < min(enough, self.cost(best)):
                    best = choice
        return best

    def best(self) -> frozenset[Unit]:
        """The cheapest; of several, the one that splits most."""
        return min(self.costs, key=lambda choice: (self.cost(choice), -sum(len(u.inputs) for u in choice)))

    def cost(self, choice: frozenset[Unit]) -> float:
        if choice not in self.costs:
            self.costs[choice] = cost_of(self.captured, self.plan(choice), self.replicas.topology, self.update)
        return self.costs[choice].seconds

    def sent(self, choice: frozenset[Unit]) -> float:
        self.cost(choice)
        return self.costs[choice].sent

    def plan(self, choice: frozenset[Unit]) -> Schedule:
        if choice not in self.plans:
            asked = self.captured.with_examples(_examples(choice))
            self.plans[choice] = replicated(asked, self.axes, self.memo)
        return self.plans[choice]

    def size(self, unit: Unit) -> int:
        i, dim = unit.inputs[0]
        return int(shape_of(self.captured.call.leaves[i])[0][dim])

    def is_plain(self, choice: frozenset[Unit]) -> bool:
        """Are no examples moved, and is every product shared?"""
        return not _moves_examples(self.plan(choice)) and self.shares_products(choice)

    def shares_products(self, choice: frozenset[Unit]) -> bool:
        """Mostly all of them are shared, and nobody has to know which are the update's."""
        return self._shares(choice, frozenset()) or self._shares(choice, self.update)

    def _shares(self, choice: frozenset[Unit], but: AbstractSet[Equation]) -> bool:
        products = (s for s, _ in _steps(self.plan(choice), but) if multiplies(s.equation.primitive))
        return all(any(layout != whole(self.axes) for layout in step.operands) for step in products)

    @cached_property
    def update(self) -> frozenset[Equation]:
        return update_of(self.captured.program)

    def told(self, choice: frozenset[Unit]) -> Examples:
        """The choice, and what the user should know of it: nothing where there was none to make."""
        found, paths = _examples(choice), self.captured.paths
        compared = len(self.costs) > 1
        chosen = [f"{paths[i]} on dimension {dim}" for i, dim in found.inputs.items()]
        chosen += [f"what the step draws or holds itself, {rows} rows" for rows in found.drawn]
        if not chosen:
            return replace(found, note=f"no examples found: every replica computes everything. {_OTHERWISE}")
        why = f" (of {len(self.costs)} ways to split the inputs, this sends and computes least)" if compared else ""
        note = f"examples: {'; '.join(chosen)}{why}. {_OTHERWISE}"
        return replace(found, why="chosen by cost" if compared else "", note=note if compared or found.drawn else "")


def _examples(choice: Iterable[Unit]) -> Examples:
    units = sorted(choice, key=lambda u: (u.inputs, u.drawn))
    return Examples({i: dim for u in units for i, dim in u.inputs}, "", drawn=tuple(u.drawn for u in units if u.drawn))


def _moves_examples(decided: Schedule) -> bool:
    moved = (t for bundles in decided.transfers for bundle in bundles for t in bundle)
    if any(any(is_batch(p) for p in t.source) and t.source != t.target for t in moved):
        return True
    return any(_moves_examples(body) for step in decided.steps for body in step.bodies)


def replicated(captured: Captured, axes: tuple[Axis, ...], memo: Memo) -> Schedule:
    """The program that everyone runs today: all state replicated, gradients all-reduced over all replicas at once."""
    examples, everywhere = examples_of(captured, axes), whole(axes)
    outputs: list[Layout | None] = [None] * len(captured.program.outputs)
    for o in captured.state.values():
        outputs[o] = everywhere
    inputs = [examples.get(i, everywhere) for i in range(len(captured.program.inputs))]
    boundary = Boundary(tuple(inputs), tuple(outputs), drawn=drawn_of(captured, axes))
    return remembered(captured.program, axes, boundary, memo)
