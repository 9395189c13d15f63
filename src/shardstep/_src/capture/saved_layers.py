"""Layers that a loop saves for the backward pass, turned, are read from the stack itself.

    y, T = scan(x @ w.T; saves w.T, w in W)              y = scan(x @ w.T, w in W)
    scan(dy @ t, t in T)                         ->      scan(dy @ w.T, w in W)

JAX saves what the derivative of a product needs, and of `x @ w.T` that is the transpose: a second stack as large as the
first, written by one loop and read by the other. The stack itself is there anyway, and products read it either way
round. (A layer that is saved as it is, JAX takes from the stack by itself.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core import compat
from ..core.program import Atom, Equation, Program, Var
from .unread import without_unread

_SCAN = compat.primitive("scan")
_TURNS = frozenset(compat.primitives("transpose reshape squeeze"))  # they compute nothing


def read_from_their_stacks(program: Program) -> Program:
    """The same program; nothing is saved that a stack holds already."""
    found = _rewritten(program)
    return program if found is program else without_unread(found)


@dataclass(frozen=True, eq=False)
class _Saved:
    """A stack whose layers are those of another one, turned."""

    stack: Var
    layer: Var  # of that stack, in the loop that saves
    turns: tuple[Equation, ...]  # what is done to it, in order


def _rewritten(program: Program) -> Program:
    saved: dict[Atom, _Saved] = {}
    equations: list[Equation] = []
    elsewhere = _read_elsewhere(program)
    for equation in program.equations:
        bodies = tuple(map(_rewritten, equation.bodies))
        if any(map(lambda a, b: a is not b, bodies, equation.bodies)):
            equation = replace(equation, bodies=bodies)
        if equation.primitive is _SCAN:
            equation = _reading(equation, saved)
            saved.update((stack, kept) for stack, kept in _saves(equation) if stack not in elsewhere)
        equations.append(equation)
    if all(map(lambda a, b: a is b, equations, program.equations)):
        return program
    return replace(program, equations=tuple(equations))


def _read_elsewhere(program: Program) -> set[Atom]:
    """What is read by anything but loops that take it layer by layer."""
    found: set[Atom] = set(program.outputs)
    for equation in program.equations:
        found.update(equation.inputs[: _first(equation) if equation.primitive is _SCAN else None])
    return found


def _first(scan: Equation) -> int:
    """Where the stacks begin, among the operands of a loop and of its body."""
    return sum(compat.scan_counts(scan.params))


def _saves(scan: Equation) -> Iterator[tuple[Var, _Saved]]:
    (body,) = scan.bodies
    first, (_, carried) = _first(scan), compat.scan_counts(scan.params)
    stacks = dict(zip(body.inputs[first:], scan.inputs[first:], strict=True))
    makers: dict[Atom, Equation] = {v: e for e in body.equations for v in e.outputs}
    for stack, made in zip(scan.outputs[carried:], body.outputs[carried:], strict=True):
        turns: list[Equation] = []
        while (maker := makers.get(made)) is not None and maker.primitive in _TURNS:
            turns.insert(0, maker)
            made = maker.inputs[0]
        source = stacks.get(made) if isinstance(made, Var) else None
        if isinstance(source, Var) and isinstance(made, Var):
            yield stack, _Saved(source, made, tuple(turns))


def _reading(scan: Equation, saved: Mapping[Atom, _Saved]) -> Equation:
    """The loop with what was saved read from the stack, once."""
    first = _first(scan)
    wanted = [k for k in range(first, len(scan.inputs)) if scan.inputs[k] in saved]
    if not wanted:
        return scan
    (body,) = scan.bodies
    kept = [k for k in range(len(scan.inputs)) if k not in wanted]
    inputs, entering = [scan.inputs[k] for k in kept], [body.inputs[k] for k in kept]
    layers = dict(zip(inputs[first:], entering[first:], strict=True))
    equations: list[Equation] = []
    now: dict[Atom, Atom] = {}
    for k in wanted:
        found = saved[scan.inputs[k]]
        if found.stack not in layers:
            layers[found.stack] = Var(found.layer.array)
            inputs.append(found.stack)
            entering.append(layers[found.stack])
        now[body.inputs[k]] = _turned(found, layers[found.stack], equations)
    equations += [replace(e, inputs=_named(e.inputs, now)) for e in body.equations]
    consts, carried = compat.scan_counts(scan.params)
    return replace(
        scan,
        params=compat.with_scan_counts(scan.params, consts, carried),
        inputs=tuple(inputs),
        bodies=(Program(tuple(entering), _named(body.outputs, now), tuple(equations), body.constants),),
    )


def _turned(saved: _Saved, layer: Var, equations: list[Equation]) -> Atom:
    """What was saved, made again of its layer; the equations are added."""
    now: dict[Atom, Var] = {saved.layer: layer}
    for turn in saved.turns:
        (made,) = turn.outputs
        now[made] = Var(made.array)
        equations.append(replace(turn, inputs=(now[turn.inputs[0]],), outputs=(now[made],)))
        layer = now[made]
    return layer


def _named(atoms: Sequence[Atom], now: Mapping[Atom, Atom]) -> tuple[Atom, ...]:
    return tuple(now.get(a, a) for a in atoms)
