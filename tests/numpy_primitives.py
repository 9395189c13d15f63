"""What the common primitives do, in NumPy: `evaluate` spares compiling each of the many local shapes of an equation.

What is not in the tables is left to JAX (None). `equations.play` compares the two for every equation that it meets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def _round(x, p):
    return (
        np.round(x) if p["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else np.trunc(x + np.copysign(0.5, x))
    )


SAME_NAME = (
    "tanh",
    "sin",
    "cos",
    "exp",
    "log",
    "log1p",
    "expm1",
    "sqrt",
    "abs",
    "sign",
    "floor",
    "ceil",
    "real",
    "imag",
)
UNCHANGED = ("copy", "copy_p", "convert_element_type", "stop_gradient")
UNARY: dict[str, Callable[..., Any]] = {
    **{"square": np.square, "cbrt": np.cbrt, "neg": np.negative, "atan": np.arctan, "conj": np.conj},
    **{"rsqrt": lambda x: 1 / np.sqrt(x), "logistic": lambda x: 1 / (1 + np.exp(-x)), "is_finite": np.isfinite},
    **{"not": lambda x: np.logical_not(x) if x.dtype == bool else np.invert(x)},
    **{name: getattr(np, name) for name in SAME_NAME},
}
BINARY: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum},
    **{
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    },
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "complex": lambda a, b: a + 1j * b},
}
REDUCTIONS = {
    **{"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_prod": np.prod},
    **{"reduce_and": np.all, "reduce_or": np.any},
}
CUMULATIVE = {
    **{"cumsum": np.cumsum, "cumprod": np.cumprod},
    **{"cummax": np.maximum.accumulate, "cummin": np.minimum.accumulate},
}


def evaluate(name: str, params: Mapping[str, Any], arrays: Sequence[Any], dtypes: Sequence[Any]) -> list[Any] | None:
    """The results of a primitive, with these dtypes; None: ask JAX."""
    if not all(isinstance(x, np.ndarray | np.generic) for x in arrays):
        return None
    wide = [_wide(x) for x in arrays]
    with np.errstate(all="ignore"):
        out = _evaluate(name, params, wide)
    if out is None:
        return None
    many = out if isinstance(out, list) else [out]
    with np.errstate(all="ignore"):
        return [np.asarray(x).astype(dtype) for x, dtype in zip(many, dtypes, strict=True)]


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x


def _evaluate(name: str, p: Mapping[str, Any], arrays: list[np.ndarray]) -> Any:
    if name == "convert_element_type" and jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return arrays[0] if jnp.issubdtype(p["new_dtype"], jnp.inexact) else None  # out of range: as XLA has it
    if name in UNARY:
        return UNARY[name](arrays[0])
    if name in UNCHANGED:
        return arrays[0]
    if name == "integer_pow":
        return np.power(arrays[0], p["y"])
    if name == "round":
        return _round(arrays[0], p)
    if name in BINARY:
        return BINARY[name](*arrays)
    if name == "div":
        return arrays[0] / arrays[1] if jnp.issubdtype(arrays[0].dtype, jnp.inexact) else None
    if name == "select_n":
        test, *cases = arrays
        return np.where(test, cases[1], cases[0]) if test.dtype == bool and len(cases) == 2 else None
    if name in REDUCTIONS:
        return REDUCTIONS[name](arrays[0], axis=tuple(p["axes"])) if arrays[0].size else None
    if name in CUMULATIVE:
        x, axis = arrays[0], p["axis"]
        x = np.flip(x, axis) if p["reverse"] else x
        out = CUMULATIVE[name](x, axis=axis)
        return np.flip(out, axis) if p["reverse"] else out
    return _moved(name, p, arrays)


def _moved(name: str, p: Mapping[str, Any], arrays: list[np.ndarray]) -> Any:
    """Shapes and products."""
    x = arrays[0] if arrays else None
    if name == "broadcast_in_dim" and len(arrays) == 1:
        shape = [1] * len(p["shape"])
        for d, size in zip(p["broadcast_dimensions"], x.shape, strict=True):
            shape[d] = size
        return np.broadcast_to(x.reshape(shape), p["shape"])
    if name == "reshape" and len(arrays) == 1:
        return x.reshape(p["new_sizes"]) if p.get("dimensions") is None else None
    if name == "transpose":
        return x.transpose(p["permutation"])
    if name == "squeeze":
        return np.squeeze(x, tuple(p["dimensions"]))
    if name == "rev":
        return np.flip(x, tuple(p["dimensions"]))
    if name == "slice":
        steps = p["strides"] or (1,) * x.ndim
        return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]
    if name == "concatenate":
        return np.concatenate(arrays, p["dimension"])
    if name == "split":
        return np.split(x, list(itertools.accumulate(p["sizes"]))[:-1], axis=p["axis"])
    if name == "iota" and not arrays:
        d, shape = p["dimension"], p["shape"]
        return np.broadcast_to(np.arange(shape[d]).reshape([-1 if e == d else 1 for e in range(len(shape))]), shape)
    if name == "dot_general":
        return _product(p["dimension_numbers"], *arrays)
    return None


def _product(numbers: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (contract_a, contract_b), (batch_a, batch_b) = numbers
    ia = list(range(a.ndim))
    ib = [a.ndim + d for d in range(b.ndim)]
    for i, j in [*zip(contract_a, contract_b, strict=True), *zip(batch_a, batch_b, strict=True)]:
        ib[j] = ia[i]
    rest = [ia[d] for d in range(a.ndim) if d not in {*contract_a, *batch_a}]
    rest += [ib[d] for d in range(b.ndim) if d not in {*contract_b, *batch_b}]
    return np.einsum(a, ia, b, ib, [ia[d] for d in batch_a] + rest)
