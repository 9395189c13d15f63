"""The step in order, for people: what is computed, what is sent, and on which of their own lines.

    forward -> backward -> reduce-scatter -> update -> all-gather

An equation belongs to the *update* if it runs over no examples, nothing that does depends on it, and it is no part of
what is differentiated (examples that visit weights are everywhere: the layout does not tell them then). What is left
is the forward or the backward pass; JAX's own name stack tells which.
"""

from __future__ import annotations

import bisect
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core import compat
from ..core.layout import show
from ..core.program import Atom, Literal
from ..core.schedule import Collective, Schedule, Step

PHASES = FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
OUTPUT = "output"


@dataclass(frozen=True)
class Segment:
    """A stretch of the step: the equations of one phase, or the collectives of one kind."""

    what: str  # forward, backward, update; or all-reduce, reduce-scatter, all-gather, ...
    count: int  # equations or collectives
    bytes: float  # computed or sent per replica, in all
    loop: str = ""  # the loop or branch it is inside of
    times: int = 1  # how often a step does it
    seconds: float = 0.0  # predicted, in all
    visit: int = 0  # of the loop: a scan and the scan of its backward pass stand on one line


class Clock(NamedTuple):
    """How long things take: a collective, an equation; and all of each together, which is predicted better."""

    sending: Callable[[Collective], float]
    working: Callable[[Step], float]
    wire: float
    work: float

    def settled(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """The same segments, scaled so that all together take what is predicted for the step."""
        counted = {kind: sum(s.seconds for s in segments if (s.what in PHASES) == kind) for kind in (True, False)}
        wanted = {True: self.work, False: self.wire}
        scale = {kind: wanted[kind] / total if total else 0.0 for kind, total in counted.items()}
        return tuple(replace(s, seconds=s.seconds * scale[s.what in PHASES]) for s in segments)


@dataclass(frozen=True)
class Line:
    """One equation of the update as each replica runs it, with the user's line that it comes from."""

    text: str
    source: str
    code: str
    count: int  # how many of these the line makes, for as many leaves
    sends: str = ""  # what it makes the replicas send first


class Moment(NamedTuple):
    """One equation of the schedule with what is sent before it; None means the outputs."""

    step: Step | None
    phase: str
    sent: Sequence[Collective]
    loop: str = ""
    times: int = 1
    visit: int = 0


def moments(schedule: Schedule, loop: str = "", times: int = 1, visit: int = 0) -> Iterator[Moment]:
    """The schedule in program order, those of loops and branches in their place."""
    phases = phases_of(schedule)
    for number, (step, phase, sent) in enumerate(zip(schedule.steps, phases, schedule.sent, strict=False), 1):
        yield Moment(step, phase, sent, loop, times, visit)
        for body, often in zip(step.bodies, step.times, strict=True):
            inside = f"{step.equation.primitive} at {step.equation.line}"
            yield from moments(body, loop or inside, times * often, visit or number)
    yield Moment(None, OUTPUT, schedule.sent[-1], loop, times, visit)


def phases_of(schedule: Schedule) -> list[str]:
    """The phase of each step."""
    found: list[str] = []
    leading: set[Atom] = set()  # values that work on the examples depends on
    for step, (on_examples, on_terms) in reversed(list(zip(schedule.steps, _shares(schedule), strict=True))):
        equation = step.equation
        if on_examples or on_terms or equation.is_differentiated or not leading.isdisjoint(equation.outputs):
            leading.update(equation.inputs)
            found.append(BACKWARD if on_terms or compat.is_backward(equation.sources) else FORWARD)
        else:
            found.append(UPDATE)
    return found[::-1]


def of_update(step: Step) -> bool:
    """Does it belong to the update, as far as can be told from itself? Loops are asked for what is inside."""
    return not step.ruling.over_examples and (bool(step.bodies) or not step.equation.is_differentiated)


def _shares(schedule: Schedule) -> Iterator[tuple[bool, bool]]:
    """For each step: does it run over examples? Over sums over examples that are not reduced yet (gradients)?"""
    terms: set[Atom] = set()
    for step in schedule.steps:
        equation, ruling = step.equation, step.ruling
        on_examples = ruling.over_examples
        on_terms = bool(ruling.reads_terms) and any(equation.inputs[i] in terms for i in ruling.reads_terms)
        if ruling.makes_terms and (on_examples or on_terms):
            terms.update(equation.outputs[i] for i in ruling.makes_terms)
        yield on_examples, on_terms and not on_examples


# -- the picture --------------------------------------------------------------------------------------------------


_GRAIN = 0.004  # of the step: what is shorter is drawn together with what follows it


def segments(told: Iterable[Moment], clock: Clock) -> tuple[Segment, ...]:
    """The step as stretches in program order: messages, then the work that they were sent for.

    What alternates more finely than `_GRAIN` is summed.
    """
    listed = list(told)
    total = sum(_seconds(moment, clock) for moment in listed)
    found: list[dict[str, list[float]]] = []
    where: list[Moment] = []
    stretch: tuple[str, int] | None = None
    for moment in listed:
        full = bool(moment.sent) and bool(found) and sum(s for _, _, s in found[-1].values()) > _GRAIN * total
        if (moment.phase, moment.visit) != stretch or full:
            stretch = (moment.phase, moment.visit)
            found.append({})
            where.append(moment)
        for c in moment.sent:
            _count(found[-1], c.kind, c.bytes * moment.times, clock.sending(c) * moment.times)
        if moment.step is not None and not moment.step.bodies:
            made = moment.step.ruling.bytes_made * moment.times
            _count(found[-1], moment.phase, made, clock.working(moment.step) * moment.times)
    return clock.settled(
        _joined(
            Segment(what, int(count), nbytes, first.loop, first.times, seconds, first.visit)
            for kinds, first in zip(found, where, strict=True)
            for what, (count, nbytes, seconds) in sorted(kinds.items(), key=lambda kind: kind[0] in PHASES)
        )
    )


def _seconds(moment: Moment, clock: Clock) -> float:
    working = clock.working(moment.step) if moment.step is not None and not moment.step.bodies else 0.0
    return moment.times * (working + sum(map(clock.sending, moment.sent)))


def _count(stretch: dict[str, list[float]], what: str, nbytes: float, seconds: float) -> None:
    sums = stretch.setdefault(what, [0, 0.0, 0.0])
    sums[0] += 1
    sums[1] += nbytes
    sums[2] += seconds


_TRIFLE = 0.002  # of the step: a counter is no phase


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one kind as one; trifling stretches of work are counted with a longer one of their phase."""
    listed = _neighbours(segments)
    largest = {s.what: i for i, s in sorted(enumerate(listed), key=lambda found: found[1].seconds)}
    least = _TRIFLE * sum(s.seconds for s in listed)
    kept = {i: s for i, s in enumerate(listed) if s.what not in PHASES or s.seconds >= least or largest[s.what] == i}
    homes: dict[object, list[int]] = {}
    for i, s in kept.items():
        homes.setdefault((s.what, s.visit), []).append(i)
    for i, s in enumerate(listed):
        if i not in kept:
            near = homes.get((s.what, s.visit), [largest[s.what]])
            home = near[min(bisect.bisect(near, i), len(near) - 1)]
            kept[home] = _sum(kept[home], s)
    return tuple(_neighbours(kept.values()))


def _neighbours(segments: Iterable[Segment]) -> list[Segment]:
    found: list[Segment] = []
    for s in segments:
        if found and (found[-1].what, found[-1].visit) == (s.what, s.visit):
            found[-1] = _sum(found[-1], s)
        else:
            found.append(s)
    return found


def _sum(one: Segment, other: Segment) -> Segment:
    return replace(
        one, count=one.count + other.count, bytes=one.bytes + other.bytes, seconds=one.seconds + other.seconds
    )


# -- the update, equation by equation -----------------------------------------------------------------------------


def update_lines(told: Iterable[Moment], paths: Mapping[Atom, str]) -> tuple[Line, ...]:
    """The equations of the update; those that one line makes for several leaves are shown once. `paths` name inputs."""
    names = _Names(dict(paths))
    found: dict[object, Line] = {}
    counts: Counter[object] = Counter()
    for moment in told:
        step = moment.step
        if step is None or moment.phase != UPDATE or step.bodies:
            continue
        source = step.equation.line
        kinds = tuple((c.kind, c.dtype) for c in moment.sent)
        key = (step.equation.primitive, step.equation.pattern, source, step.operands, step.results, kinds, moment.loop)
        counts[key] += 1
        if key not in found:
            sends = ", ".join(f"{kind} {dtype}" for kind, dtype in kinds)
            found[key] = Line(names.show(step), source, source_text(source), 1, sends)
    return tuple(replace(line, count=counts[key]) for key, line in found.items())


class _Names:
    """Names for the values of a program, as a printed jaxpr has them; inputs go by their paths."""

    def __init__(self, known: dict[Atom, str]):
        self.known = known
        self.made = 0

    def show(self, step: Step) -> str:
        equation = step.equation
        operands = " ".join(self.of(a) for a in equation.inputs)
        results = ", ".join(
            f"{self.of(v)}:{v.array.dtype}{list(v.array.shape)} {show(layout)}"
            for v, layout in zip(equation.outputs, step.results, strict=True)
        )
        return f"{results} = {equation.primitive} {operands}".rstrip()

    def of(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            text = str(atom.value)
            return text if len(text) <= 12 else f"{text[:11]}…"
        if atom not in self.known:
            self.known[atom] = _letters(self.made)
            self.made += 1
        return self.known[atom]


def _letters(number: int) -> str:
    """a, b, ..., z, ba, bb, ..."""
    text = chr(ord("a") + number % 26)
    return text if number < 26 else _letters(number // 26) + text


def source_text(source: str) -> str:
    """The code at `train.py:31:4 (loss)`, where the file can be read."""
    place = re.match(r"(.+?):(\d+)", source)
    return linecache.getline(place[1], int(place[2])).strip() if place else ""
