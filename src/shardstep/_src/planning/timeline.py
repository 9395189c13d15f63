"""The step in order, for people: what is computed, what is sent, and on which of their own lines.

    forward -> backward -> reduce-scatter -> update -> all-gather

An equation belongs to the *update* if it runs over no examples and nothing that does depends on it. What is left is
the forward or the backward pass; JAX's own name stack tells which.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core import compat
from ..core.layout import Layout, Partial, show
from ..core.program import Atom, Literal, Var
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


def moments(schedule: Schedule, loop: str = "", times: int = 1) -> Iterator[Moment]:
    """The schedule in program order, those of loops and branches in their place."""
    phases = phases_of(schedule)
    for step, phase, sent in zip(schedule.steps, phases, schedule.sent, strict=False):
        yield Moment(step, phase, sent, loop, times)
        for body, often in zip(step.bodies, step.times, strict=True):
            inside = f"{step.equation.primitive} at {step.equation.line}"
            yield from moments(body, loop or inside, times * often)
    yield Moment(None, OUTPUT, schedule.sent[-1], loop, times)


def phases_of(schedule: Schedule) -> list[str]:
    """The phase of each step."""
    found: list[str] = []
    leading: set[Atom] = set()  # values that work on the examples depends on
    for step, (on_examples, on_terms) in reversed(list(zip(schedule.steps, _shares(schedule), strict=True))):
        equation = step.equation
        if on_examples or on_terms or any(v in leading for v in equation.outputs):
            leading.update(a for a in equation.inputs if isinstance(a, Var))
            found.append(BACKWARD if on_terms or compat.is_backward(equation.sources) else FORWARD)
        else:
            found.append(UPDATE)
    return found[::-1]


def _shares(schedule: Schedule) -> Iterator[tuple[bool, bool]]:
    """For each step: does it run over examples? Over sums over examples that are not reduced yet (gradients)?"""
    terms: set[Atom] = set()
    for step in schedule.steps:
        on_examples = step.ruling.over_examples
        on_terms = any(a in terms and _partial(f) for a, f in zip(step.equation.inputs, step.operands, strict=True))
        if on_examples or on_terms:
            results = zip(step.equation.outputs, step.results, strict=True)
            terms.update(v for v, layout in results if _partial(layout))
        yield on_examples, on_terms and not on_examples


def _partial(layout: Layout) -> bool:
    return any(isinstance(p, Partial) for p in layout)


# -- the picture --------------------------------------------------------------------------------------------------


def segments(told: Iterable[Moment], clock: Clock) -> tuple[Segment, ...]:
    """The step as few stretches: while a phase lasts, each kind of collective in it is counted once."""
    found: list[dict[str, list[float]]] = []
    where: list[tuple[str, int]] = []
    stretch: tuple[str, str] | None = None
    for moment in told:
        if (moment.phase, moment.loop) != stretch:
            stretch = (moment.phase, moment.loop)
            found.append({})
            where.append((moment.loop, moment.times))
        for c in moment.sent:
            _count(found[-1], c.kind, c.bytes * moment.times, clock.sending(c) * moment.times)
        if moment.step is not None and not moment.step.bodies:
            made = moment.step.ruling.bytes_made * moment.times
            _count(found[-1], moment.phase, made, clock.working(moment.step) * moment.times)
    return clock.settled(
        _joined(
            Segment(what, int(count), nbytes, *place, seconds)
            for kinds, place in zip(found, where, strict=True)
            for what, (count, nbytes, seconds) in kinds.items()
        )
    )


def _count(stretch: dict[str, list[float]], what: str, nbytes: float, seconds: float) -> None:
    sums = stretch.setdefault(what, [0, 0.0, 0.0])
    sums[0] += 1
    sums[1] += nbytes
    sums[2] += seconds


_TRIFLE = 0.005  # of all that is computed: a counter is no phase


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one kind as one; trifling stretches of work are left out, but for the largest of a phase."""
    listed = list(segments)
    largest = {s.what: s for s in sorted(listed, key=lambda s: s.bytes)}
    total = sum(s.bytes for s in listed if s.what in PHASES)
    kept: list[Segment] = []
    for s in listed:
        if kept and (kept[-1].what, kept[-1].loop) == (s.what, s.loop):
            last = kept[-1]
            nbytes, seconds = last.bytes + s.bytes, last.seconds + s.seconds
            kept[-1] = replace(last, count=last.count + s.count, bytes=nbytes, seconds=seconds)
        elif s.what not in PHASES or s.bytes >= _TRIFLE * total or s is largest[s.what]:
            kept.append(s)
    return tuple(kept)


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
