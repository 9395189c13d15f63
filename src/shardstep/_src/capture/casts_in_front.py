"""Casts of scanned weights in front of their loops.

    scan(f, x, W: f32[L, m, n])  with  f(x, w) = x @ bf16(w)     ->     scan(g, x, bf16(W))  with  g(x, w) = x @ w

A loop that gathers each layer casts it first, inside. Where all layers are gathered in front of the loop instead, it is
their casts that should travel, and be kept until the backward pass: half of the bytes. Microbatches that all read the
same layers are such a case: there is one cast for all of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from ..core import compat
from ..core.layout import Array
from ..core.program import Atom, Equation, Program, Var

_SCAN, _CAST, _BARRIER = map(compat.primitive, ("scan", "convert_element_type", "optimization_barrier"))


def casts_in_front(program: Program, slices: Container[Atom] | None = None) -> Program:
    """The same program; the casts of one stack that several loops read are made once.

    `slices`: the values of which loops may find the slices cast, None: all. What is the same in all iterations is cast
    in front of them in any case.
    """
    made: dict[tuple[Atom, Any], Var] = {}
    equations: list[Equation] = []
    for before in program.equations:
        equation = before
        if equation.primitive is _SCAN:
            consts, carries = compat.scan_counts(equation.params)
            inputs, xs = list(equation.inputs), range(consts + carries, len(equation.inputs))
            moved = [*range(consts), *(k for k in xs if slices is None or inputs[k] in slices)]
            body = casts_in_front(equation.bodies[0], {equation.bodies[0].inputs[k] for k in moved})
            for k in moved:
                cast, stack = _only_cast(body, body.inputs[k]), inputs[k]
                if cast is None or not isinstance(stack, Var):
                    continue
                narrow = cast.outputs[0].array.dtype
                if (stack, narrow) not in made:
                    made[stack, narrow] = Var(Array(stack.array.shape, narrow))
                    outside = replace(cast, inputs=(stack,), outputs=(made[stack, narrow],))
                    equations.append(outside)
                inputs[k] = made[stack, narrow]
                body = _with_narrow(body, k, narrow)
            if body is not equation.bodies[0]:
                equation = replace(equation, inputs=tuple(inputs), bodies=(body,))
        equations.append(equation)
    if all(a is b for a, b in zip(equations, program.equations, strict=False)):
        return program
    return replace(program, equations=tuple(equations))


def _only_cast(body: Program, var: Var) -> Equation | None:
    """A cast to a narrower dtype, if the body reads the value through casts to it alone (and barriers before them)."""
    casts = list(_readers(body, var))
    if not casts or any(e is None or e.primitive is not _CAST for e in casts):
        return None
    dtypes = {e.outputs[0].array.dtype for e in casts if e is not None}
    return casts[0] if len(dtypes) == 1 and dtypes.pop().itemsize < var.array.dtype.itemsize else None


def _readers(body: Program, var: Var) -> Iterator[Equation | None]:
    """Who reads a value, on the other side of barriers; None: it leaves the body as it is."""
    if var in body.outputs:
        yield None
    for equation in body.equations:
        for operand, result in zip(equation.inputs, equation.outputs, strict=False):
            if equation.primitive is _BARRIER and operand is var:
                yield from _readers(body, result)
        if equation.primitive is not _BARRIER and var in equation.inputs:
            yield equation


def _with_narrow(body: Program, k: int, dtype: Any) -> Program:
    """The body of a loop that takes its k-th input cast already."""
    given = Var(Array(body.inputs[k].array.shape, dtype))
    now: dict[Atom, Atom] = {body.inputs[k]: given}
    narrowed = {body.inputs[k]}  # what is narrow now, and was not
    equations = []
    for equation in body.equations:
        if equation.primitive is _CAST and equation.inputs[0] in narrowed:
            now[equation.outputs[0]] = now[equation.inputs[0]]
            continue
        outputs = list(equation.outputs)
        if equation.primitive is _BARRIER:
            for i, (operand, result) in enumerate(zip(equation.inputs, equation.outputs, strict=True)):
                if operand in narrowed:
                    outputs[i] = Var(Array(result.array.shape, dtype))
                    now[result] = outputs[i]
                    narrowed.add(result)
        inputs = tuple(now.get(a, a) for a in equation.inputs)
        equations.append(replace(equation, inputs=inputs, outputs=tuple(outputs)))
    entering = (*body.inputs[:k], given, *body.inputs[k + 1 :])
    return replace(
        body, inputs=entering, outputs=tuple(now.get(a, a) for a in body.outputs), equations=tuple(equations)
    )
