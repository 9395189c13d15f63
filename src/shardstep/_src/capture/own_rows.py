"""`x[arange(B), i]`: every row looks into itself. Said in a way that layouts understand.

    gather(x, [arange(B) | i])  with start_index_map (0, 1)   ->   gather(x, [i])  with dimension 0 a batching dimension

As JAX writes it, row b might look anywhere, so that a batch that is split would have to send all its indices. The same
holds for the scatters that such lookups become in the backward pass, and for `x.at[arange(B), i].set(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core import compat
from ..core.layout import Array
from ..core.program import Atom, Equation, Literal, Program, Var

_IOTA, _CAST, _SELECT, _LESS = (compat.primitive(p) for p in ("iota", "convert_element_type", "select_n", "lt"))
_BROADCAST, _CONCATENATE = compat.primitive("broadcast_in_dim"), compat.primitive("concatenate")
_GATHER = compat.primitive("gather")
_SCATTERS = compat.primitives("scatter scatter_add scatter_mul scatter_min scatter_max")

# what gather and scatter call the same things: collapsed dimensions, the map of index columns, both batching dimensions
_NAMES = {
    True: ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims"),
    False: (
        "inserted_window_dims",
        "scatter_dims_to_operand_dims",
        "operand_batching_dims",
        "scatter_indices_batching_dims",
    ),
}


def look_into_own_rows(program: Program) -> Program:
    """The program with lookups whose first index is the row's own number as lookups inside rows."""
    made: dict[Atom, Equation] = {v: e for e in program.equations for v in e.outputs}
    equations: list[Equation] = []
    for equation in program.equations:
        equations += _inside_rows(equation, made) if _looks_up(equation) else [equation]
    if len(equations) == len(program.equations) and all(map(lambda a, b: a is b, equations, program.equations)):
        return program
    return replace(program, equations=tuple(_alive(equations, program.outputs)))


def _looks_up(equation: Equation) -> bool:
    return equation.primitive is _GATHER or equation.primitive in _SCATTERS


def _inside_rows(equation: Equation, made: Mapping[Atom, Equation]) -> list[Equation]:
    operand, indices, *others = equation.inputs
    numbers = equation.params["dimension_numbers"]
    collapsed, columns, batching, _ = (getattr(numbers, n) for n in _NAMES[equation.primitive is _GATHER])
    join = made.get(indices)
    if batching or join is None or join.primitive is not _CONCATENATE or len(join.inputs) != len(columns):
        return [equation]
    if join.params["dimension"] != indices.array.ndim - 1:
        return [equation]
    for c, (column, dim) in enumerate(zip(join.inputs, columns, strict=True)):
        d = _counts_along(column, made)
        if d is None or dim not in collapsed or operand.array.shape[dim] != indices.array.shape[d]:
            continue
        left = [a for k, a in enumerate(join.inputs) if k != c]
        changed = (
            tuple(x for x in collapsed if x != dim),
            tuple(x for k, x in enumerate(columns) if k != c),
            (dim,),
            (d,),
        )
        names = _NAMES[equation.primitive is _GATHER]
        params = {**equation.params, "dimension_numbers": numbers._replace(**dict(zip(names, changed, strict=True)))}
        if len(left) == 1:
            return [replace(equation, params=params, inputs=(operand, left[0], *others))]
        array = Array((*indices.array.shape[:-1], len(left)), indices.array.dtype)
        rest = replace(join, inputs=tuple(left), outputs=(Var(array),))
        return [rest, replace(equation, params=params, inputs=(operand, rest.outputs[0], *others))]
    return [equation]


def _counts_along(atom: Atom, made: Mapping[Atom, Equation]) -> int | None:
    """The dimension along which this value counts 0, 1, 2, ...: each element is its own index there."""
    equation = made.get(atom)
    if equation is None:
        return None
    if equation.primitive is _IOTA:
        return int(equation.params["dimension"])
    if equation.primitive is _CAST:
        return _counts_along(equation.inputs[0], made)
    if equation.primitive is _SELECT and len(equation.inputs) == 3:
        # negative indices count from the end; none of these is negative
        which, count, _ = equation.inputs
        test = made.get(which)
        below = test is not None and test.primitive is _LESS and test.inputs[0] is count and _is_zero(test.inputs[1])
        return _counts_along(count, made) if below else None
    if equation.primitive is _BROADCAST:
        before = _counts_along(equation.inputs[0], made)
        if before is None:
            return None
        after = equation.params["broadcast_dimensions"][before]
        same = equation.inputs[0].array.shape[before] == atom.array.shape[after]
        return int(after) if same else None
    return None


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not atom.array.shape and bool(atom.value == 0)


def _alive(equations: list[Equation], outputs: tuple[Atom, ...]) -> list[Equation]:
    """Without those whose results nobody reads any more."""
    read: set[Any] = set(outputs)
    kept = []
    for equation in reversed(equations):
        if equation.effects or equation.bodies or not equation.outputs or not read.isdisjoint(equation.outputs):
            kept.append(equation)
            read.update(equation.inputs)
    return kept[::-1]
