"""Optimizer state that rests in host memory: which leaves, and in which order the update takes them.

A leaf that only the update reads is away from the device while the model runs. The update is put in order leaf by leaf,
so that each piece of the state arrives, is updated and leaves again before the next but one arrives
(`runtime/host_memory.py` moves them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..capture.step import Captured
from ..core.layout import Layout, Split
from ..core.options import Options
from ..core.program import Atom, Equation, Program, Var
from ..core.schedule import Schedule
from ..machine.replicas import Replicas
from .tied_leaves import families

REFUSED = "Options(offload=False)"
NEEDED = "nothing else fits into the memory of a device"


def why_not(options: Options, replicas: Replicas) -> str:
    """Why nothing may rest in host memory; empty if it may."""
    if options.offload is False:
        return REFUSED
    if replicas.topology.platform == "cpu":
        return "on CPU a device's memory is the host's: there is nothing to move"
    if replicas.user_axes:
        return f"not where mesh axes of the user's ({', '.join(replicas.user_axes)}) cut a replica into several devices"
    if options.engine == "annotate":
        return "not with engine='annotate', which leaves the update as it is"
    return ""


def hosted(captured: Captured, roles: Sequence[str], resting: Sequence[Layout]) -> dict[int, int]:
    """The leaves that rest in host memory, with the outputs that replace them: optimizer state that is sharded."""
    frozen = captured.frozen
    return {
        i: o
        for i, o in captured.state.items()
        if roles[i] == "auxiliary" and i not in frozen and any(isinstance(p, Split) for p in resting[i])
    }


def leaf_by_leaf(captured: Captured, roles: Sequence[str], small: int) -> Program:
    """The same program, with what needs no state from host memory first, and then the update leaf after leaf."""
    program = captured.program
    late: set[Atom] = {
        v for v, role in zip(program.inputs, roles, strict=True) if role == "auxiliary" and v.array.nbytes >= small
    }
    order = _Order(program)
    for equation in program.equations:
        if late.isdisjoint(equation.inputs) or equation.effects:
            order.add([equation])
        else:
            late.update(equation.outputs)
    for family in families(program, captured.state):
        order.make(program.outputs[captured.state[i]] for i in family)
    order.add(program.equations)
    return Program(program.inputs, program.outputs, tuple(order.equations), program.constants)


class _Order:
    """Equations in a new order, each after those whose results it reads."""

    def __init__(self, program: Program):
        self.equations: list[Equation] = []
        self.makers: Mapping[Atom, Equation] = {v: e for e in program.equations for v in e.outputs}
        self.added: set[Equation] = set()

    def make(self, values: Iterable[Atom]) -> None:
        for value in values:
            if isinstance(value, Var) and value in self.makers:
                self.add([self.makers[value]])

    def add(self, equations: Iterable[Equation]) -> None:
        for equation in equations:
            waiting = [equation]
            while waiting:
                top = waiting[-1]
                needed = [] if top in self.added else self.missing(top)
                if needed:
                    waiting.extend(reversed(needed))
                    continue
                waiting.pop()
                if top not in self.added:
                    self.added.add(top)
                    self.equations.append(top)

    def missing(self, equation: Equation) -> list[Equation]:
        makers = (self.makers.get(atom) for atom in equation.inputs)
        return [e for e in makers if e is not None and e not in self.added]


def told(schedule: Schedule, inputs: Mapping[int, int], why: str) -> str:
    """Why leaves rest in host memory, and where the update would take them all at once: in a loop over steps, say."""
    carried: set[Atom] = {schedule.program.inputs[i] for i in inputs}
    for step in schedule.steps:
        if step.bodies and not carried.isdisjoint(step.equation.inputs):
            return f"{why}; they stay on the device during the {step.equation.primitive} at {step.equation.line}"
    return why
