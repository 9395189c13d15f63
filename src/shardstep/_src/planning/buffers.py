"""Which values of a schedule the compiler will write to memory, and from when to when each is needed.

A compiler fuses what works element by element: a chain of such equations writes only its last value (`fusion.py`).
`memory.py` finds the peak from this, `costs.py` the bytes that are read and written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..core import compat
from ..core.layout import Array, Layout, Replicated, Split, block_shape
from ..core.program import Atom, Equation, Var
from ..core.schedule import Bundle, Ruling, Schedule, Step, Transfer
from ..rules.added_rows import ADDED
from .flops import flops, multiplies
from .fusion import Kind, is_expensive, kind_of
from .merged import Merged


class Use(NamedTuple):
    """A reader of a buffer: where it stands, how it reads, and what it makes of it (None: it leaves the program)."""

    place: float
    kind: Kind
    product: bool
    loop: bool
    result: Buffer | None


class Buffer:
    """A value in one layout, as one replica would hold it."""

    __slots__ = (
        "by_loop",
        "cheap",
        "kind",
        "last",
        "made",
        "narrow",
        "nbytes",
        "over",
        "product",
        "returned",
        "uses",
        "written",
    )

    def __init__(self, nbytes: int, made: float, kind: Kind, cheap: bool = False, product: bool = False):
        self.nbytes = nbytes
        self.made = made  # at this place of the schedule; -1: before it
        self.kind = kind
        self.cheap = cheap  # computed again by each reader rather than written
        self.product = product
        self.narrow = nbytes  # as loops take it: see `_held`
        self.by_loop = False  # is it the result of a loop or branch?
        self.over: Buffer | None = None  # what a loop carries stays in the place in which it entered
        self.returned = False  # does the program return it as it is?
        self.uses: list[Use] = []
        self.written = False
        self.last = made  # the place where it is last needed

    def settle(self) -> None:
        """Once all readers are known and settled: is it written, and until when is it needed?"""
        self.written = self.is_written()
        if self.uses and all(use.loop for use in self.uses):
            self.nbytes = self.narrow
        for place, kind, _, _, result in self.uses:
            if kind is Kind.FUSED and result is not None and not result.written:
                place = result.last
            if place > self.last:
                self.last = place

    def is_written(self) -> bool:
        """What is fused is still written if it is returned, if a product reads it, or if several read it and computing
        it again would be expensive or read several values again.
        """
        if self.kind is not Kind.FUSED or self.returned or (len(self.uses) > 1 and not self.cheap):
            return True
        return Kind.OPAQUE in [use.kind for use in self.uses]


class Product(NamedTuple):
    """A product or factorization: its work, and the bytes it reads and writes."""

    flops: float
    dtype: Any
    nbytes: int


class Inside(NamedTuple):
    """A loop or branch: where it stands, and its bodies with how often they run."""

    place: int
    bodies: tuple[Buffers, ...]
    times: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Buffers:
    """All values of a schedule that may be in memory. Places count transfers and steps, in order."""

    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer | None, ...]  # None: a constant
    made: list[Buffer] = field(default_factory=list)  # everything but the inputs, in order
    products: list[Product] = field(default_factory=list)
    inside: list[Inside] = field(default_factory=list)
    carried: Mapping[int, int] | None = None  # in the body of a loop: which output is which input of the next iteration
    hosted: Mapping[int, int] = field(default_factory=dict)  # inputs in host memory -> the outputs that replace them

    @classmethod
    def of(
        cls, schedule: Schedule, carried: Mapping[int, int] | None = None, hosted: Mapping[int, int] | None = None
    ) -> Buffers:
        """Those of a schedule. What a loop does not carry, it writes into a stack."""
        return _Walk(schedule).run(carried, hosted or {})

    def all(self) -> Iterator[Buffer]:
        yield from self.inputs
        yield from self.made


class _Facts(NamedTuple):
    """What equations that share a ruling have in common."""

    kind: Kind
    nbytes: tuple[int, ...]  # of the results
    cheap: bool  # to compute again
    product: Product | None


class _Walk:
    """One pass over a schedule."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.width = 2 if any(axis.backend.widens for axis in schedule.axes) else 1  # of 16-bit floats inside of a step
        self.multiplies_wide = any(axis.backend.multiplies_wide for axis in schedule.axes)
        self.values: dict[Atom, list[tuple[Layout, Buffer]]] = {}
        self.made: list[Buffer] = []
        self.products: list[Product] = []
        self.inside: list[Inside] = []
        self.sizes: dict[tuple[Array, Layout], int] = {}
        self.left: Counter[float] = Counter()  # how many values were made smaller where a loop left them
        self.facts: dict[Ruling, _Facts] = {}
        self.wide: dict[Buffer, Buffer] = {}  # the copies in float32 of 16-bit floats
        self.indexes = any(axis.backend.indexes for axis in schedule.axes)
        merges = any(axis.backend.merges for axis in schedule.axes)
        again = merges and any(e.primitive is _BARRIER for e in schedule.program.equations)
        self.merged = Merged() if again else None

    def run(self, carried: Mapping[int, int] | None, hosted: Mapping[int, int]) -> Buffers:
        schedule, program = self.schedule, self.schedule.program
        pairs = zip(program.inputs, schedule.inputs, strict=True)
        inputs = tuple(self.add(v, f, Buffer(self.size(v.array, f), -1, Kind.INPUT)) for v, f in pairs)
        for var, _ in program.constants:
            self.add(var, (Replicated(),) * len(schedule.axes), Buffer(var.array.nbytes, -1, Kind.INPUT))
        place = 0
        for step, bundles in zip(schedule.steps, schedule.transfers, strict=False):
            place = self.transfers(bundles, place)
            self.step(step, place)
            place += 1
        place = self.transfers(schedule.transfers[-1], place)
        sent = set(hosted.values())
        outputs = tuple(
            self.find(atom, layout) if o in sent else self.leave(atom, layout, place)
            for o, (atom, layout) in enumerate(zip(program.outputs, schedule.outputs, strict=True))
        )
        for o, buffer in enumerate(outputs):
            if buffer is not None and (carried is None or o in carried):
                buffer.returned = True
        for buffer in (*reversed(self.made), *inputs):
            buffer.settle()
        for i in hosted:  # on the device from its first reader on
            inputs[i].made = min((use.place for use in inputs[i].uses), default=-1)
        return Buffers(inputs, outputs, self.made, self.products, self.inside, carried, hosted)

    def size(self, array: Array, layout: Layout) -> int:
        key = (array, layout)
        if key not in self.sizes:
            self.sizes[key] = Array(block_shape(array.shape, layout, self.schedule.axes), array.dtype).nbytes
        return self.sizes[key]

    def add(self, var: Var, layout: Layout, buffer: Buffer) -> Buffer:
        self.values.setdefault(var, []).append((layout, buffer))
        return buffer

    def find(self, atom: Atom, layout: Layout) -> Buffer | None:
        held = self.values.get(atom)
        if held is None:  # a literal
            return None
        if len(held) == 1:
            return held[0][1]
        return next((buffer for known, buffer in held if known == layout), held[0][1])

    def transfers(self, bundles: Sequence[Bundle], place: int) -> int:
        """One bundle after the other; the place after them."""
        for bundle in bundles:
            for transfer in bundle:
                self.transfer(transfer, place)
            place += 1
        return place

    def transfer(self, t: Transfer, place: float) -> None:
        """What a collective makes smaller is made smaller at once: no memory is kept for what is not needed."""
        source = self.find(t.var, t.source)
        if source is None or (self.merged and any(held == t.target for held, _ in self.values[t.var])):
            return
        nbytes = self.size(t.var.array, t.target)
        sent = any(a != b and not isinstance(a, Replicated) for a, b in zip(t.source, t.target, strict=True))
        if sent and nbytes < source.nbytes:
            place = self.right_after(source)
        kind = Kind.OPAQUE if sent else Kind.FUSED
        if sent and _is_strided(t):
            source = self.rearranged(t, source, max(nbytes, source.nbytes), place)
        buffer = self.add(t.var, t.target, Buffer(nbytes, place, kind, cheap=True))
        source.uses.append(Use(place, kind, False, False, buffer))
        self.made.append(buffer)

    def right_after(self, source: Buffer) -> float:
        """The place for what makes a value smaller: of all that a loop leaves, one value after the other."""
        place = max(source.made, 0)
        if not source.by_loop:
            return place
        self.left[place] += 1
        return place + self.left[place] / (self.left[place] + 1)

    def rearranged(self, t: Transfer, source: Buffer, nbytes: int, place: float) -> Buffer:
        """Blocks of an inner dimension are not contiguous: the whole is copied before or after it is sent."""
        copy = Buffer(nbytes, place, Kind.OPAQUE)
        source.uses.append(Use(place, Kind.OPAQUE, False, False, copy))
        self.made.append(copy)
        return copy

    def widened(self, atom: Atom, narrow: Buffer | None, place: int) -> Buffer | None:
        """A copy for all products that read a 16-bit operand as it was passed in or sent."""
        if narrow is None or narrow.nbytes > narrow.narrow or not _is_narrow(atom.array):
            return narrow
        wide = self.wide.get(narrow)
        if wide is None:
            wide = self.wide[narrow] = Buffer(self.width * narrow.nbytes, place, Kind.OPAQUE)
            narrow.uses.append(Use(place, Kind.OPAQUE, False, False, wide))
            self.made.append(wide)
        return wide

    def step(self, step: Step, place: int) -> None:
        equation, ruling = step.equation, step.ruling
        if self.merged and (earlier := self.merged.with_earlier(step)):
            same = zip(equation.outputs, earlier, strict=True)
            self.values.update((var, self.values[a]) for var, a in same if a in self.values)
            return
        read = [self.find(a, f) for a, f in zip(equation.inputs, ruling.operands, strict=True)]
        facts = self.facts.get(ruling)
        if facts is None:
            facts = self.facts[ruling] = self.facts_of(step)
        kind, product = facts.kind, facts.product
        if product and self.multiplies_wide:
            read = [self.widened(atom, buffer, place) for atom, buffer in zip(equation.inputs, read, strict=True)]
        if kind is Kind.VIEW and len(equation.outputs) == len(read):
            for buffer, var, layout in zip(read, equation.outputs, ruling.results, strict=True):
                self.add(var, layout, buffer or self.new(var, layout, Buffer(var.array.nbytes, place, Kind.FUSED)))
            return
        if equation.primitive is ADDED:
            self.added(equation, ruling, read, place)
            return
        operands = [buffer for buffer in (dict.fromkeys(read) if len(read) > 1 else read) if buffer is not None]
        if product:
            self.products.append(product)
        results = []
        made_of = zip(facts.nbytes, (block.nbytes for block in ruling.blocks), strict=True)
        for var, layout, (made, narrow) in zip(equation.outputs, ruling.results, made_of, strict=True):
            cheap = facts.cheap and (len(operands) < 2 or len([b for b in operands if 2 * b.nbytes > made]) < 2)
            result = self.new(var, layout, Buffer(made, place, kind, cheap, product is not None))
            result.narrow = narrow
            results.append(result)
        use = Use(place, kind, product is not None, bool(step.bodies), results[0] if results else None)
        for buffer in operands:
            buffer.uses.append(use)
        if self.indexes and equation.primitive is _POOLED:
            self.made.append(Buffer(self.indices(step), place, Kind.OPAQUE))
        if step.bodies:
            for result in results:
                result.by_loop = True
            carried = _carried(equation)
            for c, entered in (carried[-1] or {}).items():
                results[c].over = read[entered + len(read) - len(step.bodies[-1].inputs)]
            bodies = map(Buffers.of, step.bodies, carried)
            self.inside.append(Inside(place, tuple(bodies), step.times))

    def added(self, equation: Equation, ruling: Ruling, read: list[Buffer | None], place: int) -> None:
        """A row is read, and written again in its place: the stack stays where it is."""
        stack, row, _ = read
        assert stack is not None
        self.values[equation.outputs[0]] = [(ruling.results[0], stack)]
        passing = Buffer(ruling.blocks[0].nbytes, place, Kind.SINK)
        use = Use(place, Kind.SINK, False, False, passing)
        for buffer in (row, passing):
            if buffer is not None:
                buffer.uses.append(use)
        self.made.append(passing)

    def facts_of(self, step: Step) -> _Facts:
        primitive, width = step.equation.primitive, 1 if step.bodies else self.width
        kind = kind_of(primitive)
        nbytes = tuple(_held(block, width) for block in step.ruling.blocks)
        cheap = kind is Kind.FUSED and not is_expensive(primitive)
        return _Facts(kind, nbytes, cheap, self.product(step) if multiplies(primitive) else None)

    def indices(self, step: Step) -> int:
        """Bytes of indices: of every element along each dimension, then twice of the largest one of each window."""
        (chosen, whole), layouts = (a.array for a in step.equation.inputs), step.operands
        sizes = [
            math.prod(block_shape(a.shape, f, self.schedule.axes))
            for a, f in zip((chosen, whole), layouts, strict=False)
        ]
        return 4 * whole.ndim * (sizes[1] + 2 * sizes[0])

    def product(self, step: Step) -> Product:
        equation, ruling = step.equation, step.ruling
        blocks = [
            Array(block_shape(a.array.shape, f, self.schedule.axes), a.array.dtype)
            for a, f in zip(equation.inputs, ruling.operands, strict=True)
        ]
        work = flops(equation.primitive, ruling.params, blocks, ruling.blocks)
        width = self.width if self.multiplies_wide else 1
        return Product(work, blocks[0].dtype, sum(_held(b, width) for b in (*blocks, *ruling.blocks)))

    def new(self, var: Var, layout: Layout, buffer: Buffer) -> Buffer:
        """Of a value that an equation makes."""
        self.made.append(buffer)
        self.values[var] = [(layout, buffer)]
        return buffer

    def leave(self, atom: Atom, layout: Layout, place: int) -> Buffer | None:
        buffer = self.find(atom, layout)
        if buffer is not None:
            buffer.uses.append(Use(place, Kind.SINK, False, False, None))
        return buffer


