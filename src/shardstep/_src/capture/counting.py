"""Small integers that are known before the step runs: literals, ranges, counters of loops, and what is made of them.

In the body of a loop a value is known for each iteration: row p of what is kept here is what it is where slice p of the
loop's stacks is read and written. A value that is the same in all of them has one row, and so has one outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import compat
from ..core.program import Atom, Equation, Literal, Program, Var

Known = Mapping[Atom, np.ndarray]

_P = compat.primitive
_ADD, _SUB, _SELECT, _BARRIER = map(_P, ("add", "sub", "select_n", "optimization_barrier"))
_LARGEST = 1 << 16  # elements

_ELEMENTWISE: dict[Any, Callable[..., np.ndarray]] = {
    _ADD: np.add,
    _SUB: np.subtract,
    _P("mul"): np.multiply,
    _P("neg"): np.negative,
    _P("max"): np.maximum,
    _P("min"): np.minimum,
    _P("lt"): np.less,
    _P("le"): np.less_equal,
    _P("gt"): np.greater,
    _P("ge"): np.greater_equal,
    _P("eq"): np.equal,
    _P("ne"): np.not_equal,
    _P("and"): np.bitwise_and,
    _P("or"): np.bitwise_or,
    _P("not"): np.invert,
    _P("clamp"): lambda low, x, high: np.minimum(np.maximum(x, low), high),
    _SELECT: lambda which, *cases: np.where(which, cases[-1], cases[0]),
}

_Shape = Callable[[Mapping[str, Any], np.ndarray, tuple[int, ...]], np.ndarray]


def _broadcast(params: Mapping[str, Any], x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    sizes = dict(zip(params["broadcast_dimensions"], x.shape[1:], strict=True))
    return np.broadcast_to(x.reshape(len(x), *(sizes.get(d, 1) for d in range(len(shape)))), (len(x), *shape))


def _slice(params: Mapping[str, Any], x: np.ndarray, _: tuple[int, ...]) -> np.ndarray:
    strides = params["strides"] or (1,) * (x.ndim - 1)
    return x[:, *map(slice, params["start_indices"], params["limit_indices"], strides)]


_SHAPES: dict[Any, _Shape] = {
    _P("broadcast_in_dim"): _broadcast,
    _P("slice"): _slice,
    _P("squeeze"): lambda params, x, shape: x.reshape(len(x), *shape),
    _P("reshape"): lambda params, x, shape: x.reshape(len(x), *shape),
    _P("rev"): lambda params, x, shape: np.flip(x, tuple(d + 1 for d in params["dimensions"])),
}
_IOTA, _CAST = _P("iota"), _P("convert_element_type")


def of_atom(atom: Atom, known: Known) -> np.ndarray | None:
    """What is known of it, by iteration."""
    if isinstance(atom, Literal):
        return np.asarray(atom.value)[None] if _countable(atom) else None
    return known.get(atom)


def add_results(equation: Equation, known: dict[Atom, np.ndarray]) -> None:
    """Add what is known of an equation's results. Loops are not looked into."""
    if equation.primitive is _BARRIER:
        pairs = zip(equation.inputs, equation.outputs, strict=True)
        known.update({result: known[operand] for operand, result in pairs if operand in known})
    elif len(equation.outputs) == 1 and _countable(equation.outputs[0]):
        operands = [of_atom(a, known) for a in equation.inputs]
        if all(x is not None for x in operands):
            found = _result(equation, [x for x in operands if x is not None])
            if found is not None:
                known[equation.outputs[0]] = found.astype(equation.outputs[0].array.dtype)


def _result(equation: Equation, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    primitive, params, array = equation.primitive, equation.params, equation.outputs[0].array
    if primitive is _IOTA:
        along = [1] * array.ndim
        along[params["dimension"]] = -1
        return np.broadcast_to(np.arange(array.shape[params["dimension"]]).reshape(along), array.shape)[None]
    if primitive is _CAST:
        return operands[0]
    if primitive in _ELEMENTWISE and (primitive is not _SELECT or len(operands) <= 3):
        return _ELEMENTWISE[primitive](*(_ranked(x, array.ndim) for x in operands))
    return _SHAPES[primitive](params, operands[0], array.shape) if primitive in _SHAPES else None


def _ranked(x: np.ndarray, ndim: int) -> np.ndarray:
    """A scalar that meets an array has as many dimensions."""
    return x.reshape(len(x), *(1,) * ndim) if x.ndim == 1 else x


def in_body(equation: Equation, known: Known) -> dict[Atom, np.ndarray]:
    """What is known of the inputs of a scan's body: what enters it known, and its counters."""
    (body,) = equation.bodies
    consts, carried = compat.scan_counts(equation.params)
    inside: dict[Atom, np.ndarray] = {}
    for k, (outer, inner) in enumerate(zip(equation.inputs, body.inputs, strict=True)):
        value = _the_same(of_atom(outer, known))
        if value is not None and not consts <= k < consts + carried:
            inside[inner] = value if k < consts else value[0]
    fixed = dict(inside)
    for e in body.equations:
        add_results(e, fixed)
    made: dict[Atom, Equation] = {v: e for e in body.equations for v in e.outputs}
    for outer, inner, out in zip(equation.inputs[consts:], body.inputs[consts:], body.outputs[:carried], strict=False):
        start, step = _the_same(of_atom(outer, known)), _step(inner, made.get(out), fixed)
        if start is not None and step is not None:
            times = np.arange(equation.params["length"]).reshape(-1, *(1,) * inner.array.ndim)
            values = (start + step * times).astype(inner.array.dtype)
            inside[inner] = values[::-1] if equation.params["reverse"] else values
    return {v: x for v, x in inside.items() if x.size <= _LARGEST}


def of_stacks(equation: Equation, body: Program, inside: Known) -> dict[Atom, np.ndarray]:
    """What is known of the stacks that a scan makes."""
    _, carried = compat.scan_counts(equation.params)
    found: dict[Atom, np.ndarray] = {}
    for out, slice_of_it in zip(equation.outputs[carried:], body.outputs[carried:], strict=True):
        value = of_atom(slice_of_it, inside)
        if value is not None:
            found[out] = np.broadcast_to(value, (equation.params["length"], *value.shape[1:]))[None]
    return found


def _step(carry: Var, equation: Equation | None, fixed: Known) -> np.ndarray | None:
    """What each iteration adds to a carry, if that is known."""
    if equation is None or equation.primitive not in (_ADD, _SUB):
        return None
    first, second = equation.inputs
    if equation.primitive is _ADD and second is carry:
        first, second = second, first
    step = _the_same(of_atom(second, fixed)) if first is carry else None
    return -step if step is not None and equation.primitive is _SUB else step


def _the_same(value: np.ndarray | None) -> np.ndarray | None:
    """What is the same in all iterations, as one row."""
    return value[:1] if value is not None and (value == value[:1]).all() else None


def _countable(atom: Atom) -> bool:
    array = atom.array
    return getattr(array.dtype, "kind", "") in "iub" and int(np.prod(array.shape)) <= _LARGEST
