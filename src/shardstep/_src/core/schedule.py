"""What the planner decides, as frozen data: a program with a layout for every value."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .layout import REPLICATED, Array, Axis, Layout, Partial, Placement, Replicated, Split, Varying, is_batch, show
from .moves import Move, by_wire, cost, moves, sent, sized_moves
from .program import Atom, Emit, Equation, Names, Program, Var
from .wire import Wire


@dataclass(frozen=True)
class Preference:
    """What the readers of a value want of it along one axis.

    Some want a certain split, some want it whole, some take any split (`any`: a sum does). `terms` counts the partial
    values that are added up before they are read: they share one reduction. What is `due` leaves the program whole: it
    will be gathered whoever reads it, so that readers may have it whole for nothing.
    """

    splits: tuple[Split, ...] = ()
    full: bool = False
    any: bool = False
    terms: int = 1
    due: bool = False

    def __or__(self, other: Preference) -> Preference:
        if other is NO_PREFERENCE or self is NO_PREFERENCE:
            return self if other is NO_PREFERENCE else other
        splits = tuple(dict.fromkeys(self.splits + other.splits))
        terms, due = min(self.terms, other.terms), self.due or other.due
        return Preference(splits, self.full or other.full, self.any or other.any, terms, due)

    def future(self, placement: Placement, array: Array, axis: Axis) -> float:
        """Bytes that a value in this placement will still have to move to please its readers.

        Where nobody said what they want, a value that is not whole is charged a quarter of what making it whole costs:
        enough not to cut work into pieces that nobody asked for, too little to hurry a reduction that can wait.
        """
        if isinstance(placement, Replicated | Varying) or is_batch(placement):
            return 0.0
        wanted: Placement | None = self.splits[0] if self.splits else REPLICATED if self.full else None
        if wanted is None:
            whole = cost(placement, REPLICATED, array, axis)
            return 0.0 if self.any and isinstance(placement, Split) else whole / 4
        moved = 0.0
        if isinstance(placement, Partial):
            moved += cost(placement, wanted, array, axis) / self.terms
            placement = wanted
        elif self.splits and placement not in self.splits and not self.any:
            moved += cost(placement, wanted, array, axis)
        if self.full:
            moved += cost(placement, REPLICATED, array, axis)
        return moved


NO_PREFERENCE = Preference()


@dataclass(frozen=True)
class Collective:
    """One communication of the rewritten step."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: float  # that one replica sends, each time
    axis: str
    purpose: str
    line: str
    loop: str = ""  # the loop or branch it is inside of, if any
    times: int = 1  # how often a step does it (a while loop counts once)
    shapes: tuple[tuple[int, ...], ...] = ()  # of the values that travel in it
    carries: tuple[tuple[str, str], ...] = ()  # what they are, (gradient of, path), where it was asked for

    @property
    def total(self) -> float:
        return self.bytes * self.times

    @property
    def tensors(self) -> int:
        """How many values travel in it."""
        return len(self.shapes)


@dataclass(frozen=True)
class Fallback:
    """An equation that had to run whole on every replica."""

    primitive: str
    why: str
    bytes: float
    line: str


@dataclass(frozen=True, eq=False)
class Transfer:
    """A value that replicas hold in one layout is brought into another, too."""

    var: Var
    source: Layout
    target: Layout
    dtype: Any = None  # of its floats on the way, where it is not their own
    wire: Wire | None = None  # how its terms or blocks travel, where that is not the collective's own way

    def moves(self, axes: tuple[Axis, ...]) -> Iterator[Move]:
        for move in moves(self.source, self.target, self.var.array.shape, axes):
            yield by_wire(move, self.wire)

    @property
    def array(self) -> Array:
        """What travels."""
        return self.var.array if self.dtype is None else Array(self.var.array.shape, self.dtype)


Bundle = tuple[Transfer, ...]  # transfers that share their collectives


@dataclass(frozen=True, slots=True)
class Visit:
    """Examples go to split state, and no work is repeated for it (see `rules/indexing.py`, `rules/contraction.py`).

    What they come back with goes to their `homes` when somebody reads it: a placement for each result in a rule's
    decision, a layout for each in a ruling. Without homes, results stay where they are made.
    """

    homes: tuple[Any, ...] = ()
    on_trial: bool = False  # does it depend on the rest of the step whether that takes less time?


