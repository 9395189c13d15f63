"""A piece of a step that is done to several values alike, as one equation on their stack.

`stacked` is an equation whose operands and results have one more dimension in front than the piece itself, one row for
each of the values (operands that all of them share have none). Rows never meet: that is what `jax.vmap` promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from . import compat
from .layout import Array, resized
from .program import Atom, Equation, Literal, Program

STACKED = Primitive("stacked")  # never bound: its rule says what is emitted instead
STACKED.multiple_results = True

_DOT, _TRANSPOSE = (compat.primitive(name) for name in ("dot_general", "transpose"))
_SCAN, _WHILE = (compat.primitive(name) for name in ("scan", "while"))
Cast = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class Piece:
    """What is done to one value, and which of its inputs come one per value."""

    program: Program
    stacked: tuple[bool, ...]  # of the inputs; the others are shared by all rows
    count: int  # rows that are read afterwards; the rest are copies, so that the replicas divide the stack
    worth: float = 0.0  # seconds that one row takes
    joined: bool = False  # rows have a dimension of their own in the program, of size 1: leaves were stacks already
    slots: tuple[int | None, ...] = ()  # the row in each slot of the stack; None: a copy, not to be computed with
    busiest: int = 0  # the first slot of the replica that has most to do, with all stacks

    def __str__(self) -> str:
        return f"{self.count} x {len(self.program.equations)} equations"

    def shape_of(self, array: Array, rows: int) -> Array:
        """Of one value of the program: so many of them."""
        return Array(resized(array.shape, 0, rows), array.dtype) if self.joined else along(array, rows)

    def patterns(self, held: int) -> tuple[tuple[int, ...], ...]:
        """Of each block of so many slots, those that hold a row."""
        blocks = range(0, len(self.slots), held)
        return tuple(tuple(j for j in range(held) if self.slots[b + j] is not None) for b in blocks)

    def done(self, held: int) -> int:
        """How many rows the busiest replica computes, if replicas have blocks of so many slots."""
        return len(self.patterns(held)[self.busiest // held])


class Rows(NamedTuple):
    """What a piece does to each row of leaves that are stacks."""

    program: Program  # for a single row: the first dimension is 1
    own: tuple[bool, ...]  # of the inputs: does each row have its own?
    height: int  # how many rows a leaf has


def along(array: Array, rows: int) -> Array:
    """The array of a stack."""
    return Array((rows, *array.shape), array.dtype)


def run_stacked(piece: Piece, arrays: Sequence[Any], cast: Cast) -> list[Any]:
    """The piece on every row. `cast` gives values the type that JAX wants of what differs between replicas.

    A single row needs no batch: a product with a batch of one takes nearly twice as long as a plain one on CPUs.
    """
    if all(x.shape[0] == 1 for x, stacked in zip(arrays, piece.stacked, strict=True) if stacked):
        row = [x[0] if stacked and not piece.joined else x for x, stacked in zip(arrays, piece.stacked, strict=True)]
        made = evaluate(piece.program, row, cast)
        return made if piece.joined else [y[None] for y in made]
    axes = [0 if stacked else None for stacked in piece.stacked]
    if piece.joined:
        arrays = [x[:, None] if stacked else x for x, stacked in zip(arrays, piece.stacked, strict=True)]
    made = jax.vmap(lambda *row: evaluate(piece.program, row, cast), in_axes=axes)(*arrays)
    return [y.reshape(y.shape[0], *y.shape[2:]) for y in made] if piece.joined else made


def evaluate(program: Program, arrays: Sequence[Any], cast: Cast) -> list[Any]:
    """Bind every equation, bodies included: a loop is traced anew, so that its types fit where it runs."""
    env: dict[Any, Any] = dict(zip(program.inputs, arrays, strict=True))
    env.update((var, value) for var, value in program.constants)

    def read(atom: Atom) -> Any:
        return np.asarray(atom.value, atom.array.dtype) if isinstance(atom, Literal) else env[atom]

    turned: dict[Atom, Equation] = {e.outputs[0]: e for e in program.equations if e.primitive is _TRANSPOSE}
    for equation in program.equations:
        if equation.primitive is _DOT:
            equation = _as_they_lie(equation, turned)
        with compat.at_source(equation.sources):
            operands = [read(a) for a in equation.inputs]
            results = _bind(equation, [cast(x) for x in operands], cast)
        env.update(zip(equation.outputs, results, strict=True))
    return [cast(read(a)) for a in program.outputs]


def _bind(equation: Equation, operands: list[Any], cast: Cast) -> Sequence[Any]:
    if equation.primitive is _DOT:
        return [_product(equation.params, *operands)]
    if not equation.bodies:
        found = equation.primitive.bind(*operands, **equation.params)
        return found if equation.primitive.multiple_results else [found]
    run = [lambda *xs, body=body: evaluate(body, xs, cast) for body in equation.bodies]
    if equation.primitive is _SCAN:
        return _scan(equation, operands, run[0])
    if equation.primitive is _WHILE:
        return _while(equation, operands, *run)
    index = operands[0]
    index = index.astype("int32") if index.dtype == bool else index
    return lax.switch(index, run, *operands[1:])


def _as_they_lie(dot: Equation, turned: Mapping[Atom, Equation]) -> Equation:
    """The product of its factors before they were transposed, if that is the same."""
    (summed, batch), inputs = map(list, dot.params["dimension_numbers"]), list(dot.inputs)
    for side, atom in enumerate(dot.inputs):
        if atom in turned:
            before = turned[atom].params["permutation"]
            kept = [before[d] for d in range(atom.array.ndim) if d not in (*summed[side], *batch[side])]
            if kept == sorted(kept):
                inputs[side] = turned[atom].inputs[0]
                summed[side], batch[side] = (tuple(before[d] for d in dims[side]) for dims in (summed, batch))
    numbers = tuple(summed), tuple(batch)
    return replace(dot, params={**dot.params, "dimension_numbers": numbers}, inputs=tuple(inputs))


def _product(params: Mapping[str, Any], left: Any, right: Any) -> Any:
    """A product without those batch dimensions that have size 1, as the rows of stacked leaves have."""
    (summed_left, summed_right), (batch_left, batch_right) = params["dimension_numbers"]
    batch = [(i, j) for i, j in zip(batch_left, batch_right, strict=True) if left.shape[i] > 1]
    gone_left, gone_right = set(batch_left) - {i for i, _ in batch}, set(batch_right) - {j for _, j in batch}
    if not gone_left:
        return _DOT.bind(left, right, **params)

    def moved(dims: Sequence[int], gone: set[int]) -> tuple[int, ...]:
        return tuple(d - sum(g < d for g in gone) for d in dims)

    kept = moved([i for i, _ in batch], gone_left), moved([j for _, j in batch], gone_right)
    numbers = (moved(summed_left, gone_left), moved(summed_right, gone_right)), kept
    squeezed = lax.squeeze(left, tuple(gone_left)), lax.squeeze(right, tuple(gone_right))
    made = _DOT.bind(*squeezed, **{**params, "dimension_numbers": numbers})
    return lax.expand_dims(made, [b for b, i in enumerate(batch_left) if i in gone_left])


def _scan(equation: Equation, operands: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    consts, carries = compat.scan_counts(equation.params)
    fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

    def iterate(carry: Any, x: Any) -> tuple[Any, Any]:
        out = body(*fixed, *carry, *x)
        return out[:carries], out[carries:]

    how = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(iterate, init, xs, **how)
    return [*carry, *ys]


def _while(
    equation: Equation, operands: list[Any], test: Callable[..., list[Any]], body: Callable[..., list[Any]]
) -> list[Any]:
    tests, fixed = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    for_test, for_body, init = operands[:tests], operands[tests : tests + fixed], operands[tests + fixed :]
    several = equation.bodies[0].outputs[0].array.ndim  # one answer for each, if the loop was written under `vmap`

    def iterate(carry: Sequence[Any]) -> list[Any]:
        new = body(*for_body, *carry)
        if not several:
            return new
        (going,) = test(*for_test, *carry)
        return [_where(going, *pair) for pair in zip(new, carry, strict=True)]

    return lax.while_loop(lambda c: test(*for_test, *c)[0].any(), iterate, init)


def _where(going: Any, new: Any, old: Any) -> Any:
    """What a row that is done carries stays as it was (the dimensions of answers come first, as `vmap` leaves them)."""
    return lax.select(lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)
