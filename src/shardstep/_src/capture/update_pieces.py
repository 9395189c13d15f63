"""Find the expensive pieces of an update: products and factorizations of state, with what lies between them.

A piece grows from its *seeds*: products that do more work than reading their operands, factorizations, and loops or
branches that hold some. Seeds belong together if one reads what another makes, or if both read the same leaf. Work
between them belongs to the piece, and so does work around them that makes nothing larger cross its border: a norm by
which a matrix is divided, a transpose, a scale.

Scalars do not tie pieces together: a step count, a learning rate or a global norm is read by every leaf.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..core import compat
from ..core.program import Atom, Equation, Literal, Program, Var

Barred = Callable[[Equation], bool]  # may this equation not be part of a piece?

_DOT = compat.primitive("dot_general")
_FACTORIZE = frozenset(
    compat.primitives(
        "cholesky eig eigh geqrf hessenberg householder_product lu ormqr qr schur svd symmetric_product"
        " triangular_solve tridiagonal tridiagonal_solve"
    )
)
_SMALL = 16  # an operand that is smaller by this factor travels for nothing


@dataclass(frozen=True, eq=False)
class Found:
    """One piece: its equations, what enters it and what leaves it."""

    number: int
    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    own: frozenset[Equation]  # of the equations, those that nothing else needs
    upstream: int  # the pieces that it waits for, as bits

    @property
    def seed(self) -> Equation:
        return next(e for e in self.equations if is_heavy(e))


def is_heavy(equation: Equation) -> bool:
    """Is this more work than reading its operands?"""
    if equation.bodies:
        return any(is_heavy(e) for body in equation.bodies for e in body.equations)
    if equation.primitive is _DOT:
        (summed, _), _ = equation.params["dimension_numbers"]
        arrays = [*(a.array for a in equation.inputs), equation.outputs[0].array]
        flops = 2 * equation.outputs[0].array.size * math.prod(arrays[0].shape[d] for d in summed)
        return flops > 2 * sum(a.size for a in arrays)
    return equation.primitive in _FACTORIZE


def find(program: Program, barred: Barred) -> list[Found]:
    """The pieces of a program (bodies are programs of their own), in program order."""
    if not any(is_heavy(e) and not barred(e) for e in program.equations):
        return []
    return list(_Search(program, barred).pieces())


class _Search:
    def __init__(self, program: Program, barred: Barred):
        self.program, self.equations = program, program.equations
        self.barred = [barred(e) for e in self.equations]
        self.maker: dict[Atom, int] = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.readers: dict[Atom, list[int]] = {}
        for i, e in enumerate(self.equations):
            for a in dict.fromkeys(e.inputs):
                self.readers.setdefault(a, []).append(i)
        self.leaving = {a for a in program.outputs if isinstance(a, Var)}
        self.constant = self._constants()
        self.seeds = [is_heavy(e) and not b for e, b in zip(self.equations, self.barred, strict=True)]
        self.members: dict[int, set[int]] = {}  # of each piece
        self.piece_of: dict[int, int] = {}

    def pieces(self) -> Iterator[Found]:
        middle = self._between()
        for number, members in enumerate(self._tied(middle)):
            self.members[number] = members
        self.piece_of = {i: number for number, members in self.members.items() for i in members}
        self._close()
        after = self._after()
        for number, members in self.members.items():
            self._grow_up(number, members)
            self._grow_down(number, members, after)
        for number, members in self.members.items():
            yield self._found(number, members, after)

    # -- the graph ------------------------------------------------------------------------------------------------

    def _constants(self) -> set[Atom]:
        """Values that depend on no input: an identity matrix, a table of numbers."""
        found: set[Atom] = {var for var, _ in self.program.constants}
        for e in self.equations:
            if not e.effects and all(isinstance(a, Literal) or a in found for a in e.inputs):
                found.update(e.outputs)
        return found

    def _ties(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom.array.size > 1 and atom not in self.constant

    def _between(self) -> set[int]:
        """The seeds, and what both reads of a seed's results and is read for a seed."""
        below, above = set(), set()
        for i, e in enumerate(self.equations):
            if self.seeds[i] or (
                not self.barred[i] and any(self._ties(a) and self.maker.get(a, -1) in below for a in e.inputs)
            ):
                below.add(i)
        for i in reversed(range(len(self.equations))):
            made = (v for v in self.equations[i].outputs if self._ties(v))
            if self.seeds[i] or (not self.barred[i] and any(j in above for v in made for j in self.readers.get(v, ()))):
                above.add(i)
        return below & above

    def _tied(self, middle: set[int]) -> list[set[int]]:
        """The middle in parts that share no value."""
        parents = {i: i for i in middle}

        def root(i: int) -> int:
            while parents[i] != i:
                parents[i] = parents[parents[i]]
                i = parents[i]
            return i

        first: dict[Atom, int] = {}
        for i in sorted(middle):
            values = (*self.equations[i].inputs, *self.equations[i].outputs)
            largest = max(a.array.size for a in values)
            for a in values:  # coefficients that every leaf reads tie nothing together
                if self._ties(a) and (self.maker.get(a, -1) in middle or a.array.size * _SMALL > largest):
                    parents[root(i)] = root(first.setdefault(a, i))
        parts: dict[int, set[int]] = {}
        for i in sorted(middle):
            parts.setdefault(root(i), set()).add(i)
        return list(parts.values())

    def _after(self) -> list[int]:
        """For each equation the pieces that it waits for, as bits, its own included."""
        after = [0] * len(self.equations)
        for i, e in enumerate(self.equations):
            for a in e.inputs:
                if a in self.maker:
                    after[i] |= after[self.maker[a]]
            if i in self.piece_of:
                after[i] |= 1 << self.piece_of[i]
        return after

    def _before(self) -> list[int]:
        """For each equation the pieces that wait for it."""
        before = [0] * len(self.equations)
        for i in reversed(range(len(self.equations))):
            for v in self.equations[i].outputs:
                for j in self.readers.get(v, ()):
                    before[i] |= before[j]
            if i in self.piece_of:
                before[i] |= 1 << self.piece_of[i]
        return before

    def _close(self) -> None:
        """Work that leaves a piece and comes back belongs to it. Where several share it, none is a piece."""
        broken = 0
        for i, (after, before) in enumerate(zip(self._after(), self._before(), strict=True)):
            around = after & before & ~(1 << self.piece_of[i] if i in self.piece_of else 0)
            if not around:
                continue
            number = around.bit_length() - 1
            if around == 1 << number and i not in self.piece_of and not self.barred[i]:
                self.members[number].add(i)
                self.piece_of[i] = number
            else:
                broken |= around
        for number in [n for n in self.members if broken >> n & 1]:
            for i in self.members.pop(number):
                self.piece_of.pop(i)

    # -- growing --------------------------------------------------------------------------------------------------

    def _inputs(self, members: AbstractSet[int]) -> list[Var]:
        """What enters a piece, in the order in which it is read."""
        made = {v for i in members for v in self.equations[i].outputs}
        read = (a for i in sorted(members) for a in self.equations[i].inputs)
        return list(dict.fromkeys(a for a in read if isinstance(a, Var) and a not in made))

    def _free(self, i: int) -> bool:
        """May a piece grow into this? Not into a backward pass: gradients are not made alike for all leaves."""
        e = self.equations[i]
        return not (self.barred[i] or i in self.piece_of or self.seeds[i]) and not e.is_differentiated

    def _only_read_in(self, i: int, members: AbstractSet[int]) -> bool:
        made = self.equations[i].outputs
        return all(v not in self.leaving and members >= set(self.readers.get(v, ())) for v in made)

    def _take(self, number: int, taken: AbstractSet[int]) -> None:
        self.members[number] |= taken
        self.piece_of.update((i, number) for i in taken if not self._is_constant(i))

    def _is_constant(self, i: int) -> bool:
        return all(v in self.constant for v in self.equations[i].outputs)

    def _grow_up(self, number: int, members: set[int]) -> None:
        """Take in what makes an operand of one other value that is no larger."""
        todo = self._inputs(members)
        while todo:
            var = todo.pop()
            i = self.maker.get(var)
            if i is None or i in members or not self._free(i):
                continue
            if var in self.constant:
                taken = self._constant_work(i)
            elif self._only_read_in(i, members):
                taken = self._with_its_factors(i, var, members)
            else:
                continue
            self._take(number, taken)
            todo += [v for j in taken for v in self.equations[j].inputs if isinstance(v, Var)]

    def _constant_work(self, i: int) -> set[int]:
        taken, todo = set(), [i]
        while todo:
            j = todo.pop()
            taken.add(j)
            todo += [self.maker[a] for a in self.equations[j].inputs if a in self.maker]
        return taken

    def _with_its_factors(self, i: int, var: Var, members: set[int]) -> set[int]:
        """Equation i and the small values it reads, if they are all made of one value that is no larger than `var`."""
        read = [a for a in self.equations[i].inputs if isinstance(a, Var) and a not in self.constant]
        large = {a for a in read if a.array.size * _SMALL > var.array.size}
        if len(large) > 1 or sum(a.array.nbytes for a in large) > var.array.nbytes:
            return set()
        taken = {i}
        for a in read:
            if a not in large:
                taken |= self._factor(a, large, members | taken) or set()
        return taken

    def _factor(self, small: Atom, of: AbstractSet[Atom], members: AbstractSet[int]) -> set[int] | None:
        """The equations that make a small value of these and of small ones alone; None if larger ones take part."""
        taken: set[int] = set()
        todo: list[Atom] = [small]
        while todo:
            a = todo.pop()
            i = self.maker.get(a)
            if a in of or a in self.constant or i in taken:
                continue
            if i is not None and self._free(i) and self._only_read_in(i, members | taken):
                taken.add(i)
                todo += [b for b in self.equations[i].inputs if isinstance(b, Var)]
            elif a.array.size > small.array.size:
                return None
        return taken

    def _grow_down(self, number: int, members: set[int], after: list[int]) -> None:
        """Take in what makes of results one that is no larger, and reads nothing else of size."""
        todo = [v for i in sorted(members) for v in self.equations[i].outputs]
        while todo:
            var = todo.pop()
            readers = [i for i in self.readers.get(var, ()) if i not in members]
            if var in self.leaving or len(readers) != 1 or not self._ties(var):
                continue
            i, array = readers[0], var.array
            e = self.equations[i]
            read = (a for a in e.inputs if isinstance(a, Var) and a not in self.constant)
            others = [a for a in read if self.maker.get(a, -1) not in members]
            waits = any(after[self.maker[a]] >> number & 1 for a in others if a in self.maker)
            small = all(a.array.size * _SMALL <= array.size for a in others)
            made = sum(v.array.nbytes for v in e.outputs)
            if self._free(i) and not e.bodies and small and not waits and made <= array.nbytes < _SMALL * made:
                self._take(number, {i})
                todo += e.outputs

    def _found(self, number: int, members: set[int], after: list[int]) -> Found:
        made = [v for i in sorted(members) for v in self.equations[i].outputs]
        inputs = self._inputs(members)
        outputs = [
            v
            for v in made
            if v not in self.constant and (v in self.leaving or not members >= set(self.readers.get(v, ())))
        ]
        waits = [after[self.maker[v]] for v in inputs if v in self.maker]
        upstream = functools.reduce(operator.or_, waits, 0)
        equations = tuple(self.equations[i] for i in sorted(members))
        own = frozenset(self.equations[i] for i in members if not self._is_constant(i))
        return Found(number, equations, tuple(inputs), tuple(outputs), own, upstream)
