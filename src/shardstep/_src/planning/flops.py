"""How many floating-point operations a product or a factorization takes, from the shapes that one replica has.

Only what may take longer than reading its operands is counted: products, convolutions, factorizations, solvers and
transforms. Everything else is a pass over memory (`costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import compat
from ..core.layout import Array
from ..core.pieces import STACKED
from ..core.program import Program


class Call(NamedTuple):
    """A primitive on arrays of these shapes: a whole equation, or one replica's share of it."""

    params: Mapping[str, Any]
    inputs: Sequence[Array]
    outputs: Sequence[Array]


def flops(primitive: Any, params: Mapping[str, Any], inputs: Sequence[Array], outputs: Sequence[Array]) -> float:
    """Floating-point operations of a primitive on these arrays; 0 for what only passes over memory."""
    count = _COUNTS.get(primitive)
    return count(Call(params, inputs, outputs)) if count and all(a.size for a in outputs) else 0.0


def multiplies(primitive: Any) -> bool:
    """Is this counted at all?"""
    return primitive in _COUNTS


def _dot(call: Call) -> float:
    """A multiplication and an addition for each element of the result and each contracted index."""
    (contracted, _), _ = call.params["dimension_numbers"]
    return 2.0 * call.outputs[0].size * math.prod(call.inputs[0].shape[d] for d in contracted)


def _convolution(call: Call) -> float:
    """Each element of the result meets one window of the kernel: all of it but its output features."""
    kernel, numbers = call.inputs[1], call.params["dimension_numbers"]
    return 2.0 * call.outputs[0].size * kernel.size / max(kernel.shape[numbers.rhs_spec[0]], 1)


def _ragged(call: Call) -> float:
    """Each row of [m, k] meets the matrix of its group, one of [g, k, n]; or rows are contracted group by group."""
    left, right = call.inputs[:2]
    return 2.0 * left.size * right.shape[-1]


def _matrices(array: Array) -> tuple[int, int, int]:
    """How many matrices, and their sides."""
    rows, columns = array.shape[-2:]
    return array.size // max(rows * columns, 1), rows, columns


def _cubic(factor: float) -> Callable[[Call], float]:
    """Of the long side once and the short side twice: the leading term for a factorization (Golub and Van Loan)."""

    def count(call: Call) -> float:
        batch, rows, columns = _matrices(call.inputs[0])
        return factor * batch * max(rows, columns) * min(rows, columns) ** 2

    return count


def _solve(call: Call) -> float:
    """Half a product with the triangle, for each right-hand side."""
    return float(call.inputs[1].size * call.inputs[0].shape[-1])


def _reflectors(call: Call) -> float:
    batch, rows, columns = _matrices(call.inputs[0])
    return 4.0 * batch * rows * columns * call.outputs[0].shape[-1]


def _fft(call: Call) -> float:
    array = max(call.inputs[0], call.outputs[0], key=lambda a: a.size)
    return 5.0 * array.size * math.log2(max(math.prod(call.params["fft_lengths"]), 2))


def _stack(call: Call) -> float:
    """The piece, for each row that the busiest replica has."""
    piece = call.params["piece"]
    return piece.done(call.outputs[0].shape[0]) * program_flops(piece.program)


def program_flops(program: Program) -> float:
    """Of a whole program; loops as often as they run, of branches the most expensive."""
    total = 0.0
    for e in program.equations:
        inside = [program_flops(body) for body in e.bodies]
        counted = flops(e.primitive, e.params, [a.array for a in e.inputs], [v.array for v in e.outputs])
        total += counted + e.params.get("length", 1) * max(inside, default=0.0)
    return total


_P = compat.primitives

_COUNTS: dict[Any, Callable[[Call], float]] = {
    STACKED: _stack,
    **dict.fromkeys(_P("dot_general"), _dot),
    **dict.fromkeys(_P("conv_general_dilated"), _convolution),
    **dict.fromkeys(_P("ragged_dot_general"), _ragged),
    **dict.fromkeys(_P("cholesky"), _cubic(1 / 3)),
    **dict.fromkeys(_P("lu"), _cubic(2 / 3)),
    **dict.fromkeys(_P("geqrf qr"), _cubic(2)),
    **dict.fromkeys(_P("tridiagonal hessenberg"), _cubic(4 / 3)),
    **dict.fromkeys(_P("eigh"), _cubic(9)),
    **dict.fromkeys(_P("eig schur"), _cubic(25)),
    **dict.fromkeys(_P("svd"), _cubic(20)),
    **dict.fromkeys(_P("householder_product ormqr"), _reflectors),
    **dict.fromkeys(_P("triangular_solve"), _solve),
    **dict.fromkeys(_P("fft"), _fft),
}
