"""Does a piece of the update treat each row of its leaves alone? Asked of the rules: one replica for each row.

An optimizer for stacked leaves, `[L, m, n]`, is often written with `vmap`: batched products, batched factorizations. If
its piece needs no communication when every replica has one of the L rows, then what one replica runs is what is done to
a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core import compat
from ..core.layout import REPLICATED, Array, Axis, Layout, Split, block_shape
from ..core.pieces import Rows
from ..core.program import Atom, Equation, Literal, Program, Var
from ..core.schedule import Bundle, Schedule
from .propagation.boundary import Boundary
from .propagation.forward import schedule

_BROADCAST, _SLICE = compat.primitives("broadcast_in_dim slice")
_IDENTITY = compat.primitives("stop_gradient optimization_barrier")


def rows_of(program: Program) -> Rows | None:
    """What the piece does to each row, if all its matrices are stacks of one height and rows do not meet."""
    large = [v.array for v in program.inputs if v.array.ndim > 1]
    heights = {a.shape[0] for a in (*large, *(v.array for v in program.outputs)) if a.ndim}
    if len(heights) != 1 or not any(a.ndim > 2 for a in large):
        return None
    (height,) = heights
    if height < 2:
        return None
    for least in (1, 2):  # a vector may hold one number for each row, or coefficients that all rows share
        own = tuple(v.array.ndim >= least and v.array.shape[0] == height for v in program.inputs)
        found = _one_row(program, own, height)
        if found is not None:
            return Rows(found, own, height)
    return None


def _one_row(program: Program, own: Sequence[bool], height: int) -> Program | None:
    axes = (Axis(("rows",), height),)
    inputs: list[Layout] = [(Split(0),) if mine else (REPLICATED,) for mine in own]
    decided = schedule(program, axes, Boundary.of_body(inputs, [None] * len(program.outputs)))
    if any(layout != (Split(0),) for layout in decided.outputs) or not _is_local(decided):
        return None
    return _of_one_replica(decided)


def _is_local(decided: Schedule) -> bool:
    """Does nothing change its layout but what all rows have alike, and does no equation ask which row it is?"""
    alike = _alike(decided.program)
    moved = (t for bundles in decided.transfers for bundle in bundles for t in bundle)
    asks = any(step.ruling.emit and step.equation.primitive not in _IDENTITY for step in decided.steps)
    if asks or not all(t.var in alike and t.target == (Split(0),) for t in moved):
        return False
    return all(_is_local(body) for step in decided.steps for body in step.bodies)


def _alike(program: Program) -> set[Atom]:
    """Values that every row has the same of: a counter that starts at 0 in each."""
    return {
        e.outputs[0]
        for e in program.equations
        if e.primitive is _BROADCAST and e.outputs[0].array.ndim and 0 not in e.params["broadcast_dimensions"]
    }


def _of_one_replica(decided: Schedule) -> Program:
    """The program that one replica runs."""
    local: dict[tuple[Atom, Layout], Var] = {}
    equations: list[Equation] = []

    def enter(var: Var, layout: Layout) -> Var:
        made = Var(Array(block_shape(var.array.shape, layout, decided.axes), var.array.dtype))
        local[var, layout] = made
        return made

    def read(atom: Atom, layout: Layout) -> Atom:
        return atom if isinstance(atom, Literal) else local[atom, layout]

    def cut(bundles: Sequence[Bundle], reader: Equation) -> None:
        """The first row of what is alike for all rows."""
        for t in (t for bundle in bundles for t in bundle):
            whole, row = local[t.var, t.source], enter(t.var, t.target)
            stop = row.array.shape
            bounds = {"start_indices": (0,) * len(stop), "limit_indices": stop, "strides": None}
            equations.append(Equation(_SLICE, bounds, (whole,), (row,), reader.sources))

    program = decided.program
    inputs = tuple(enter(v, layout) for v, layout in zip(program.inputs, decided.inputs, strict=True))
    constants = tuple((enter(v, (REPLICATED,)), value) for v, value in program.constants)
    for step, bundles in zip(decided.steps, decided.transfers, strict=False):
        e = step.equation
        cut(bundles, e)
        operands = tuple(map(read, e.inputs, step.operands))
        results = tuple(enter(v, layout) for v, layout in zip(e.outputs, step.results, strict=True))
        bodies = tuple(map(_of_one_replica, step.bodies))
        equations.append(Equation(e.primitive, step.ruling.params, operands, results, e.sources, bodies, e.effects))
    if decided.transfers[-1]:
        cut(decided.transfers[-1], program.equations[-1])
    return Program(inputs, tuple(map(read, program.outputs, decided.outputs)), tuple(equations), constants)
