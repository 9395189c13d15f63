"""Drop what nobody reads, inside loops too: stacks that a scan makes, and operands that its body does not look at."""

from __future__ import annotations

from dataclasses import replace

from ..core import compat
from ..core.program import Equation, Program, Var, prune

_SCAN = compat.primitive("scan")


def without_unread(program: Program) -> Program:
    read = {a for a in program.outputs if isinstance(a, Var)}
    kept: list[Equation] = []
    for equation in reversed(program.equations):
        if not equation.effects and read.isdisjoint(equation.outputs):
            continue
        if equation.primitive is _SCAN:
            equation = _scan(equation, read)
        elif equation.bodies:
            equation = replace(equation, bodies=tuple(map(without_unread, equation.bodies)))
        kept.append(equation)
        read.update(a for a in equation.inputs if isinstance(a, Var))
    return prune(replace(program, equations=tuple(reversed(kept))))


def _scan(equation: Equation, read: set[Var]) -> Equation:
    """A scan without the stacks that are not in `read`, and without what it then no longer needs."""
    consts, carried = compat.scan_counts(equation.params)
    makes = [j for j, out in enumerate(equation.outputs) if j < carried or out in read]
    (body,) = equation.bodies
    body = without_unread(replace(body, outputs=tuple(body.outputs[j] for j in makes)))
    held = range(consts, consts + carried)
    takes = [i for i, var in enumerate(body.inputs) if i in held or body.uses[var]]
    return replace(
        equation,
        params=compat.with_scan_counts(equation.params, sum(i < consts for i in takes), carried),
        inputs=tuple(equation.inputs[i] for i in takes),
        outputs=tuple(equation.outputs[j] for j in makes),
        bodies=(replace(body, inputs=tuple(body.inputs[i] for i in takes)),),
    )
