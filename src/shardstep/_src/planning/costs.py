"""What a schedule will take on a machine, in seconds:

    wire      messages x latency + bytes / bandwidth
    products  flops / peak
    passes    bytes read and written / bandwidth of the memory
    host      bytes from and to the host's memory / bandwidth of the bus, where optimizer state rests there

All ignore overlap with other work: they compare programs, they do not promise step times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.layout import Array, Axis, Layout, block_shape
from ..core.program import Var
from ..core.schedule import Collective, Ruling, Schedule, Step
from ..machine.links import Chip, Ring, sent_time
from ..machine.topology import Topology
from .buffers import Buffer, Buffers
from .flops import flops, multiplies
from .fusion import Kind
from .timeline import Clock, of_update


@dataclass(frozen=True)
class Seconds:
    """What one replica takes for a step, or for a part of one."""

    wire: float
    products: float
    passes: float
    host: float = 0.0

    @property
    def work(self) -> float:
        return self.products + self.passes + self.host

    @property
    def total(self) -> float:
        return self.wire + self.work


def wire_time(collectives: Iterable[Collective], axes: tuple[Axis, ...], topology: Topology) -> float:
    """Seconds of all collectives, one after the other. One over several axes at once drives the links of all.

    That is how the TPU compiler issues them unless told otherwise: see `axis_times` for what overlap could make of it.
    """
    return sum(_time(c, [topology.rings[k] for k in _along(c, axes)]) for c in collectives)


def axis_times(collectives: Iterable[Collective], axes: tuple[Axis, ...], topology: Topology) -> list[float]:
    """Seconds that the links of each axis are busy. If collectives overlap, the longest of these is all that it takes.

    (TPU v5p and v6e overlap them where SparseCores are given the collectives: see docs/communication.md.)
    """
    busy = [0.0] * len(axes)
    for c in collectives:
        along = _along(c, axes)
        for k in along:
            busy[k] += _time(c, [topology.rings[j] for j in along])
    return busy


def _along(c: Collective, axes: tuple[Axis, ...]) -> list[int]:
    names = set(c.axis.split("+"))
    return [k for k, axis in enumerate(axes) if set(axis.names) <= names]


def _time(c: Collective, rings: Sequence[Ring]) -> float:
    return sent_time(c.kind, c.bytes, *rings) * c.times


def update_time(schedule: Schedule, topology: Topology) -> float:
    return topology.update_time(update_bytes(schedule))


def update_bytes(schedule: Schedule) -> float:
    """Bytes read and written per replica in the equations of the update.

    Compilers fuse an update: what enters it from outside is read once, what leaves it is written once.
    """
    made: dict[Var, Layout] = {}  # in the update itself
    read: set[tuple[Var, Layout]] = set()
    inside = 0.0
    for step in schedule.steps:
        if not of_update(step):
            continue
        inside += sum(update_bytes(body) for body in step.bodies)
        for atom, layout in zip(step.equation.inputs, step.operands, strict=True):
            if isinstance(atom, Var) and atom not in made and not step.bodies:
                read.add((atom, layout))
        made.update(zip(step.equation.outputs, step.results, strict=True))
    written = {(atom, made[atom]) for atom in schedule.program.outputs if isinstance(atom, Var) and atom in made}
    moved = Counter((v.array, layout) for v, layout in read | written)
    return inside + sum(
        count * Array(block_shape(array.shape, layout, schedule.axes), array.dtype).nbytes
        for (array, layout), count in moved.items()
    )


def work_time(buffers: Buffers, chip: Chip) -> tuple[float, float]:
    """Seconds in products, and in passes over memory: loops as often as they run.

    A product reads its operands while it multiplies. Only if that takes longer is the rest a pass over memory.
    """
    products = passes = 0.0
    for product in buffers.products:
        multiplying = product.flops / chip.peak.of(product.dtype)
        products += multiplying
        passes += max(product.nbytes / chip.memory - multiplying, 0.0)
    passes += sum(map(_passes, buffers.all())) / chip.memory
    for inside in buffers.inside:
        for body, times in zip(inside.bodies, inside.times, strict=True):
            more = work_time(body, chip)
            products, passes = products + times * more[0], passes + times * more[1]
    return products, passes


def _passes(buffer: Buffer) -> float:
    """Bytes of a value that are written once and read by each reader, products apart. Loops read what they slice and
    carry inside.
    """
    if not buffer.written:
        return 0.0
    written = buffer.kind is not Kind.INPUT and not buffer.product and not buffer.by_loop
    return float(
        buffer.nbytes * (written + sum(not u.product and not u.loop and u.result is not None for u in buffer.uses))
    )


def clock(schedule: Schedule, topology: Topology, predicted: Seconds) -> Clock:
    """How long the parts of a schedule take, all of them together taking what is predicted."""
    axes, chip = schedule.axes, topology.chip
    known: dict[Ruling, float] = {}  # equations in the same situation share one

    def sending(c: Collective) -> float:
        return _time(c, [topology.rings[k] for k in _along(c, axes)])

    def working(step: Step) -> float:
        if step.ruling not in known:
            known[step.ruling] = _working(step, axes, chip)
        return known[step.ruling]

    return Clock(sending, working, predicted.wire, predicted.work)


def _working(step: Step, axes: tuple[Axis, ...], chip: Chip) -> float:
    """Seconds of one equation by itself, as if nothing was fused."""
    equation, ruling = step.equation, step.ruling
    passing = ruling.bytes_made / chip.memory
    if not multiplies(equation.primitive):
        return passing
    operands = zip(equation.inputs, ruling.operands, strict=True)
    blocks = [Array(block_shape(a.array.shape, f, axes), a.array.dtype) for a, f in operands]
    work = flops(equation.primitive, ruling.params, blocks, ruling.blocks)
    return max(work / chip.peak.of(blocks[0].dtype), passing)
