"""Who meets the examples? That is what makes a weight a weight."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.program import Atom, Equation, Program


class Meetings:
    """Which values of a program are computed from the examples, and which are read together with them."""

    def __init__(self) -> None:
        self.from_batch: set[Atom] = set()
        self.meeting: set[Atom] = set()

    def note(self, equation: Equation, meeting: Sequence[Atom]) -> None:
        """Of the operands of this equation, these meet examples."""
        self.meeting.update(meeting)
        if not self.from_batch.isdisjoint(equation.inputs):
            self.from_batch.update(equation.outputs)

    def inputs(self, program: Program) -> frozenset[int]:
        """The inputs that met the examples, or that a value was made of, examples apart, which did.

        And those whose errors come back to the examples, though they were read after those had been summed up (the
        last layer of a network over graphs): they made a value that meets examples. But not what has made a weight
        again: the moments of a first update reach the examples only through the weight that a second one reads.
        """
        direct = _made_of(self.meeting - self.from_batch, program, self.from_batch)
        found = {i for i, var in enumerate(program.inputs) if var in direct}
        weights = {tuple(sorted(program.inputs[i].array.shape)) for i in found}
        again: set[Atom] = {a for e in program.equations for a in e.outputs if tuple(sorted(a.array.shape)) in weights}
        errors = _made_of((self.meeting & self.from_batch) - again, program, again)
        return frozenset(found | {i for i, var in enumerate(program.inputs) if var in errors - self.from_batch})


def _made_of(reached: set[Atom], program: Program, apart: set[Atom]) -> set[Atom]:
    """These values and all that they are made of, some apart."""
    reached = set(reached)
    for equation in reversed(program.equations):
        if not reached.isdisjoint(equation.outputs):
            reached.update(a for a in equation.inputs if a not in apart)
    return reached
