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
        """The inputs that met the examples, or that a value was made of, examples apart, which did."""
        reached = self.meeting - self.from_batch
        for equation in reversed(program.equations):
            if not reached.isdisjoint(equation.outputs):
                reached.update(a for a in equation.inputs if a not in self.from_batch)
        return frozenset(i for i, var in enumerate(program.inputs) if var in reached)
