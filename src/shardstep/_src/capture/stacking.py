"""Equal work on leaves of equal shape becomes one equation on their stack.

    u1 = piece(x1, s)                          X = stack(x1, x2, x3, x3)
    u2 = piece(x2, s)            becomes       U = stacked(X, s)                   piece under jax.vmap
    u3 = piece(x3, s)                          u1, u2, u3, _ = unstack(U)

The stack has as many slots as the replicas divide: copies of a real row fill it up, and nobody reads what becomes of
them (`slots.py` says who gets which row). Leaves that are stacks already, as `vmap`ped optimizers want them, are put
end to end instead:

    U1 = vmap(piece)(X1)         becomes       X = concatenate(X1, X2)
    U2 = vmap(piece)(X2)                       U1, U2 = split(stacked(X))

So each replica can own whole rows, whatever the piece does with them; the planner decides whether it should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..core import compat
from ..core.pieces import STACKED, Piece, Rows, run_stacked
from ..core.program import Atom, Equation, Program, Var, prune
from .alike import form
from .slots import balanced
from .stack_equations import cut, join, stacked, unstacked
from .update_pieces import Barred, Found, find

_WHILE = compat.primitive("while")


@dataclass(frozen=True)
class Stacking:
    """What stacking asks of those who know layouts and costs."""

    barred: Barred
    rows: int  # stacks are filled up to a multiple of this
    worth: Callable[[Program], float] = lambda program: 0.0  # what it costs to repeat a piece, see `Piece`
    rows_of: Callable[[Program], Rows | None] = lambda program: None  # what a piece does to each row of stacked leaves


def stack(program: Program, how: Stacking) -> Program:
    """The program with pieces that are alike stacked, in bodies too; the same program if there are none."""
    groups = list(_groups(program, how))
    equations = _rewritten(program, _placed(groups, how))
    while equations is None:  # two groups that wait for one another
        groups.pop()
        equations = _rewritten(program, _placed(groups, how))
    equations = [_inside(e, how) for e in equations]
    if not groups and all(e is f for e, f in zip(equations, program.equations, strict=True)):
        return program
    found = prune(replace(program, equations=tuple(equations)))
    return replace(found, constants=program.constants)


def _inside(equation: Equation, how: Stacking) -> Equation:
    if not equation.bodies:
        return equation
    first = 1 if equation.primitive is _WHILE else 0  # a test decides nothing but when to stop
    bodies = [*equation.bodies[:first], *(stack(body, how) for body in equation.bodies[first:])]
    changed = any(a is not b for a, b in zip(bodies, equation.bodies, strict=True))
    return replace(equation, bodies=tuple(bodies)) if changed else equation


# -- groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group:
    """Pieces that are alike and do not wait for one another, and what is done to each row of their stack."""

    members: tuple[Found, ...]
    piece: Piece


def _groups(program: Program, how: Stacking) -> Iterator[_Group]:
    alike: dict[Any, list[Found]] = {}
    for piece in find(program, how.barred):
        if piece.outputs:
            alike.setdefault(form(piece.equations, piece.inputs, piece.outputs), []).append(piece)
    for pieces in alike.values():
        for level in _levels(pieces):
            rows = how.rows_of(_program(level[0]))
            found = [_one_row_each(level, how)] if rows is None else _joined(level, rows, how)
            yield from (group for group in found if group is not None and _batches(group.piece))


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


def _one_row_each(pieces: Sequence[Found], how: Stacking) -> _Group | None:
    """One row for each piece, if there are several."""
    differs = _differs(pieces)
    if len(pieces) < 2 or not any(differs):
        return None
    program = _program(pieces[0])
    return _Group(tuple(pieces), Piece(program, differs, len(pieces), how.worth(program)))


def _joined(pieces: Sequence[Found], rows: Rows, how: Stacking) -> Iterator[_Group]:
    """The rows of all pieces end to end; of each by itself, if the replicas divide them or if they differ otherwise."""
    beside = any(differs and not own for differs, own in zip(_differs(pieces), rows.own, strict=True))
    apart = beside or rows.height % how.rows == 0
    for together in [[p] for p in pieces] if apart else [pieces]:
        count = rows.height * len(together)
        yield _Group(tuple(together), Piece(rows.program, rows.own, count, how.worth(rows.program), joined=True))


def _placed(groups: Sequence[_Group], how: Stacking) -> list[_Group]:
    """The groups with a slot for each row."""
    stacks, busiest = balanced([(g.piece.count, g.piece.worth) for g in groups], how.rows)
    placed = [
        replace(g.piece, slots=slots, busiest=busiest * len(slots) // how.rows)
        for g, slots in zip(groups, stacks, strict=True)
    ]
    return [replace(g, piece=piece) for g, piece in zip(groups, placed, strict=True)]


def _batches(piece: Piece) -> bool:
    """Can JAX batch the piece?"""
    if any(jnp.issubdtype(v.array.dtype, jax.dtypes.extended) for v in piece.program.inputs):
        return False
    arrays = [
        piece.shape_of(v.array, 2) if s else v.array for v, s in zip(piece.program.inputs, piece.stacked, strict=True)
    ]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    try:
        made = jax.eval_shape(lambda *xs: run_stacked(piece, xs, lambda x: x), *avals)
    except NotImplementedError:  # a primitive without a batching rule
        return False
    return [x.shape for x in made] == [piece.shape_of(v.array, 2).shape for v in piece.program.outputs]


def _differs(pieces: Sequence[Found]) -> tuple[bool, ...]:
    """Which inputs are not one value for all."""
    return tuple(len(set(values)) > 1 for values in zip(*(p.inputs for p in pieces), strict=True))


def _program(piece: Found) -> Program:
    return Program(piece.inputs, piece.outputs, piece.equations)


# -- the rewritten program ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Node:
    """Equations that stay together, and what they read."""

    equations: tuple[Equation, ...]
    reads: tuple[Atom, ...]


def _rewritten(program: Program, groups: Sequence[_Group]) -> list[Equation] | None:
    """The equations with each group as one; None if groups wait for one another."""
    if not groups:
        return list(program.equations)
    place = {e: i for i, e in enumerate(program.equations)}
    gone: set[Equation] = set()
    last: dict[Equation, _Node] = {}
    for group in groups:
        gone |= {e for piece in group.members for e in piece.own}
        last[max((piece.equations[-1] for piece in group.members), key=place.__getitem__)] = _node(group)
    order = [last[e] if e in last else _Node((e,), e.inputs) for e in program.equations if e not in gone or e in last]
    return _sorted(order)


def _node(group: _Group) -> _Node:
    """The stacks of a group, its piece, and the rows of what comes out."""
    members, piece = group.members, group.piece
    sources = members[0].seed.sources
    together, apart = (join, cut) if piece.joined else (stacked, unstacked)
    before: list[Equation] = []
    after: list[Equation] = []
    operands: list[Atom] = []
    for values, differs in zip(zip(*(p.inputs for p in members), strict=True), piece.stacked, strict=True):
        made = together(values, piece.slots, sources) if differs else []
        operands.append(made[-1].outputs[0] if made else values[0])
        before += made
    results: list[Var] = []
    for values in zip(*(p.outputs for p in members), strict=True):
        made = apart(values, piece.slots, sources)
        results.append(made[0].inputs[0] if made else values[0])  # type: ignore[arg-type]
        after += made
    run = Equation(STACKED, {"piece": piece}, tuple(operands), tuple(results), sources)
    return _Node((*before, run, *after), tuple(v for p in members for v in p.inputs))


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
