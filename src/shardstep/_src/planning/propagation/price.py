"""What a decision costs, in seconds: how a rule's offers, what a loop carries, and work that could be shared compare.

    wire    bytes / what the links along the axis carry in a second
    work    flops / peak, of products and factorizations of state, where those are priced

How many messages that makes is not known yet, since small ones travel together (`buckets.py`). Whole plans are compared
with their messages and all of their work (`estimate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core import compat
from ...core.layout import Array, Axis, Layout, block_shape
from ...core.moves import priced_moves
from ...core.schedule import Schedule, Step
from ...machine.links import Peak, Ring
from ..flops import flops, multiplies

_COND = compat.primitive("cond")


@dataclass(frozen=True)
class Price:
    """Without a machine, each byte takes a second and work nothing."""

    rates: tuple[float, ...] = ()  # bytes a second that each replica sends along an axis
    peak: Peak | None = None  # of products of state; None: they are repeated or owned, and not to be split

    @classmethod
    def of(cls, rings: Sequence[Ring], peak: Peak | None = None) -> Price:
        return cls(tuple(ring.rate for ring in rings), peak)

    @classmethod
    def together(cls, rings: Sequence[Ring]) -> Price:
        """All rings as one axis: as fast as the slowest of them."""
        return cls((slowest(rings),))

    def _weight(self, *along: int) -> float:
        """How much longer a byte takes along these axes at once than along the fastest one. Links of equal speed weigh
        exactly 1, so that what sends the same costs the same.
        """
        return max(self.rates) / sum(self.rates[k] for k in along) if self.rates else 1.0

    @property
    def _byte(self) -> float:
        return 1 / max(self.rates) if self.rates else 1.0

    def wire(self, nbytes: float, k: int) -> float:
        """Of bytes that one replica sends along axis k."""
        return nbytes * self._weight(k) * self._byte

    def move(self, source: Layout, target: Layout, array: Array, axes: tuple[Axis, ...]) -> float:
        """Of a value that comes from one layout into another."""
        if len(axes) == 1:
            return sum(nbytes for _, nbytes in priced_moves(source, target, array, axes)) * self._byte
        moved = priced_moves(source, target, array, axes)
        return sum(nbytes * self._weight(*move.axes) for move, nbytes in moved) * self._byte

    def schedule(self, schedule: Schedule) -> float:
        """Of a body, once."""
        names = [set(axis.names) for axis in schedule.axes]
        along = {c.axis: [k for k, n in enumerate(names) if n <= set(c.axis.split("+"))] for c in schedule.collectives}
        sent = sum(c.total * self._weight(*along[c.axis]) for c in schedule.collectives) * self._byte
        return sent if self.peak is None else sent + work(schedule, self.peak)

    def product(self, primitive: Any, params: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> float:
        return flops(primitive, params, inputs, outputs) / self.peak.of(inputs[0].dtype) if self.peak else 0.0


def slowest(rings: Sequence[Ring]) -> float:
    """Bytes a second over the slowest links between replicas."""
    return min((ring.rate for ring in rings if ring.size > 1), default=rings[0].rate)


def work(schedule: Schedule, peak: Peak) -> float:
    """Seconds of one replica in products and factorizations that do not run over the examples."""
    counted = (step for step in schedule.steps if step.bodies or multiplies(step.equation.primitive))
    return sum((work_of(step, schedule.axes, peak) for step in counted), 0.0)


def work_of(step: Step, axes: tuple[Axis, ...], peak: Peak) -> float:
    """Of one equation; of a loop, of all that it holds."""
    inside = _inside(step, [work(body, peak) for body in step.bodies])
    return inside if step.ruling.over_examples else inside + multiplying(step, axes, peak)


def multiplying(step: Step, axes: tuple[Axis, ...], peak: Peak) -> float:
    """Seconds of one replica in this equation itself, if it is a product or factorization."""
    arrays = [
        Array(block_shape(a.array.shape, layout, axes), a.array.dtype)
        for a, layout in zip(step.equation.inputs, step.operands, strict=True)
    ]
    done = flops(step.equation.primitive, step.ruling.params, arrays, step.ruling.blocks)
    return done / peak.of(step.ruling.blocks[0].dtype) if done else 0.0


def _inside(step: Step, bodies: Sequence[float]) -> float:
    """Of a loop as often as it runs, of branches the most expensive."""
    if step.equation.primitive is _COND:
        return max(bodies)
    return sum(t * cost for cost, t in zip(bodies, step.times, strict=True))
