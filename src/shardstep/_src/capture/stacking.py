"""Equal work on leaves of equal shape becomes one equation on their stack.

    u1 = piece(x1, s)                          X = stack(x1, x2, x3, x3)
    u2 = piece(x2, s)            becomes       U = stacked(X, s)                   piece under jax.vmap
    u3 = piece(x3, s)                          u1, u2, u3, _ = unstack(U)

The stack has as many rows as the replicas divide: copies of a real row fill it up, and nobody reads what becomes of
them. So each replica can own whole rows, whatever the piece does with them; the planner decides whether it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..core import compat
from ..core.pieces import STACKED, Piece, along, run_stacked
from ..core.program import Atom, Equation, Program, Var, prune
from .alike import form
from .update_pieces import Barred, Found, find

_STACK, _UNSTACK, _WHILE = (compat.primitive(name) for name in ("stack", "unstack", "while"))

Worth = Callable[[Program], float]


def stack(program: Program, barred: Barred, rows: int, worth: Worth) -> Program:
    """The program with pieces that are alike stacked, in bodies too; the same program if there are none.

    `rows`: stacks are filled up to a multiple of this. `worth`: what it costs to repeat a piece, see `Piece`.
    """
    groups = list(_groups(program, barred))
    equations = _rewritten(program, groups, rows, worth)
    while equations is None:  # two groups that wait for one another
        groups.pop()
        equations = _rewritten(program, groups, rows, worth)
    equations = [_inside(e, barred, rows, worth) for e in equations]
    if all(e is f for e, f in zip(equations, program.equations, strict=False)) and not groups:
        return program
    stacked = prune(replace(program, equations=tuple(equations)))
    return replace(stacked, constants=program.constants)


def _inside(equation: Equation, barred: Barred, rows: int, worth: Worth) -> Equation:
    if not equation.bodies:
        return equation
    first = 1 if equation.primitive is _WHILE else 0  # a test decides nothing but when to stop
    bodies = [*equation.bodies[:first], *(stack(body, barred, rows, worth) for body in equation.bodies[first:])]
    changed = any(a is not b for a, b in zip(bodies, equation.bodies, strict=True))
    return replace(equation, bodies=tuple(bodies)) if changed else equation


# -- groups -------------------------------------------------------------------------------------------------------


def _groups(program: Program, barred: Barred) -> Iterator[list[Found]]:
    """Pieces that are alike and do not wait for one another."""
    alike: dict[Any, list[Found]] = {}
    for piece in find(program, barred):
        if piece.outputs:
            alike.setdefault(form(piece.equations, piece.inputs, piece.outputs), []).append(piece)
    for pieces in alike.values():
        for group in _levels(pieces):
            if len(group) > 1 and _batches(group):
                yield group


def _levels(pieces: Sequence[Found]) -> list[list[Found]]:
    """Steps that are unrolled do the same to a leaf again and again: one level for each time."""
    levels: list[list[Found]] = []
    for piece in pieces:  # in program order
        waits = [any(piece.upstream >> p.number & 1 for p in level) for level in levels]
        depth = 1 + max((d for d, found in enumerate(waits) if found), default=-1)
        if depth == len(levels):
            levels.append([])
        levels[depth].append(piece)
    return levels


def _batches(group: Sequence[Found]) -> bool:
    """Can JAX batch the piece? And is there anything that differs between the rows?"""
    stacked = _differs(group)
    if not any(stacked) or any(jnp.issubdtype(v.array.dtype, jax.dtypes.extended) for v in group[0].inputs):
        return False
    piece = Piece(_program(group[0]), stacked, len(group))
    rows = [along(v.array, 2) if s else v.array for v, s in zip(group[0].inputs, stacked, strict=True)]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in rows]
    try:
        made = jax.eval_shape(lambda *xs: run_stacked(piece, xs, lambda x: x), *avals)
    except NotImplementedError:  # a primitive without a batching rule
        return False
    return [x.shape for x in made] == [(2, *v.array.shape) for v in group[0].outputs]


def _differs(group: Sequence[Found]) -> tuple[bool, ...]:
    """Which inputs are not one value for all."""
    return tuple(len(set(values)) > 1 for values in zip(*(p.inputs for p in group), strict=True))


def _program(piece: Found) -> Program:
    return Program(piece.inputs, piece.outputs, piece.equations)


# -- the rewritten program ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Node:
    """Equations that stay together, and what they read."""

    equations: tuple[Equation, ...]
    reads: tuple[Atom, ...]


def _rewritten(program: Program, groups: Sequence[list[Found]], rows: int, worth: Worth) -> list[Equation] | None:
    """The equations with each group as one; None if groups wait for one another."""
    if not groups:
        return list(program.equations)
    nodes = {i: _node(group, rows, worth) for i, group in enumerate(groups)}
    gone = {e: nodes[i] for i, group in enumerate(groups) for piece in group for e in piece.own}
    place = {e: i for i, e in enumerate(program.equations)}
    last = {max((piece.equations[-1] for piece in group), key=place.__getitem__): i for i, group in enumerate(groups)}
    order = [
        nodes[last[e]] if e in last else _Node((e,), e.inputs) for e in program.equations if e not in gone or e in last
    ]
    return _sorted(order)


def _node(group: Sequence[Found], rows: int, worth: Worth) -> _Node:
    """The stacks of a group, its piece, and the rows of what comes out."""
    height = -(-len(group) // rows) * rows
    first, sources = group[0], group[0].seed.sources
    stacked = _differs(group)
    operands: list[Atom] = []
    equations: list[Equation] = []
    for values, differs in zip(zip(*(p.inputs for p in group), strict=True), stacked, strict=True):
        if differs:
            filled = (*values, *values[-1:] * (height - len(values)))
            made = Var(along(values[0].array, height))
            equations.append(Equation(_STACK, {"axis": 0}, filled, (made,), sources))
        operands.append(made if differs else values[0])
    program = _program(first)
    piece = Piece(program, stacked, len(group), worth(program))
    results = tuple(Var(along(v.array, height)) for v in first.outputs)
    equations.append(Equation(STACKED, {"piece": piece}, tuple(operands), results, sources))
    for result, values in zip(results, zip(*(p.outputs for p in group), strict=True), strict=True):
        unread = tuple(Var(values[0].array) for _ in range(height - len(values)))
        equations.append(Equation(_UNSTACK, {"axis": 0}, (result,), (*values, *unread), sources))
    return _Node(tuple(equations), tuple(v for p in group for v in p.inputs))


def _sorted(nodes: Sequence[_Node]) -> list[Equation] | None:
    """In their order where that is possible: whatever a node reads is moved before it."""
    maker: dict[Atom, _Node] = {v: node for node in nodes for e in node.equations for v in e.outputs}
    done: set[_Node] = set()
    entered: set[_Node] = set()
    found: list[Equation] = []
    for start in nodes:
        todo = [start]
        while todo:
            node = todo[-1]
            missing = [m for a in node.reads if (m := maker.get(a)) is not None and m not in done]
            if node in done or not missing:
                if node not in done:
                    found += node.equations
                    done.add(node)
                todo.pop()
            elif node in entered:
                return None
            else:
                entered.add(node)
                todo += reversed(missing)
    return found
