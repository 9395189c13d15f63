"""Which state meets which, element by element: a weight, its gradient and its moments are one family.

Asked of the rules: two values are tied if every split of the one, along any dimension, is the same split of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..core import compat
from ..core.layout import Split
from ..core.program import Atom, Equation, Kinds, Program, Var
from ..rules import Site
from .propagation.rule_queries import trial_for

_SCAN, _WHILE = (compat.primitive(name) for name in ("scan", "while"))


def families(program: Program, state: Mapping[int, int]) -> list[list[int]]:
    """The inputs that are state (`state`: where each comes back among the outputs), together with those they meet."""
    root = family_of(program, state)
    found: dict[Atom, list[int]] = {}
    for i in sorted(state):
        found.setdefault(root(program.inputs[i]), []).append(i)
    return list(found.values())


def family_of(program: Program, state: Mapping[int, int]) -> Callable[[Atom], Atom]:
    """For each value the representative of its family, bodies included."""
    parents: dict[Atom, Atom] = {}

    def root(atom: Atom) -> Atom:
        while (above := parents.get(atom, atom)) is not atom:
            parents[atom] = parents.get(above, above)  # the next walk is half as long
            atom = above
        return atom

    for a, b in _ties(program, Kinds(), {}):
        parents[root(a)] = root(b)
    for i, o in state.items():
        parents[root(program.outputs[o])] = root(program.inputs[i])
    return root


def _ties(program: Program, kinds: Kinds, memo: dict[int, list[tuple[int, int]]]) -> Iterator[tuple[Var, Var]]:
    """Pairs of values of one shape that always have the same layout."""
    for equation in program.equations:
        if equation.bodies:
            for a, b in _doors(equation):
                if isinstance(a, Var) and isinstance(b, Var) and a.array.shape == b.array.shape:
                    yield a, b
            for body in equation.bodies:
                yield from _ties(body, kinds, memo)
            continue
        kind = kinds[equation]
        if kind not in memo:
            memo[kind] = list(_tied(equation))
        for i, r in memo[kind]:
            if isinstance(operand := equation.inputs[i], Var):
                yield operand, equation.outputs[r]


def _tied(equation: Equation) -> Iterator[tuple[int, int]]:
    """The operands of an equation that are tied to a result."""
    arrays, results = tuple(a.array for a in equation.inputs), tuple(v.array for v in equation.outputs)
    for r, result in enumerate(results):
        alike = [i for i, array in enumerate(arrays) if array.ndim and array.shape == result.shape]
        if not alike:
            continue
        site = Site(equation.primitive, equation.params, arrays, results, 1)  # one replica divides everything
        trials = [trial_for(site, r, Split(dim)) for dim in range(result.ndim)]
        for i in alike:
            if all(t is not None and t.operands[i] == Split(dim) for dim, t in enumerate(trials)):
                yield i, r


def _doors(equation: Equation) -> Iterator[tuple[Atom, Atom]]:
    """What enters and leaves the bodies of a loop or a branch, and what a loop carries."""
    inputs, outputs, body = equation.inputs, equation.outputs, equation.bodies[-1]
    if equation.primitive is _SCAN:
        fixed, carried = compat.scan_counts(equation.params)
        entering = inputs[: fixed + carried]
    elif equation.primitive is _WHILE:
        fixed, carried = equation.params["body_nconsts"], len(outputs)
        entering = inputs[equation.params["cond_nconsts"] :]
    else:
        for branch in equation.bodies:
            yield from zip(inputs[1:], branch.inputs, strict=True)
            yield from zip(branch.outputs, outputs, strict=True)
        return
    yield from zip(entering, body.inputs, strict=False)
    yield from zip(body.outputs[:carried], outputs, strict=False)
    yield from zip(body.inputs[fixed : fixed + carried], body.outputs, strict=False)
