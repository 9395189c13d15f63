"""What each collective carries, in the user's terms: the gradient of a weight, a new weight, a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..capture.step import Captured
from ..core.layout import Partial
from ..core.program import Atom, Equation, Var
from ..core.schedule import Collective, Schedule, Step, Transfer
from ..rules.added_rows import ADDED
from .paths import dotted

Name = tuple[str, str]  # what a value is, and the path of its leaf
GRADIENT = "gradient of"


class Names(NamedTuple):
    """Of values: what they are, and the weight whose gradient they are if they are sums over the replicas."""

    values: dict[Atom, Name]
    gradients: dict[Atom, Name]

    def of(self, transfer: Transfer) -> Name:
        """A value that replicas hold terms of, on its way into a new weight, is a gradient."""
        if any(isinstance(p, Partial) for p in transfer.source) and transfer.var in self.gradients:
            return self.gradients[transfer.var]
        if transfer.var in self.values:
            return self.values[transfer.var]
        kind, path = self.gradients.get(transfer.var, ("", ""))
        return ("update of", path) if kind else ("", "")  # reduced already: made of the gradient


def carried(schedule: Schedule, captured: Captured, roles: Sequence[str]) -> tuple[Collective, ...]:
    """The collectives of a schedule, each with the name of what it carries."""
    known = _borders(captured, roles)
    new = {v: (GRADIENT, path) for v, (kind, path) in known.items() if kind == "new weight"}
    return tuple(_named(schedule, Names(known, new)))


def _borders(captured: Captured, roles: Sequence[str]) -> dict[Atom, Name]:
    """Names for the inputs and outputs of a step. What a weight's output is made of is on its way to a gradient."""
    inputs, outputs = captured.program.inputs, captured.program.outputs
    names: dict[Atom, Name] = {}
    replaced = {o: i for i, o in captured.state.items()}
    for o, (out, path) in enumerate(zip(outputs, _result_paths(captured), strict=True)):
        if o in replaced:
            kind, path = f"new {_KINDS.get(roles[replaced[o]], 'state')}", captured.paths[replaced[o]]
        else:
            kind = "result"
        names.setdefault(out, (kind, path))
    for i, v in enumerate(inputs):
        names[v] = _KINDS.get(roles[i], "argument"), captured.paths[i]
    return names


_KINDS = {"weight": "weight", "auxiliary": "state", "frozen": "weight", "batch": "batch"}


def _result_paths(captured: Captured) -> list[str]:
    """Of the arrays that the step returns."""
    constants = {i for i, _ in captured.out_constants}
    return [dotted(path) for i, path in enumerate(captured.out_paths) if i not in constants]


def _spread(schedule: Schedule, known: Names) -> Names:
    """Names for values between the borders too.

    Forwards, what is made of one named value alone and has as many elements (a cast, a transpose) keeps its name.
    Backwards, what a new weight is made of in the update, with as many elements, is its gradient.
    """
    values, gradients = dict(known.values), dict(known.gradients)
    for step in schedule.steps:
        for source, v in _alone(step):
            if source in values and v.array.size == source.array.size:
                values.setdefault(v, values[source])
    for step in reversed(schedule.steps):
        if step.bodies or step.ruling.over_examples:
            continue
        for v in step.equation.outputs:
            for a in step.equation.inputs if v in gradients else ():
                row = step.equation.primitive is ADDED and a.array.ndim > 0
                if isinstance(a, Var) and (row or a.array.size == v.array.size):
                    gradients.setdefault(a, gradients[v])
    return Names(values, gradients)


def _alone(step: Step) -> Iterator[tuple[Var, Var]]:
    """The results that are made of one value alone, with that value."""
    equation = step.equation
    sources = [a for a in equation.inputs if isinstance(a, Var)]
    if step.bodies:
        return
    if step.ruling.apart and len(sources) == len(equation.outputs):
        yield from zip(sources, equation.outputs, strict=True)
    elif len(sources) == 1:
        yield from ((sources[0], v) for v in equation.outputs)


def _named(schedule: Schedule, known: Names) -> Iterator[Collective]:
    """In the order of `Schedule.collectives`."""
    names = _spread(schedule, known)
    yield from _sent(schedule, 0, names)
    for i, step in enumerate(schedule.steps):
        loop = f"{step.equation.primitive} at {step.equation.line}" if step.bodies else ""
        for body, times in zip(step.bodies, step.times, strict=True):
            inside = Names(*(_inside(step.equation, body, outside) for outside in names))
            for c in _named(body, inside):
                yield replace(c, loop=c.loop or loop, times=c.times * times)
        yield from _sent(schedule, i + 1, names)


def _sent(schedule: Schedule, place: int, names: Names) -> Iterator[Collective]:
    for bundle, c in schedule.bundled[place]:
        yield replace(c, carries=tuple(names.of(transfer) for transfer in bundle))


def _inside(equation: Equation, body: Schedule, outside: Mapping[Atom, Name]) -> dict[Atom, Name]:
    """The names of what a loop or branch reads and makes, by those of its operands and results."""
    inputs, outputs = body.program.inputs, body.program.outputs
    names: dict[Atom, Name] = {}
    known = len(inputs)
    if str(equation.primitive) == "while":  # the constants of condition and body come first: only the carry is sure
        known = min(len(equation.outputs), len(inputs))
    if len(outputs) == len(equation.outputs):
        for made, outer in zip(outputs, equation.outputs, strict=True):
            if outer in outside:
                names[made] = outside[outer]
    for inner, given in zip(reversed(inputs), reversed(equation.inputs), strict=False):
        if known and given in outside:
            names[inner] = outside[given]
        known = max(known - 1, 0)
    return names
