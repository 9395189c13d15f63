"""A call's arguments, taken apart: arrays are traced, everything else is static.

Python numbers can be either; `numbers` decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath, keystr

from ..core import compat
from ..core.errors import ShardstepError
from ..core.padded import Padded

NUMBERS = (bool, int, float, complex)
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
    leaves: tuple[Any, ...]  # what is traced, in order
    traced: tuple[bool, ...]  # for each leaf of the tree
    statics: tuple[Constant, ...]
    static_arguments: tuple[tuple[int | str, Constant], ...]
    numbers: tuple[int, ...] = ()  # the leaves of the tree that are Python numbers, traced or not

    @classmethod
    def of(
        cls, treedef: Any, leaves: Sequence[Any], statics: tuple[tuple[int | str, Constant], ...], constants: Any = ()
    ) -> Call:
        """The call with these leaves of its tree; numbers among `constants` are static."""
        if all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))):
            return cls(treedef, tuple(leaves), (True,) * len(leaves), (), statics)
        numbers = tuple(i for i, x in enumerate(leaves) if isinstance(x, NUMBERS) and not is_array(x))
        fixed = set(numbers).intersection(constants)
        traced = tuple(is_array(x) or (isinstance(x, NUMBERS) and i not in fixed) for i, x in enumerate(leaves))
        values = tuple(Constant(x) for x, t in zip(leaves, traced, strict=True) if not t)
        return cls(treedef, tuple(compress(leaves, traced)), traced, values, statics, numbers)

    def fixed(self, constants: Collection[int]) -> Call:
        """The same call, of whose numbers these are static and the others traced."""
        return Call.of(self.treedef, self.merged(self.leaves), self.static_arguments, constants)

    @property
    def arguments(self) -> list[Any]:
        """The structure of each argument that is not static, in the order of their leaves."""
        args, kwargs = self.treedef.children()
        return [*args.children(), *kwargs.children()]

    @property
    def inner_numbers(self) -> frozenset[int]:
        """The numbers that stand inside an argument; the others are an argument each."""
        bare, start = set(), 0
        for argument in self.arguments:
            if jax.tree_util.treedef_is_leaf(argument) and argument.num_leaves:  # None has none
                bare.add(start)
            start += argument.num_leaves
        return frozenset(self.numbers) - bare

    @property
    def structure(self) -> Any:
        """What a call is like, whatever its arrays and numbers."""
        places = (i for i, traced in enumerate(self.traced) if not traced)
        others = tuple(c for i, c in zip(places, self.statics, strict=True) if i not in self.numbers)
        return self.treedef, others, self.static_arguments

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
        args, kwargs = jax.tree.unflatten(self.treedef, self.merged(leaves))
        return self.with_static_arguments(args, kwargs)

    def merged(self, leaves: Sequence[Any]) -> list[Any]:
        """All leaves of the tree, with these in the arrays' places."""
        arrays, statics = iter(leaves), iter(self.statics)
        return [next(arrays) if traced else next(statics).value for traced in self.traced]

    def with_static_arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        jitted_argnums, jitted_argnames = compat.static_arguments(step)
        numbers = {_position(i, positional) for i in (*as_tuple(argnums, int), *jitted_argnums)}
        names = {*as_tuple(argnames, str), *jitted_argnames}
        numbers |= {positional.index(name) for name in names if name in positional}
        names |= {positional[i] for i in numbers if i < len(positional)}
        return cls(tuple(positional), frozenset(numbers), frozenset(names))

    def name(self, position: int) -> str:
        return self.names[position] if position < len(self.names) else f"argument {position}"

    def take_apart(self, args: Sequence[Any], kwargs: dict[str, Any], constants: Collection[int] = ()) -> Call:
        """The call with these arguments. `constants`: the leaves of their tree that are static if they are numbers."""
        statics, tree = self._without_static(args, kwargs)
        leaves, treedef = jax.tree.flatten(tree)
        return Call.of(treedef, leaves, statics, constants)

    def key_paths(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[KeyPath]:
        """Where each leaf of the arguments stands: asked of the arguments themselves, whose classes are not called."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._without_static(args, kwargs)[1])
        return [path for path, _ in leaves]

    def _without_static(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
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
        return tuple(statics), (tuple(dynamic), keywords)

    def describe(self, call: Call, key_paths: Sequence[KeyPath]) -> tuple[list[Argument], list[str]]:
        """The arguments of a call and the path of each array leaf, in the user's words."""
        positions = [i for i in range(call_length(call)) if i not in self.static_positions]
        arguments: list[Argument] = []
        texts: list[str] = []
        for path, traced in zip(key_paths, call.traced, strict=True):
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
    args, _ = call.treedef.children()
    return len(args.children()) + sum(isinstance(where, int) for where, _ in call.static_arguments)


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
