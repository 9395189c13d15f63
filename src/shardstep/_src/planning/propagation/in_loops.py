"""Memory for messages: what loops may do in every iteration in order to hold less, or to do less.

    for microbatch:                                        held             sent
        for layer: forward, then backward
    as little sent as can be:                              W + G            gather W, scatter G
    sums scattered in each iteration:                      W + G/N          gather W, scatter G per microbatch
    and layers gathered one by one, too:                   a layer + G/N    gather W twice, scatter G per microbatch
    few examples that go to split weights:                 (W + G)/N        examples, there and back, per product

W are the weights of all layers, G the gradients that the microbatches add up. Without microbatches, layers are gathered
one by one to begin with, and once in front of the loop if there is memory for that. Which of these a step takes is
decided by predicted time and memory (`decision.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core import compat
from ...core.program import Atom, Equation, Program

_SCAN, _BARRIER, _CAST = map(compat.primitive, ("scan", "optimization_barrier", "convert_element_type"))


@dataclass(frozen=True)
class InLoops:
    """One way to do it."""

    gathers_once: bool = False  # are stacks that outermost loops slice gathered in front of them?
    streams: bool = False  # are stacks that loops inside of loops slice gathered there, slice by slice?
    scatters: bool = False  # is what a loop adds up scattered in every iteration?
    visits: bool = False  # may examples go to split weights in every iteration? What no product visits is gathered once


LITTLE_SENT = InLoops()
ONCE = InLoops(gathers_once=True)
SUMS_SPLIT = InLoops(gathers_once=True, scatters=True)
LITTLE_HELD = InLoops(streams=True, scatters=True)
VISITED = InLoops(scatters=True, visits=True)


def only_sliced(program: Program, var: Atom) -> bool:
    """Is this value read by loops alone that take it slice by slice, and by casts for them?"""
    readers: dict[Atom, list[Equation]] = {}
    for equation in program.equations:
        for atom in dict.fromkeys(equation.inputs):
            readers.setdefault(atom, []).append(equation)
    return _only_sliced(program, readers, var)


def _only_sliced(program: Program, readers: Mapping[Atom, list[Equation]], var: Atom) -> bool:
    found = readers.get(var, [])
    return bool(found) and var not in program.outputs and all(_slices(program, readers, e, var) for e in found)


def _slices(program: Program, readers: Mapping[Atom, list[Equation]], equation: Equation, var: Atom) -> bool:
    places = [i for i, a in enumerate(equation.inputs) if a is var]
    if equation.primitive in (_BARRIER, _CAST):
        return all(_only_sliced(program, readers, equation.outputs[i]) for i in places)
    if equation.primitive is not _SCAN:
        return False
    consts, carries = compat.scan_counts(equation.params)
    (body,) = equation.bodies
    return all(i >= consts + carries or (i < consts and only_sliced(body, body.inputs[i])) for i in places)
