"""The step as everyone runs it today and as it is rewritten, and what a plan says of the two.

Most of that is read only by who looks at the plan, so each view is worked out when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..capture.step import Captured
from ..core.schedule import Collective, Schedule
from ..machine.replicas import Replicas
from .carried import carried
from .costs import clock, update_time
from .estimate import Estimate, estimate
from .timeline import Line, Moment, Segment, moments, of_update, segments, update_lines


@dataclass(frozen=True)
class Total:
    """A quantity per replica and step, in the replicated and in the sharded program."""

    replicated: float
    sharded: float

    @property
    def ratio(self) -> float:
        return self.sharded / self.replicated if self.replicated else 1.0


@dataclass(frozen=True, eq=False, repr=False)
class Programs:
    """Both programs of a plan. Its views travel between processes, the programs do not."""

    captured: Captured
    roles: Sequence[str]  # of the inputs
    baseline: Schedule  # of the program that everyone runs today
    schedule: Schedule
    rewritten: bool  # does the step run by the schedule? Otherwise XLA partitions it
    donated: Mapping[int, int]
    hosted: Mapping[int, int]
    replicas: Replicas

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        return carried(self.schedule, self.captured, self.roles) if self.rewritten else ()

    @cached_property
    def update_flops(self) -> Total:
        return Total(_update_work(self.baseline), _update_work(self.schedule))

    @cached_property
    def update_seconds(self) -> Total:
        topology = self.replicas.topology
        return Total(update_time(self.baseline, topology), update_time(self.schedule, topology))

    @cached_property
    def step_seconds(self) -> Total:
        return Total(self._before.seconds.total, self._after.seconds.total)

    @cached_property
    def peak_bytes(self) -> Total:
        return Total(self._before.memory.peak, self._after.memory.peak)

    @cached_property
    def timeline(self) -> tuple[Segment, ...]:
        return self._segments(self.schedule, self._told, self._after)

    @cached_property
    def timeline_before(self) -> tuple[Segment, ...]:
        return self._segments(self.baseline, moments(self.baseline), self._before)

    @cached_property
    def update(self) -> tuple[Line, ...]:
        return update_lines(self._told, dict(zip(self.captured.program.inputs, self.captured.paths, strict=True)))

    @cached_property
    def _told(self) -> tuple[Moment, ...]:
        return tuple(moments(self.schedule)) if self.rewritten else ()

    @cached_property
    def _before(self) -> Estimate:
        return estimate(self.baseline, self.donated, self.replicas.axes, self.replicas.topology)

    @cached_property
    def _after(self) -> Estimate:
        return estimate(self.schedule, self.donated, self.replicas.axes, self.replicas.topology, self.hosted)

    def _segments(self, schedule: Schedule, told: Iterable[Moment], predicted: Estimate) -> tuple[Segment, ...]:
        return segments(told, clock(schedule, self.replicas.topology, predicted.seconds))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


VIEWS = tuple(n for n, view in vars(Programs).items() if isinstance(view, cached_property) and not n.startswith("_"))


def _update_work(decided: Schedule) -> float:
    """Elements computed per replica in the equations of the update."""
    work = 0.0
    for step in filter(of_update, decided.steps):
        work += sum(times * _update_work(body) for body, times in zip(step.bodies, step.times, strict=True))
        work += 0 if step.bodies else step.ruling.elements_made
    return work