def _held(block: Array, width: int) -> int:
    """Bytes of a result. XLA's CPU backend computes 16-bit floats in float32, and keeps them so until they leave a loop
    or the program.
    """
    return block.nbytes * (width if _is_narrow(block) else 1)


def _is_narrow(array: Array) -> bool:
    return getattr(array.dtype, "itemsize", 4) == 2 and jnp.issubdtype(array.dtype, jnp.floating)


def _is_strided(t: Transfer) -> bool:
    """Is an inner dimension gathered or scattered?"""
    pairs = zip(t.source, t.target, strict=True)
    changed = [p for a, b in pairs if a != b for p in (a, b) if isinstance(p, Split)]
    return any(math.prod(t.var.array.shape[: p.dim]) > 1 for p in changed)


def _carried(equation: Equation) -> list[Mapping[int, int] | None]:
    """Of each body: which output comes back as which input in the next iteration."""
    if equation.primitive is _SCAN:
        consts, carries = compat.scan_counts(equation.params)
        return [{c: consts + c for c in range(carries)}]
    if equation.primitive is _WHILE:
        consts = equation.params["body_nconsts"]
        return [None, {c: consts + c for c in range(len(equation.outputs))}]
    return [None] * len(equation.bodies)


_SCAN, _WHILE, _BARRIER, _POOLED = map(
    compat.primitive, ("scan", "while", "optimization_barrier", "select_and_scatter_add")
)
