"""Optimizer state that rests in host memory streams through the update.

A leaf is fetched when the update first reads it, and sent back when it is new. Nothing is fetched while the model runs,
and each leaf waits until one that came `AHEAD` leaves before it has been updated: so only a few are on the device at
once. Barriers say so to the compiler, which is free to overlap the transfers with other work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from ..core.execution import AHEAD
from ..core.layout import Layout
from ..core.program import Atom, Var
from ..core.schedule import Schedule

Place = tuple[Var, Layout]


class Stream:
    """What arrives before and leaves after each step of a schedule.

    `hosted`: the inputs that rest in host memory, with the outputs that replace them.
    """

    def __init__(self, schedule: Schedule, hosted: Mapping[int, int]):
        self.arriving: dict[int, list[Place]] = defaultdict(list)
        self.leaving: dict[int, list[tuple[int, Place]]] = defaultdict(list)
        self.arrived = 0
        self.updated: list[tuple[int, Any]] = []  # new leaves that are still on the device
        self.away: dict[int, Any] = {}  # output -> its array in host memory
        self.before: Place | None = None  # what the model makes last
        if hosted:
            self._plan(schedule, hosted)
        self.outputs = set(hosted.values())

    def _plan(self, schedule: Schedule, hosted: Mapping[int, int]) -> None:
        program = schedule.program
        waiting = {program.inputs[i]: schedule.inputs[i] for i in hosted}
        leaving: dict[Atom, list[int]] = defaultdict(list)
        for o in hosted.values():
            leaving[program.outputs[o]].append(o)
        for k, (step, bundles) in enumerate(zip(schedule.steps, schedule.transfers, strict=False)):
            read = {*step.equation.inputs, *(t.var for bundle in bundles for t in bundle)}
            for var in [v for v in waiting if v in read]:
                self.arriving[k].append((var, waiting.pop(var)))
            for var, layout in zip(step.equation.outputs, step.results, strict=True):
                self.leaving[k] += [(o, (var, layout)) for o in leaving[var] if layout == schedule.outputs[o]]
            if step.ruling.over_examples and not self.arriving and step.equation.outputs:
                self.before = step.equation.outputs[-1], step.results[-1]
        self.arriving[len(schedule.steps)] += waiting.items()

    def fetch(self, step: int, env: dict[Place, Any]) -> None:
        """What this step is the first to read."""
        for place in self.arriving.get(step, ()):
            x = env[place]
            due = self.arrived - AHEAD
            self.arrived += 1
            if due >= 0 and self.updated:
                o, new = self.updated.pop(0)
                x, new = lax.optimization_barrier((x, new))
                self.away[o] = _to_host(new)
            elif self.before is not None:
                x, env[self.before] = lax.optimization_barrier((x, env[self.before]))
            env[place] = jax.device_put(x, jax.memory.Space.Device)

    def send(self, step: int, env: Mapping[Place, Any]) -> None:
        """What this step has made anew goes back, once the next leaf is waiting for it to go."""
        self.updated += [(o, env[place]) for o, place in self.leaving.get(step, ())]

    def finish(self, outputs: list[Any]) -> list[Any]:
        """The results of the schedule, with those in host memory that rest there."""
        self.away.update((o, _to_host(new)) for o, new in self.updated)
        return [
            self.away[o] if o in self.away else _to_host(x) if o in self.outputs else x for o, x in enumerate(outputs)
        ]


def _to_host(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host)