@dataclass(frozen=True, eq=False)
class Ruling:
    """How an equation runs, decided along all axes. Equations in the same situation share one."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    params: Mapping[str, Any]
    blocks: tuple[Array, ...]  # the results as one replica makes them
    emit: Emit | None = None
    apart: bool = False  # each result depends on its own operand alone
    gathered: bool = False  # no rule could keep its operands as they were
    fill: tuple[str | None, ...] = ()  # what the padding of each operand is filled for, see `Decision`
    visit: Visit | None = None

    @property
    def seen(self) -> tuple[Layout, ...]:
        """The layouts in which readers see the results first."""
        return self.visit.homes if self.visit and self.visit.homes else self.results

    @functools.cached_property
    def over_examples(self) -> bool:
        return self.visit is not None or any(is_batch(p) for layout in self.operands + self.seen for p in layout)

    @functools.cached_property
    def reads_terms(self) -> tuple[int, ...]:
        """The operands of which each replica has a term."""
        return tuple(i for i, layout in enumerate(self.operands) if any(isinstance(p, Partial) for p in layout))

    @functools.cached_property
    def makes_terms(self) -> tuple[int, ...]:
        return tuple(i for i, layout in enumerate(self.results) if any(isinstance(p, Partial) for p in layout))

    @functools.cached_property
    def elements_made(self) -> int:
        """By one replica."""
        return sum(block.size for block in self.blocks)

    @functools.cached_property
    def bytes_made(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class Step(NamedTuple):
    """One equation, decided."""

    equation: Equation
    ruling: Ruling
    bodies: tuple[Schedule, ...] = ()
    times: tuple[int, ...] = ()  # how often each body runs

    @property
    def operands(self) -> tuple[Layout, ...]:
        return self.ruling.operands

    @property
    def results(self) -> tuple[Layout, ...]:
        return self.ruling.results


@dataclass(frozen=True, eq=False)
class Schedule:
    """A program, decided: how it runs and what it communicates."""

    program: Program
    axes: tuple[Axis, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    steps: tuple[Step, ...]
    transfers: tuple[tuple[Bundle, ...], ...]  # before each step, and last before the outputs
    fallbacks: tuple[Fallback, ...]
    preferences: tuple[tuple[Preference, ...], ...] = ()  # of the inputs
    fixed_order: bool = False  # are sums formed in an order that knows no replicas?
    met_batch: frozenset[int] = frozenset()  # inputs that were read together with the examples

    def __str__(self) -> str:
        axes = " x ".join(f"{'+'.join(axis.names)}:{axis.size}" for axis in self.axes)
        return "\n".join([f"over {axes}", *self.lines(Names())])

    def lines(self, names: Names, indent: str = "") -> Iterator[str]:
        """Every equation with the layouts it reads and makes, after its transfers; bodies indented."""

        def laid(atoms: Sequence[Atom], layouts: Sequence[Layout]) -> str:
            return " ".join(f"{names[a]}{{{show(layout)}}}" for a, layout in zip(atoms, layouts, strict=True))

        inputs, outputs = self.program.inputs, self.program.outputs
        yield f"{indent}inputs {names.typed(inputs)}"
        yield f"{indent}    as {laid(inputs, self.inputs)}"
        for step, bundles in zip(self.steps, self.transfers, strict=False):
            yield from (indent + line for line in _shown(bundles, names, self.axes))
            equation, made = step.equation, laid(step.equation.outputs, step.ruling.seen)
            run = "  # gathered: no rule keeps its operands split" if step.ruling.gathered else ""
            yield f"{indent}{made} = {equation.primitive} {laid(equation.inputs, step.operands)}{run}"
            for body, times in zip(step.bodies, step.times, strict=True):
                yield f"{indent}  body, {times} times"
                yield from body.lines(names, indent + "    ")
        yield from (indent + line for line in _shown(self.transfers[-1], names, self.axes))
        yield f"{indent}outputs {laid(outputs, self.outputs)}"

    @functools.cached_property
    def sent(self) -> tuple[tuple[Collective, ...], ...]:
        """What is communicated before each step, and last before the outputs."""
        return tuple(tuple(c for _, c in found) if found else () for found in self.bundled)

    @functools.cached_property
    def bundled(self) -> tuple[tuple[tuple[Bundle, Collective], ...], ...]:
        """The same, each beside the transfers that share it."""
        readers = [*(step.equation for step in self.steps), None]
        return tuple(
            tuple((bundle, c) for bundle in bundles for c in _communicated(bundle, reader, self.axes))
            if bundles
            else ()
            for reader, bundles in zip(readers, self.transfers, strict=True)
        )

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Everything that is communicated, in program order, what bodies communicate included."""
        found = list(self.sent[0])
        for step, after in zip(self.steps, self.sent[1:], strict=True):
            loop = f"{step.equation.primitive} at {step.equation.line}" if step.bodies else ""
            for body, times in zip(step.bodies, step.times, strict=True):
                found += [replace(c, loop=c.loop or loop, times=c.times * times) for c in body.collectives]
            found += after
        return tuple(found)


def _shown(bundles: Sequence[Bundle], names: Names, axes: tuple[Axis, ...]) -> Iterator[str]:
    """`reduce-scatter c: partial(add) -> split(0), 896 bytes over data`: the transfers before an equation."""
    for bundle in bundles:
        shared = list(_communicated(bundle, None, axes))
        kinds = ", then ".join(c.kind for c in shared) or "slice"
        values = ", ".join(f"{names[t.var]}: {show(t.source)} -> {show(t.target)}" for t in bundle)
        priced = "".join(f", {c.bytes:.0f} bytes of {c.dtype} over {c.axis}" for c in shared)
        yield f"  {kinds} {values}{priced}"


def _communicated(bundle: Bundle, reader: Equation | None, axes: tuple[Axis, ...]) -> Iterator[Collective]:
    """The collectives of a bundle: its transfers make the same moves, and each move is one collective for all."""
    sized = (sized_moves(t.source, t.target, t.array.shape, axes, t.wire) for t in bundle)
    for stage in zip(*sized, strict=True):
        move = stage[0][0]
        elements = sum(held for _, held in stage)
        for kind, dtype, nbytes in sent(move, elements, bundle[0].array.dtype, move.over(axes)):
            yield Collective(
                kind=kind,
                dtype=str(dtype),
                shape=bundle[0].array.shape if len(bundle) == 1 else (sum(t.array.size for t in bundle),),
                bytes=nbytes,
                axis="+".join(move.over(axes).names),
                purpose=str(reader.primitive) if reader else "output",
                line=reader.line if reader else "",
                shapes=tuple(t.array.shape for t in bundle),
            )
