"""When are two pieces of a program the same work on different values?

Each piece is written down with its values numbered in the order in which they are met: pieces whose forms are equal do
the same to whatever enters them. Shapes, dtypes, parameters and constants are part of the form; names are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.program import Atom, Equation, Literal, Program

_LARGE = 4096  # constants of more bytes are equal only if they are one object


def form(equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom]) -> Any:
    """Hashable, and equal for pieces that do the same."""
    numbers: dict[Atom, int] = {}
    for atom in inputs:
        numbers[atom] = len(numbers)
    written = tuple(_written(equation, numbers) for equation in equations)
    return tuple(a.array for a in inputs), written, tuple(_read(a, numbers) for a in outputs)


def _written(equation: Equation, numbers: dict[Atom, int]) -> Any:
    read = tuple(_read(a, numbers) for a in equation.inputs)
    for var in equation.outputs:
        numbers[var] = len(numbers)
    made = tuple(v.array for v in equation.outputs)
    return equation.primitive, _params(equation), read, made, tuple(map(_body, equation.bodies))


def _read(atom: Atom, numbers: Mapping[Atom, int]) -> Any:
    return ("constant", atom.array, _value(atom.value)) if isinstance(atom, Literal) else numbers[atom]


def _body(program: Program) -> Any:
    constants = [var for var, _ in program.constants]
    values = tuple(_value(value) for _, value in program.constants)
    return form(program.equations, [*constants, *program.inputs], program.outputs), values


def _value(value: Any) -> Any:
    nbytes = getattr(value, "nbytes", 0)
    if nbytes > _LARGE:
        return id(value)
    held = np.asarray(value)
    return str(held.dtype), held.shape, held.tobytes()


def _params(equation: Equation) -> Any:
    """Without the bodies, which are written down on their own."""
    items = sorted(equation.params.items())
    return tuple((name, _hashable(value)) for name, value in items if not (equation.bodies and _holds_jaxpr(value)))


def _holds_jaxpr(value: Any) -> bool:
    return any(hasattr(v, "eqns") or hasattr(v, "jaxpr") for v in (value if isinstance(value, tuple) else (value,)))


def _hashable(value: Any) -> Any:
    if _holds_jaxpr(value):
        return str(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
