"""Which state a loop takes slice by slice: stacked layers, one for each iteration.

A leaf of shape [L, m, n] that a scan runs over must not be split along L: an iteration would have to fetch its layer
from the replica that has it, so the whole stack would be gathered in front of the loop. Split along another dimension,
each layer is gathered when its iteration comes, and its gradient is scattered in the iteration that makes it.

What meets the leaf element by element (its gradient, its moments) is sliced along the same dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from ..core import compat
from ..core.program import Atom, Equation, Program
from .tied_leaves import family_of

_SCAN = compat.primitive("scan")


def sliced_dims(program: Program, state: Mapping[int, int]) -> dict[int, AbstractSet[int]]:
    """For each input that is state, the dimensions along which loops read or write it slice by slice."""
    if not any(equation.primitive is _SCAN for equation in program.walk()):
        return {}
    family = family_of(program, state)
    found: dict[Atom, set[int]] = {}
    for _ in range(2):  # a value may be sliced by a loop that stands before the one which ties it to its state
        _collect(program, family, found)
    return {i: found[root] for i in state if (root := family(program.inputs[i])) in found}


def _collect(program: Program, family: Callable[[Atom], Atom], found: dict[Atom, set[int]]) -> None:
    for equation in program.equations:
        for body in equation.bodies:
            _collect(body, family, found)
        if equation.primitive is _SCAN:
            for stack, slice_of_it in _stacks(equation):
                inside = found.get(family(slice_of_it), ())
                found.setdefault(family(stack), set()).update({0}, (d + 1 for d in inside))


def _stacks(equation: Equation) -> Iterator[tuple[Atom, Atom]]:
    """What a scan takes and makes slice by slice, each with its slice in the body."""
    (body,) = equation.bodies
    consts, carried = compat.scan_counts(equation.params)
    yield from zip(equation.inputs[consts + carried :], body.inputs[consts + carried :], strict=True)
    yield from zip(equation.outputs[carried:], body.outputs[carried:], strict=True)
