"""A large leaf that no dimension divides, at rest: padded and split, but to the user an ordinary array."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import compat
from .meshes import untied


class Padded(jax.Array):  # type: ignore[misc]
    """Behaves as its logical array; holds it with room at the end of a dimension, so that replicas share it evenly.

    A leaf of the state, not a container: `isinstance(x, jax.Array)` holds, and `jax.tree.map`, `jnp` functions,
    `jax.jit`, serialization, printing, copying and pickling see an array of `shape`. `data` is the array that the
    devices hold; what stands in its padding means nothing. Why so: docs/decisions/008-padded-leaves.md.
    """

    __slots__ = ("_logical_shape", "data")

    def __init__(self, data: jax.Array, shape: tuple[int, ...]):
        if len(shape) != data.ndim or any(logical > held for logical, held in zip(shape, data.shape, strict=True)):
            raise ValueError(f"an array of shape {data.shape} does not hold one of shape {shape} with room to spare")
        self.data = data
        self._logical_shape = tuple(shape)

    # -- the logical array ------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self._logical_shape

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def aval(self) -> Any:
        return jax.typeof(jax.ShapeDtypeStruct(self.shape, self.dtype))

    @property
    def weak_type(self) -> bool:
        return False

    def __jax_array__(self) -> jax.Array:
        with untied(self.data) as data:
            return jax.device_put(data[tuple(slice(size) for size in self.shape)], self.sharding)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # type: ignore[override]
        whole = np.asarray(self.data)[tuple(slice(size) for size in self.shape)]
        return np.array(whole, dtype, copy=True) if copy or dtype not in (None, whole.dtype) else whole

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __getattr__(self, name: str) -> Any:
        """What else an array can do, the logical array does."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __format__(self, spec: str) -> str:
        return format(self.__jax_array__(), spec)

    def __repr__(self) -> str:
        return repr(self.__jax_array__())

    def __str__(self) -> str:
        return str(self.__jax_array__())

    # -- the array that holds it ------------------------------------------------------------------------------------

    @property
    def sharding(self) -> Any:
        """That of the logical array, once somebody asks for it: whole on each device. (`data.sharding` is split.)"""
        held = self.data.sharding
        return NamedSharding(held.mesh, PartitionSpec()) if isinstance(held, NamedSharding) else held

    @property
    def committed(self) -> bool:
        return self.data.committed

    @property
    def is_fully_addressable(self) -> bool:
        return self.data.is_fully_addressable

    def devices(self) -> Any:
        return self.data.devices()

    def is_deleted(self) -> bool:
        return self.data.is_deleted()

    def delete(self) -> None:
        self.data.delete()

    def block_until_ready(self) -> Padded:
        self.data.block_until_ready()
        return self

    # -- copies -----------------------------------------------------------------------------------------------------

    def __copy__(self) -> Padded:
        return Padded(jnp.copy(self.data), self.shape)

    def __deepcopy__(self, memo: Any) -> Padded:
        return self.__copy__()

    def __reduce__(self) -> Any:
        """Pickled as its logical value: devices and their number do not travel."""
        return _from_pickle, (np.asarray(self),)


def _from_pickle(value: np.ndarray[Any, Any]) -> jax.Array:
    return jnp.asarray(value)


def _operator(name: str, act: Any) -> None:
    def forward(self: Padded, *others: Any) -> Any:
        return act(self.__jax_array__(), *map(_plain, others))

    def backward(self: Padded, other: Any) -> Any:
        return act(_plain(other), self.__jax_array__())

    setattr(Padded, f"__{name}__", forward)
    if name in _BINARY:
        setattr(Padded, f"__r{name}__", backward)


def _plain(x: Any) -> Any:
    return x.__jax_array__() if isinstance(x, Padded) else x


def _ask(name: str, leaf: Padded) -> Any:
    return getattr(leaf.__jax_array__(), name)


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_COMPARED = ["eq", "ne", "lt", "le", "gt", "ge"]
_UNARY = ["neg", "pos", "abs", "invert"]

for _name in (*_BINARY, *_COMPARED, *_UNARY, "getitem"):
    _operator(_name, getattr(operator, f"__{_name}__"))
for _name, _act in {"divmod": divmod, "round": round, "float": float, "int": int, "complex": complex}.items():
    _operator(_name, _act)
for _name in dir(jax.Array):  # `mean`, `astype`, `T`, `at`, `addressable_shards`, ...: abstract there
    if _name not in vars(Padded) and _name not in dir(object) and not _name.startswith("__"):
        setattr(Padded, _name, property(functools.partial(_ask, _name)))
Padded.__hash__ = None  # type: ignore[assignment]  # as for arrays: == answers element by element

compat.register_array_type(Padded, lambda x: x.__jax_array__())
