"""A call's arguments, taken apart: arrays are traced, everything else is static.

Python numbers are traced, as under `jax.jit`; but an argument that also holds functions or strings (an Equinox
module) is read as `eqx.filter_jit` reads it, with its numbers static.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath, keystr

from ..core.errors import ShardstepError
from ..core.padded import Padded

_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, _ARRAYS) or hasattr(leaf, "__jax_array__")


class Constant:
    """A static leaf, compared by value where it can be."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        return self.value is other.value or (type(self.value) is type(other.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return hash(type(self.value))


@dataclass(frozen=True)
class Argument:
    """One argument of the step: its name and the range of its leaves."""

    name: str
    start: int
    stop: int
    position: int | None


@dataclass(frozen=True, eq=False)
class Call:
    """One call's arguments. `leaves` holds the arrays; `statics` what stands at the other leaves."""

    treedef: Any
    leaves: tuple[Any, ...]  # arrays only, in order
    traced: tuple[bool, ...]  # for each leaf of the tree
    statics: tuple[Constant, ...]
    static_arguments: tuple[tuple[int | str, Constant], ...]

    def key(self, strong: Container[int] = ()) -> Any:
        """What tracing depends on. Leaves in `strong` count as strongly typed even where they are not."""
        signatures = tuple(map(signature_of, self.leaves))
        if strong:
            signatures = tuple((*s[:2], s[2] and i not in strong) for i, s in enumerate(signatures))
        return self.treedef, self.traced, self.statics, self.static_arguments, signatures

    def is_like(self, other: Call) -> bool:
        """Is everything the same that does not depend on single arrays?"""
        mine = self.treedef, self.traced, self.statics, self.static_arguments
        return mine == (other.treedef, other.traced, other.statics, other.static_arguments)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) for the step, with other arrays in the arrays' places."""
        arrays, statics = iter(leaves), iter(self.statics)
        merged = [next(arrays) if traced else next(statics).value for traced in self.traced]
        args, kwargs = jax.tree.unflatten(self.treedef, merged)
        args, kwargs = list(args), dict(kwargs)
        for where, constant in self.static_arguments:  # positions ascend, so each lands where it was
            if isinstance(where, int):
                args.insert(where, constant.value)
            else:
                kwargs[where] = constant.value
        return tuple(args), kwargs


def signature_of(leaf: Any) -> Any:
    """What tracing depends on."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.aval.weak_type
    if isinstance(leaf, jax.ShapeDtypeStruct | Padded):
        return leaf.shape, leaf.dtype, leaf.weak_type
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def shape_of(leaf: Any) -> tuple[tuple[int, ...], Any]:
    shape, dtype, _ = signature_of(leaf)
    return tuple(shape), dtype


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype, weak_type = signature_of(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


@dataclass(frozen=True)
class Signature:
    """The step's parameters, and which of them are static."""

    names: tuple[str, ...]
    static_positions: frozenset[int]
    static_names: frozenset[str]

    @classmethod
    def of(cls, step: Callable[..., Any], argnums: Any, argnames: Any) -> Signature:
        try:
            parameters = list(inspect.signature(step).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        numbers = {_position(i, positional) for i in as_tuple(argnums, int)}
        names = set(as_tuple(argnames, str))
        numbers |= {positional.index(name) for name in names if name in positional}
        names |= {positional[i] for i in numbers if i < len(positional)}
        return cls(tuple(positional), frozenset(numbers), frozenset(names))

    def name(self, position: int) -> str:
        return self.names[position] if position < len(self.names) else f"argument {position}"

    def take_apart(self, args: Sequence[Any], kwargs: dict[str, Any], numbers_static: bool = False) -> Call:
        statics: list[tuple[int | str, Constant]] = []
        dynamic = []
        for i, value in enumerate(args):
            if i in self.static_positions:
                statics.append((i, Constant(value)))
            else:
                dynamic.append(value)
        keywords = {}
        for name, value in kwargs.items():
            if name in self.static_names:
                statics.append((name, Constant(value)))
            else:
                keywords[name] = value
        leaves, treedef = jax.tree.flatten((tuple(dynamic), keywords))
        traced = _traced(leaves, (dynamic, keywords), numbers_static)
        arrays = tuple(compress(leaves, traced))
        constants = tuple(Constant(x) for x, t in zip(leaves, traced, strict=True) if not t) if not all(traced) else ()
        return Call(treedef, arrays, traced, constants, tuple(statics))

    def describe(self, call: Call) -> tuple[list[Argument], list[str]]:
        """The arguments of a call and the path of each array leaf, in the user's words."""
        positions = [i for i in range(call_length(call)) if i not in self.static_positions]
        tree = jax.tree.unflatten(call.treedef, list(range(call.treedef.num_leaves)))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        arguments: list[Argument] = []
        texts: list[str] = []
        for path, traced in zip(paths, call.traced, strict=True):
            name, position = self._owner(path, positions)
            if not arguments or arguments[-1].name != name:
                arguments.append(Argument(name, len(texts), len(texts), position))
            if traced:
                texts.append(name + keystr(path[2:]))
                last = arguments[-1]
                arguments[-1] = Argument(last.name, last.start, len(texts), last.position)
        return arguments, texts

    def _owner(self, path: KeyPath, positions: list[int]) -> tuple[str, int | None]:
        inner: Any = path[1]
        if getattr(path[0], "idx", None) == 1:
            return str(inner.key), None
        return self.name(positions[inner.idx]), positions[inner.idx]


def call_length(call: Call) -> int:
    """How many positional arguments the call had, static ones included."""
    args, _ = jax.tree.unflatten(call.treedef, [None] * call.treedef.num_leaves)
    return len(args) + sum(isinstance(where, int) for where, _ in call.static_arguments)


def _traced(
    leaves: Sequence[Any], arguments: tuple[list[Any], dict[str, Any]], numbers_static: bool
) -> tuple[bool, ...]:
    if all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))) or all(map(is_array, leaves)):
        return (True,) * len(leaves)
    found: list[bool] = []
    for argument in [*arguments[0], *(arguments[1][k] for k in sorted(arguments[1]))]:
        mine = jax.tree.leaves(argument)
        module = numbers_static or any(not is_array(x) and not isinstance(x, _NUMBERS) for x in mine)
        found += [is_array(x) or (isinstance(x, _NUMBERS) and not module) for x in mine]
    return tuple(found)


def as_tuple(value: Any, kind: type) -> tuple[Any, ...]:
    return (value,) if isinstance(value, kind) else tuple(value or ())


def _position(i: int, positional: list[str]) -> int:
    if i < 0:
        i += len(positional)
    if i < 0:
        raise ShardstepError(
            f"static_argnums={i - len(positional)} is out of range: the step takes {len(positional)} arguments"
        )
    return i
