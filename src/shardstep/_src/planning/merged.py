"""Equations that a compiler merges: the same work on the same values."""

from __future__ import annotations

from typing import Any

from ..core import compat
from ..core.program import Atom, Literal
from ..core.schedule import Step

_BARRIER = compat.primitive("optimization_barrier")


class Merged:
    """What a compiler that drops barriers makes once, though the program says twice: a rematerialised block is the
    forward pass again, value for value.
    """

    def __init__(self) -> None:
        self.first: dict[Atom, Atom] = {}  # what a value is the same as
        self.made: dict[Any, tuple[Atom, ...]] = {}

    def with_earlier(self, step: Step) -> tuple[Atom, ...]:
        """The values that the results of an equation are the same as; none, if they are new."""
        equation, ruling = step.equation, step.ruling
        atoms = tuple(self.first.get(a, a) for a in equation.inputs)
        if equation.primitive is _BARRIER:
            found: tuple[Atom, ...] = atoms
        elif equation.bodies or equation.effects:
            return ()
        else:
            read = tuple(str(a.value) if isinstance(a, Literal) else a for a in atoms)
            params = tuple(sorted(equation.params.items()))
            try:
                found = self.made.setdefault((equation.primitive, params, read, ruling.operands), equation.outputs)
            except TypeError:  # parameters that cannot be compared
                return ()
        if found is equation.outputs:
            return ()
        self.first.update(zip(equation.outputs, found, strict=True))
        return found
