"""Which state meets which, element by element: a weight, its gradient and its moments are one family.

Asked of the rules: two values are tied if every split of the one, along any dimension, is the same split of the other.
Rows of one stack do not meet. But only if they lie alike they travel to their owners together, and come back together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..core import compat
from ..core.layout import Split
from ..core.pieces import STACKED
from ..core.program import Atom, Equation, Kinds, Program, Var
from ..rules import Site
from .propagation.rule_queries import trial_for

_SCAN, _WHILE, _SLICE = (compat.primitive(name) for name in ("scan", "while", "slice"))


def families(program: Program, state: Mapping[int, int], stacks: bool = False) -> list[list[int]]:
    """The inputs that are state (`state`: where each comes back among the outputs), together with those they meet.

    With `stacks`, also with those that become rows of the same stack.
    """
    root = family_of(program, state, stacks)
    found: dict[Atom, list[int]] = {}
    for i in sorted(state):
        found.setdefault(root(program.inputs[i]), []).append(i)
    return list(found.values())


def family_of(program: Program, state: Mapping[int, int], stacks: bool = False) -> Callable[[Atom], Atom]:
    """For each value the representative of its family, bodies included."""
    parents: dict[Atom, Atom] = {}

    def root(atom: Atom) -> Atom:
        while (above := parents.get(atom, atom)) is not atom:
            parents[atom] = parents.get(above, above)  # the next walk is half as long
            atom = above
        return atom

    for a, b in itertools.chain(_ties(program, Kinds(), {}), _rows_of_one_stack(program) if stacks else ()):
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


def _rows_of_one_stack(program: Program) -> Iterator[tuple[Atom, Atom]]:
    """Pairs of values of one shape that a stack is made of, or that are taken out of what becomes of it."""
    makers = {v: e for e in program.equations for v in e.outputs}
    readers = {a: e for e in program.equations for a in e.inputs}
    for equation in program.equations:
        for body in equation.bodies:
            yield from _rows_of_one_stack(body)
        if equation.primitive is STACKED:
            put_in = (a for stack in equation.inputs if stack in makers for a in makers[stack].inputs)
            whole = [makers[a].inputs[0] if a in makers and makers[a].primitive is _SLICE else a for a in put_in]
            whole += [v for stack in equation.outputs if stack in readers for v in readers[stack].outputs]
            for alike in _by_shape(whole).values():
                yield from itertools.pairwise(alike)


def _by_shape(values: Iterable[Atom]) -> dict[tuple[int, ...], list[Atom]]:
    found: dict[tuple[int, ...], list[Atom]] = {}
    for a in values:
        if isinstance(a, Var):
            found.setdefault(a.array.shape, []).append(a)
    return found
