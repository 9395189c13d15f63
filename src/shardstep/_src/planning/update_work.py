"""Which equations are the weight update, before any layout is known: what is made of gradients, and not for them.

    gradients = grad(loss)(w)          differentiated: not the update
    s = 0.9 * s + g @ g.T              made of gradients: the update
    w = w - rate * root(s) @ g         the update
    grad(loss)(w)                      differentiated once more: not the update, although it reads the new weights

Gradients that were not computed by JAX are not known for what they are.
"""

from __future__ import annotations

from ..core import compat
from ..core.program import Atom, Equation, Program


def update_of(program: Program) -> frozenset[Equation]:
    """The equations of the update. Of a loop that holds more than the update, those inside; else the loop itself."""
    found: set[Equation] = set()
    made: set[Atom] = set()  # of gradients
    for e in program.equations:
        reads = not made.isdisjoint(e.inputs)
        within = [e, *(f for body in e.bodies for f in body.walk())] if e.bodies else [e]
        if any(f.is_differentiated for f in within):
            found.update(*map(update_of, e.bodies))
        elif reads:
            found.add(e)
        if reads or any(compat.is_backward(f.sources) for f in within):
            made.update(e.outputs)
    return frozenset(found)
