"""Small exact rewrites of the program that make layouts easier.

    transpose(dot(x, y))  ->  dot(y, x)
    x[arange(B), i]       ->  a lookup inside each row (`own_rows.py`)

JAX computes a weight's gradient as a product and then transposes it. Left as it is, the transpose stands between the
product and its reduction: the reduction would run over an inner dimension, and a product in bfloat16 would be rounded
before the sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core import compat
from ..core.program import Atom, Equation, Program
from .own_rows import look_into_own_rows

_DOT, _TRANSPOSE = compat.primitive("dot_general"), compat.primitive("transpose")


def simplify(program: Program) -> Program:
    program = look_into_own_rows(program)
    uses = program.uses
    dots: dict[Atom, Equation] = {}
    folded: dict[Equation, Equation] = {}  # transpose -> the product that replaces it
    for equation in program.equations:
        if equation.primitive is _DOT and uses[equation.outputs[0]] == 1:
            dots[equation.outputs[0]] = equation
        elif equation.primitive is _TRANSPOSE and equation.inputs[0] in dots:
            dot = dots[equation.inputs[0]]
            if tuple(equation.params["permutation"]) == _swap(dot):
                folded[equation] = swapped(dot, equation)
    gone = {dots[equation.inputs[0]] for equation in folded}
    equations = tuple(folded.get(e, e) for e in program.equations if e not in gone)
    bodies = {e: tuple(map(simplify, e.bodies)) for e in equations if e.bodies}
    return replace(program, equations=tuple(replace(e, bodies=bodies[e]) if e in bodies else e for e in equations))


def _swap(dot: Equation) -> tuple[int, ...]:
    """The permutation that puts the dimensions of the second factor before those of the first."""
    (contracted, _), (batch, _) = dot.params["dimension_numbers"]
    first = len(batch)
    second = first + dot.inputs[0].array.ndim - len(contracted) - len(batch)
    ndim = dot.outputs[0].array.ndim
    return (*range(first), *range(second, ndim), *range(first, second))


def swapped(dot: Equation, transpose: Equation) -> Equation:
    (lc, rc), (lb, rb) = dot.params["dimension_numbers"]
    params: dict[str, Any] = {**dot.params, "dimension_numbers": ((rc, lc), (rb, lb))}
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    return replace(dot, params=params, inputs=dot.inputs[::-1], outputs=transpose.outputs)
