"""How much memory a schedule needs on each device: its arguments, and what is alive at the worst moment.

Found by liveness over the schedule (`buffers.py`), with what compilers do about memory:
- an output of which the argument is donated is written over it, if nothing reads the argument any more;
- an elementwise result takes the place of an operand of the same size that nobody needs afterwards;
- what a loop carries stays in its place, and what it stacks is written slice by slice.

`benchmarks/memory_prediction.py` compares it with what XLA allocates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.execution import AHEAD
from .buffers import Buffer, Buffers
from .fusion import Kind

# What liveness does not see: gaps in XLA's heap, its own order of equations, and what it does not fuse after all.
# Fitted to the programs of the zoo above 1 MB (benchmarks/memory_prediction.py).
UNSEEN = 1.17


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    arguments: int
    temporaries: int  # at the worst moment
    outputs: int  # that do not take the place of an argument

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs

    def __str__(self) -> str:
        return f"{self.arguments} arguments + {self.temporaries} temporaries + {self.outputs} outputs"


def memory_of(buffers: Buffers, donated: Mapping[int, int]) -> Memory:
    """The memory that a program needs; `donated` names for an output the input whose memory it may take."""
    resting = [buffer for i, buffer in enumerate(buffers.inputs) if i not in buffers.hosted]
    arguments = sum(buffer.nbytes for buffer in resting)
    kept = {id(buffer) for buffer in resting}  # outputs that stand somewhere already
    sent = set(buffers.hosted.values())
    donated = {o: i for o, i in donated.items() if i not in buffers.hosted}
    outputs = 0
    for o, buffer in enumerate(buffers.outputs):
        if buffer is not None and o not in donated and o not in sent and id(buffer) not in kept:
            kept.add(id(buffer))
            outputs += buffer.nbytes
    visiting = sorted((buffers.inputs[i].nbytes for i in buffers.hosted), reverse=True)
    ahead = sum(visiting[: AHEAD // 2])  # what is on its way while the leaves before it are updated
    return Memory(arguments, int(UNSEEN * _temporaries(buffers, donated, kept)) + ahead, outputs)


def _temporaries(buffers: Buffers, donated: Mapping[int, int], kept: set[int]) -> int:
    """Bytes at the worst moment, not counting what is `kept` elsewhere."""
    kept = kept | {id(b) for b in _in_place(buffers, donated)}
    made: dict[float, list[Buffer]] = defaultdict(list)
    freed: dict[float, list[Buffer]] = defaultdict(list)
    for buffer in (*buffers.made, *(buffers.inputs[i] for i in buffers.hosted)):
        if buffer.written and buffer.nbytes and id(buffer) not in kept:
            made[buffer.made].append(buffer)
            freed[buffer.last].append(buffer)
    inner: dict[float, int] = {inside.place: max(map(_body, inside.bodies), default=0) for inside in buffers.inside}
    current = peak = 0
    for place in sorted({*made, *freed, *inner}):
        arriving = sum(b.nbytes for b in made[place])
        reused = _reused(made[place], freed[place]) if place in freed else 0
        peak = max(peak, current + arriving - reused + inner.get(place, 0))
        current += arriving - sum(b.nbytes for b in freed[place])
    return peak


def _in_place(buffers: Buffers, donated: Mapping[int, int]) -> list[Buffer]:
    """The outputs that are written over the argument they replace."""
    found = []
    for o, i in donated.items():
        buffer, argument = buffers.outputs[o], buffers.inputs[i]
        if buffer is None or buffer.nbytes != argument.nbytes:
            continue
        last = max((u.place for u in argument.uses), default=-1) if argument is buffer else argument.last
        stays = buffer.kind is not Kind.OPAQUE or buffer.over is argument
        if last < buffer.made or (last == buffer.made and stays):
            found.append(buffer)
    return found


def _reused(made: list[Buffer], freed: list[Buffer]) -> int:
    """Bytes of results that take the place of operands of the same size."""
    free = Counter(b.nbytes for b in freed if b not in made)
    total = 0
    for buffer in made:
        if free[buffer.nbytes] and not buffer.product:
            free[buffer.nbytes] -= 1
            total += buffer.nbytes
    return total


def _body(buffers: Buffers) -> int:
    """What an iteration or a branch needs beside what enters and leaves it; a carry is written over the one before."""
    outside = {id(b) for b in buffers.outputs} if buffers.carried is None else set()
    return _temporaries(buffers, buffers.carried or {}, outside)
