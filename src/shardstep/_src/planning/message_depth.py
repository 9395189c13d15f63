"""Put equations that wait for the same number of messages side by side.

A step that normalises leaf by leaf (LAMB: two norms for each weight, then its update) sends a small message for each
leaf, one after the other, although no leaf waits for another. Sorted by *depth*, the number of small messages that a
value has waited for, all norms come before all updates, and `buckets.py` finds them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..core.layout import Layout
from ..core.program import Atom
from ..core.schedule import Bundle, Schedule, Step, Transfer

Form = tuple[Atom, Layout]  # a value as replicas hold it


def by_depth(schedule: Schedule, waits: Callable[[Transfer], bool]) -> Schedule:
    """The same schedule with its steps in the order of their depth; `waits` says which transfers are small messages."""
    depths = _depths(schedule, waits)
    order = sorted(range(len(depths)), key=depths.__getitem__)  # stable: what is read is still made before
    steps = tuple(schedule.steps[i] for i in order)
    return replace(schedule, steps=steps, transfers=_in_front_of_readers(schedule, steps))


def _depths(schedule: Schedule, waits: Callable[[Transfer], bool]) -> list[int]:
    """For each step, how many small messages precede it, one after the other."""
    depth: dict[Form, int] = {}
    found = []
    for step, bundles in zip(schedule.steps, schedule.transfers, strict=False):
        for t in (t for bundle in bundles for t in bundle):
            depth[t.var, t.target] = depth.get((t.var, t.source), 0) + waits(t)
        found.append(max((depth.get(form, 0) for form in _read(step)), default=0))
        depth.update(dict.fromkeys(zip(step.equation.outputs, step.results, strict=True), found[-1]))
    return found


def _in_front_of_readers(schedule: Schedule, steps: Sequence[Step]) -> tuple[tuple[Bundle, ...], ...]:
    """Each transfer where its result is first read, in the new order."""
    first: dict[Form, int] = {}
    for place, step in enumerate(steps):
        for form in _read(step):
            first.setdefault(form, place)
    made = [t for bundles in schedule.transfers for bundle in bundles for t in bundle]
    for t in reversed(made):  # what a transfer starts from may be the result of another
        place = first.setdefault((t.var, t.target), len(steps))
        first[t.var, t.source] = min(place, first.get((t.var, t.source), place))
    places: list[list[Bundle]] = [[] for _ in range(len(steps) + 1)]
    for t in made:
        places[first[t.var, t.target]].append((t,))
    return tuple(map(tuple, places))


def _read(step: Step) -> list[Form]:
    return list(zip(step.equation.inputs, step.operands, strict=True))
