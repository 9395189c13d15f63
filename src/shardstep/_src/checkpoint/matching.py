"""What a plan expects of a checkpoint, and how what is stored fits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from ..core.errors import ShardstepError
from ..core.padded import Padded
from ..planning.plan import Argument, Plan

_STATE = {"weight", "auxiliary", "frozen"}
_SHOWN = 20  # lines of a list of differences
_SMALL_CHUNK = 1 << 16  # elements: padding may make a small chunk larger than its array

Key = tuple[str, ...]  # the path of a leaf in a tree, as Orbax names it


@dataclass(frozen=True)
class Wanted:
    """One array that the plan's state holds."""

    path: str  # in the user's words
    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding
    held: tuple[int, ...]  # the shape of the array that holds it

    @property
    def is_key(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """As stored in the file: a PRNG key as its words."""
        logical = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.eval_shape(jax.random.key_data, logical) if self.is_key else logical

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Expected:
    """The state arguments of a plan: (name, tree); leaves are `Wanted`, or what is static."""

    arguments: tuple[tuple[str, Any], ...]

    def match(self, metadata: Any, where: str) -> Match:
        """Pair the plan's arrays with what is stored; raises a list of differences where they do not fit."""
        found = {key: m for key, m in _flat(metadata).items() if m is not None}
        tree = self._contained(found)
        wanted, static = {}, set()
        for key, leaf in _flat(tree).items():
            if isinstance(leaf, Wanted):
                wanted[key] = leaf
            else:
                static.add(key)
        _check(wanted, static, found, where)
        return Match(tree, metadata, wanted, self.lone)

    @property
    def lone(self) -> bool:
        return len(self.arguments) == 1 and isinstance(self.arguments[0][1], Wanted)

    def _contained(self, found: dict[Key, Any]) -> Any:
        """The state in the container that was saved: alone, by the arguments' names, or in their order."""
        trees = dict(self.arguments)
        if len(trees) == 1:
            (tree,) = trees.values()
            return (tree,) if self.lone else tree
        return trees if {key[0] for key in found} == set(trees) else tuple(trees.values())


@dataclass(frozen=True)
class Match:
    """A plan's state and a checkpoint that fits it."""

    tree: Any  # as the user has it, with `Wanted` for arrays
    metadata: Any  # as Orbax has it
    wanted: dict[Key, Wanted]
    lone: bool  # a state that is one bare array is stored in a tuple

    @property
    def nbytes(self) -> int:
        return sum(_size(w) * w.stored.dtype.itemsize for w in self.wanted.values())

    @property
    def item(self) -> Any:
        """The tree to ask Orbax for: what the plan does not want is not read."""
        return self._map(lambda key, stored: stored if self._reads(key) else ocp.PLACEHOLDER)

    @property
    def restore_args(self) -> Any:
        return self._map(lambda key, stored: self._argument(key, stored) if self._reads(key) else ocp.RestoreArgs())

    def rebuild(self, restored: Any) -> Any:
        """The state as the user has it, from what Orbax read."""
        arrays = _flat(restored)
        found = {id(wanted): _from_file(wanted, arrays.get(key)) for key, wanted in self.wanted.items()}
        tree = jax.tree.map(lambda leaf: found.get(id(leaf), leaf), self.tree)
        return tree[0] if self.lone else tree

    def _reads(self, key: Key) -> bool:
        return key in self.wanted and _size(self.wanted[key]) > 0

    def _argument(self, key: Key, stored: Any) -> Any:
        if _is_number(stored):
            return ocp.RestoreArgs()
        wanted = self.wanted[key]
        padded = wanted.held != wanted.shape
        return ocp.ArrayRestoreArgs(
            sharding=wanted.sharding,
            global_shape=wanted.held if padded else wanted.stored.shape,
            dtype=wanted.stored.dtype,
            strict=not padded,  # Orbax fills up what goes beyond the stored array
        )

    def _map(self, function: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(_key(path), leaf), self.metadata, is_leaf=_is_metadata
        )


def expect(plan: Plan) -> Expected:
    """The state of a plan."""
    holding = [a for a in plan.arguments() if any(leaf and leaf.role in _STATE for leaf in a.leaves)]
    return Expected(tuple((a.name, _wanted(a)) for a in holding))


def _wanted(argument: Argument) -> Any:
    filled = [
        x if leaf is None else Wanted(leaf.path, leaf.shape, _dtype(leaf.dtype), x, leaf.held)
        for x, leaf in zip(argument.values, argument.leaves, strict=True)
    ]
    return jax.tree.unflatten(argument.tree, filled)


def _dtype(name: str) -> Any:
    """The dtype that prints as `name`."""
    if not name.startswith("key<"):
        return jnp.dtype(name)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        dtype = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype
        if str(dtype) == name:
            return dtype
    raise ShardstepError(f"PRNG keys of type {name} cannot be restored: JAX has no such generator by name")


# -- do they fit? -------------------------------------------------------------------------------------------------


def _check(wanted: dict[Key, Wanted], static: set[Key], found: dict[Key, Any], where: str) -> None:
    missing = [str(w) for key, w in wanted.items() if key not in found and _size(w)]
    unexpected = [_stored_name(key, m) for key, m in found.items() if key not in wanted and key not in static]
    other = [
        f"{w} is stored as {_stored_type(found[key])}"
        for key, w in wanted.items()
        if key in found and not _fits(w, found[key])
    ]
    other += [
        f"{w} is stored in chunks of {list(found[key].storage.chunk_shape)}, which would fill the memory"
        for key, w in wanted.items()
        if key in found and _bloated(w, found[key])
    ]
    lines = []
    for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape or dtype", other)):
        lines += [f"  {what}: {name}" for name in names[:_SHOWN]]
        lines += [f"  {what}: and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    if lines:
        raise ShardstepError("\n".join([f"the checkpoint {where} does not fit the plan's state:", *lines]))


def _fits(wanted: Wanted, stored: Any) -> bool:
    if _is_number(stored):  # a Python number has no width; whether it fits is seen when it is read
        return wanted.shape == () and not wanted.is_key
    return tuple(stored.shape) == tuple(wanted.stored.shape) and stored.dtype == wanted.stored.dtype


def _bloated(wanted: Wanted, stored: Any) -> bool:
    """Would one chunk, which is read as a whole, take much more memory than the array? No writer makes such chunks."""
    chunk = getattr(getattr(stored, "storage", None), "chunk_shape", None)
    return chunk is not None and int(np.prod(chunk, dtype=object)) > 4 * _size(wanted) + _SMALL_CHUNK


def _stored_name(key: Key, stored: Any) -> str:
    return f"{'.'.join(key)} {_stored_type(stored)}"


def _stored_type(stored: Any) -> str:
    return f"{getattr(stored, 'dtype', type(stored).__name__)}{list(getattr(stored, 'shape', None) or ())}"


def _is_number(stored: Any) -> bool:
    return isinstance(stored, ocp.metadata.value.ScalarMetadata)


def _is_metadata(x: Any) -> bool:
    return isinstance(x, ocp.metadata.value.Metadata)


def _size(wanted: Wanted) -> int:
    return int(np.prod(wanted.shape))


# -- leaves -------------------------------------------------------------------------------------------------------


def _from_file(wanted: Wanted, value: Any) -> jax.Array | Padded:
    """What Orbax read, as the array that the step takes."""
    if _size(wanted) == 0:
        return _lay_out(np.zeros(wanted.shape, wanted.dtype), wanted.sharding)
    if isinstance(value, int | float | np.generic):
        return _lay_out(_number(wanted, value), wanted.sharding)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) != wanted.is_key or value.dtype != wanted.dtype:
        raise ShardstepError(f"{wanted} is stored as {value.dtype}{list(value.shape)}")
    return value if wanted.held == wanted.shape else Padded(value, wanted.shape)


def _number(wanted: Wanted, value: Any) -> np.ndarray:
    """A Python number in the dtype that JAX gives it; only a float may be rounded to it."""
    inexact = jnp.issubdtype(wanted.dtype, jnp.inexact)
    try:
        number = np.asarray(value, wanted.dtype)
    except OverflowError:
        number = None
    if number is None or (not inexact and number != value):
        raise ShardstepError(f"{wanted} cannot hold the stored number {value}")
    return number


def _lay_out(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _flat(tree: Any) -> dict[Key, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None or _is_metadata(x))
    return {_key(path): leaf for path, leaf in leaves}


def _key(path: Any) -> Key:
    return tuple(keystr((entry,), simple=True) for entry in path)
