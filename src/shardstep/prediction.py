"""What a schedule will take on a machine: seconds on the wire, seconds in the update.

Both ignore overlap: they compare programs, they do not promise step times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .layout import Array, Axis, Layout, block_shape
from .links import sent_time
from .program import Var
from .schedule import Collective, Schedule
from .topology import Topology


def wire_time(collectives: Iterable[Collective], axes: tuple[Axis, ...], topology: Topology) -> float:
    """Seconds of all collectives, one after the other. One over several axes at once drives the links of all."""
    total = 0.0
    for c in collectives:
        names = set(c.axis.split("+"))
        rings = [r for axis, r in zip(axes, topology.rings, strict=True) if set(axis.names) <= names]
        total += sent_time(c.kind, c.bytes, *rings) * c.times
    return total


def update_time(schedule: Schedule, topology: Topology) -> float:
    return topology.update_time(update_bytes(schedule))


def update_bytes(schedule: Schedule) -> float:
    """Bytes that a replica reads and writes in equations that do not run over the examples.

    Compilers fuse an update: what enters it from outside is read once, what leaves it is written once.
    """
    made: dict[Var, Layout] = {}  # in the update itself
    read: set[tuple[Var, Layout]] = set()
    inside = 0.0
    for step in schedule.steps:
        if step.ruling.over_examples:
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
