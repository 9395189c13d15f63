"""Loops that look their layer up, as loops over layers.

    scan(x, i in 0..L)  with  w = W[i],  x = f(x, w)               ->   scan(x, w in W)  with  x = f(x, w)
    scan(dW = 0)        with  dW = dW + zeros.at[i].set(g)         ->   dW = scan()  with  g stacked

`lax.fori_loop` over `params[i]`, or `lax.scan` over `jnp.arange(L)`: what the loop reads of a stack is one layer, but
all of the stack enters it, and in the backward pass every iteration adds a whole stack of zeros and one gradient. Said
as a scan over the stack, a layer is read and its gradient made where its iteration is, with the same numbers.

That holds where the index of iteration p is known to be p, for each of the L layers, and where the loop does nothing
else with the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..core import compat
from ..core.layout import Array
from ..core.program import Atom, Equation, Literal, Program, Var
from . import counting
from .unread import without_unread

_P = compat.primitive
_SCAN, _BARRIER, _BROADCAST, _SQUEEZE = map(_P, ("scan", "optimization_barrier", "broadcast_in_dim", "squeeze"))
_SLICE, _GATHER, _WRITE, _ADD_AT = map(_P, ("dynamic_slice", "gather", "dynamic_update_slice", "scatter_add"))
_SUMS = compat.primitives("add add_jaxvals")


def layers_in_turn(program: Program) -> Program:
    """The same program, with such loops as scans over their stacks."""
    if not any(equation.primitive is _SCAN for equation in program.walk()):
        return program
    found = _rewritten(program, {})
    return program if found is program else without_unread(found)


def _rewritten(program: Program, known: dict[Atom, np.ndarray]) -> Program:
    """`known`: of its inputs; that of all its values is added."""
    now: dict[Atom, Atom] = {}
    equations: list[Equation] = []
    made: dict[Atom, Equation] = {}
    for before in program.equations:
        equation = replace(before, inputs=tuple(now.get(a, a) for a in before.inputs)) if now else before
        if equation.primitive is _SCAN:
            inside = counting.in_body(equation, known)
            body = _rewritten(equation.bodies[0], inside)
            if body is not equation.bodies[0]:
                equation = replace(equation, bodies=(body,))
            known.update(counting.of_stacks(equation, body, inside))
            equation = _Loop(equation, inside, made).over_layers(now)
        elif equation.bodies:
            bodies = tuple(_rewritten(body, {}) for body in equation.bodies)
            if any(map(lambda a, b: a is not b, bodies, equation.bodies)):
                equation = replace(equation, bodies=bodies)
        else:
            counting.add_results(equation, known)
        equations.append(equation)
        made.update(dict.fromkeys(equation.outputs, equation))
    if not now and all(map(lambda a, b: a is b, equations, program.equations)):
        return program
    return replace(program, equations=tuple(equations), outputs=tuple(now.get(a, a) for a in program.outputs))


@dataclass(eq=False)
class _Loop:
    """A scan, what is known inside, and who made what outside."""

    equation: Equation
    known: Mapping[Atom, np.ndarray]
    made: Mapping[Atom, Equation]
    now: dict[Atom, Atom] = field(default_factory=dict)  # what stands for a value of the body
    layers: dict[Atom, Var] = field(default_factory=dict)  # the layer for each name of a stack
    added: dict[Equation, list[Equation]] = field(default_factory=dict)  # what stands for an equation of it

    def __post_init__(self) -> None:
        (self.body,) = self.equation.bodies
        self.consts, self.carried = compat.scan_counts(self.equation.params)
        self.makers: dict[Atom, Equation] = {v: e for e in self.body.equations for v in e.outputs}

    def over_layers(self, outside: dict[Atom, Atom]) -> Equation:
        """The loop over the layers that it looks up; `outside` gets what stands for its results."""
        layers = {k: layer for k in range(self.consts) if (layer := self._layer(k)) is not None}
        sums = {j: out for j in range(self.carried) if (out := self._gradient(j)) is not None}
        equation, body = self.equation, self.body
        if layers or sums:
            equation, body = self._scan(layers, sums)
        first = sum(compat.scan_counts(equation.params))
        stacks = dict(zip(body.inputs[first:], equation.inputs[first:], strict=True))
        if layers:  # layers that are kept for the backward pass are the stack itself
            makes = zip(equation.outputs, body.outputs, strict=True)
            kept = list(makes)[compat.scan_counts(equation.params)[1] :]
            outside.update({stack: stacks[out] for stack, out in kept if out in stacks})
        return equation

    def _scan(self, layers: Mapping[int, Var], sums: Mapping[int, Atom]) -> tuple[Equation, Program]:
        body, equation, (consts, carried) = self.body, self.equation, (self.consts, self.carried)
        entering = [i for i in range(len(body.inputs)) if i not in layers and i - consts not in sums]
        leaving = [j for j in range(len(body.outputs)) if j not in sums] + [*sums]
        equations = [self._renamed(new) for e in body.equations for new in self.added.get(e, [e])]
        outputs = {**dict(enumerate(body.outputs)), **sums}
        inside = replace(
            body,
            inputs=(*(body.inputs[i] for i in entering), *layers.values()),
            outputs=tuple(self.now.get(outputs[j], outputs[j]) for j in leaving),
            equations=tuple(equations),
        )
        found = replace(
            equation,
            params=compat.with_scan_counts(equation.params, consts - len(layers), carried - len(sums)),
            inputs=tuple(equation.inputs[i] for i in [*entering, *layers]),
            outputs=tuple(equation.outputs[j] for j in leaving),
            bodies=(inside,),
        )
        return found, inside

    def _renamed(self, e: Equation) -> Equation:
        """A barrier lets through a layer where it let the stack through."""
        inputs = tuple(self.now.get(a, a) for a in e.inputs)
        layers = [self.layers.get(v, v) for v in e.outputs] if e.primitive is _BARRIER else e.outputs
        return replace(e, inputs=inputs, outputs=tuple(layers))

    # -- what is read ---------------------------------------------------------------------------------------------

    def _layer(self, k: int) -> Var | None:
        """A constant of the body as one layer, if the body looks up layer p in iteration p, and nothing else of it."""
        stack = self.body.inputs[k]
        if not self._counts(stack.array) or not self.body.uses[stack]:
            return None
        same = self._passed(stack)
        readers = [e for e in self.body.equations if e.primitive is not _BARRIER and not same.isdisjoint(e.inputs)]
        if not same.isdisjoint(self.body.outputs) or not all(self._reads_in_turn(e, same) for e in readers):
            return None
        for name in same:
            self.now[name] = self.layers[name] = Var(Array(stack.array.shape[1:], stack.array.dtype))
        for e in readers:
            self._read(e, self.layers[e.inputs[0]])
        return self.layers[stack]

    def _passed(self, stack: Atom) -> set[Atom]:
        """The stack, and what barriers make of it."""
        found = {stack}
        for equation in self.body.equations:
            if equation.primitive is _BARRIER:
                pairs = zip(equation.inputs, equation.outputs, strict=True)
                found.update(result for operand, result in pairs if operand in found)
        return found

    def _reads_in_turn(self, e: Equation, same: set[Atom]) -> bool:
        if e.inputs[0] not in same or not same.isdisjoint(e.inputs[1:]):
            return False
        stack = e.inputs[0].array
        if e.primitive is _SLICE:
            return tuple(e.params["slice_sizes"]) == (1, *stack.shape[1:]) and self._in_turn(e.inputs[1], clamped=True)
        if e.primitive is not _GATHER or tuple(e.params["slice_sizes"]) != (1, *stack.shape[1:]):
            return False
        numbers = e.params["dimension_numbers"]
        columns = tuple(numbers.collapsed_slice_dims), tuple(numbers.start_index_map)
        return columns == ((0,), (0,)) and _whole(numbers.offset_dims, stack) and self._in_turn(e.inputs[1])

    def _read(self, e: Equation, layer: Var) -> None:
        """In place of a lookup."""
        (result,) = e.outputs
        if result.array.shape == layer.array.shape:
            self.now[result] = layer
            self.added[e] = []
            return
        shape, dims = result.array.shape, tuple(range(1, result.array.ndim))
        how = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
        self.added[e] = [replace(e, primitive=_BROADCAST, params=how, inputs=(layer,))]
        for reader in self.body.equations:
            squeezed = reader.primitive is _SQUEEZE and reader.inputs[0] is result
            if squeezed and reader.outputs[0].array.shape == layer.array.shape:
                self.now[reader.outputs[0]] = layer
                self.added[reader] = []

    # -- what is summed -------------------------------------------------------------------------------------------

    def _gradient(self, j: int) -> Atom | None:
        """What iteration p adds to row p of a carry that starts as zeros, if that is all that is done with it."""
        carry, out = self.body.inputs[self.consts + j], self.body.outputs[j]
        if not self._counts(carry.array) or not self._zeros(self.equation.inputs[self.consts + j], self.made):
            return None
        parts = list(self._parts(out, carry))
        if parts.count(carry) != 1 or len(parts) < 2 or self.body.uses[carry] != 1:
            return None
        rows = [self._row(part) for part in parts if part is not carry]
        if any(row is None for row in rows):
            return None
        total = rows[0]
        maker = self.makers[out]
        new: list[Equation] = []
        for row in rows[1:]:
            assert total is not None and row is not None
            new.append(replace(maker, inputs=(total, row), outputs=(Var(total.array),)))
            total = new[-1].outputs[0]
        self.added[maker] = new
        return total

    def _parts(self, total: Atom, carry: Var) -> Iterator[Atom]:
        """What a sum adds up, as long as nobody else reads what is summed on the way."""
        maker = self.makers.get(total)
        if maker is None or maker.primitive not in _SUMS or self.body.uses[total] != 1:
            yield total
            return
        for operand in maker.inputs:
            yield from self._parts(operand, carry)

    def _row(self, part: Atom) -> Atom | None:
        """The row that is written into zeros, if it is row p; it is found where the sum of them all is made."""
        e = self.makers.get(part)
        if e is None or self.body.uses[part] != 1 or not self._zeros(e.inputs[0], self.makers):
            return None
        shape = part.array.shape[1:]
        if e.primitive is _WRITE:
            fits = e.inputs[1].array.shape == (1, *shape)
            return self._squeezed(e, shape) if fits and self._in_turn(e.inputs[2], clamped=True) else None
        if e.primitive is not _ADD_AT or e.inputs[2].array.shape != shape:
            return None
        numbers = e.params["dimension_numbers"]
        columns = tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims)
        in_turn = columns == ((0,), (0,)) and _whole(numbers.update_window_dims, part.array)
        return e.inputs[2] if in_turn and self._in_turn(e.inputs[1]) else None

    def _squeezed(self, e: Equation, shape: tuple[int, ...]) -> Atom:
        """What is written, without its dimension of size 1 in front."""
        spread = self.makers.get(e.inputs[1])
        if spread is not None and spread.primitive is _BROADCAST:
            dims = tuple(spread.params["broadcast_dimensions"])
            if spread.inputs[0].array.shape == shape and dims == tuple(range(1, len(shape) + 1)):
                return spread.inputs[0]
        row = Var(Array(shape, e.outputs[0].array.dtype))
        how = {"dimensions": (0,)}
        self.added[e] = [e, replace(e, primitive=_SQUEEZE, params=how, inputs=(e.inputs[1],), outputs=(row,))]
        return row

    # -- both -----------------------------------------------------------------------------------------------------

    def _counts(self, array: Array) -> bool:
        """Could this be a stack with one layer for each iteration?"""
        return array.ndim > 0 and array.shape[0] == self.equation.params["length"] > 1

    def _in_turn(self, index: Atom, clamped: bool = False) -> bool:
        """Is it p in iteration p?"""
        value, count = counting.of_atom(index, self.known), self.equation.params["length"]
        if value is None or index.array.size != 1:
            return False
        value = np.clip(value, 0, count - 1) if clamped else value
        return bool(np.array_equal(value.ravel(), np.arange(count)))

    def _zeros(self, atom: Atom, made: Mapping[Atom, Equation]) -> bool:
        maker = made.get(atom)
        if maker is not None and maker.primitive is _BROADCAST:
            atom = maker.inputs[0]
        return isinstance(atom, Literal) and not np.any(atom.value)


def _whole(window: tuple[int, ...], stack: Array) -> bool:
    """Is the window one whole layer, and nothing else?"""
    return tuple(window) == tuple(range(stack.ndim - 1))
