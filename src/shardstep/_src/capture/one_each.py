"""Values of which each replica has one of its own, in steps that are written for one replica.

`pmap` passes an array with a leading dimension for the devices and gives each its own entry: a dropout key per device,
a scalar per device. They are found where they are keys, and said by `batch_axis=None` where they are not. On the way in
they are cut as examples are, one each, and the step is traced without that dimension; what it returns in their place
gets it back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core.errors import ShardstepError
from .arguments import Argument, Call, shape_of
from .batch import Batch, is_key, named_arguments


def found_in(call: Call, arguments: Sequence[Argument], paths: Sequence[str], batch: Batch, n: int) -> frozenset[int]:
    """The leaves of the arguments that the user gives each replica one of, and those that are as many keys."""
    said = {a.name for a, axis in named_arguments(arguments, batch) if axis is None}
    found = set()
    for argument in arguments:
        leaves = range(argument.start, argument.stop)
        if argument.name in said:
            for i in leaves:
                shape = shape_of(call.leaves[i])[0]
                if shape[:1] != (n,):
                    raise ShardstepError(
                        f"batch_axis=None: {paths[i]} is to hold one value for each of {n} replicas, but its shape is"
                        f" {shape}"
                    )
            found |= set(leaves)
        elif leaves and all(_are_keys(call.leaves[i], n) for i in leaves):
            found |= set(leaves)
    return frozenset(found)


def asked_for(arguments: Sequence[Argument], batch: Batch) -> bool:
    return any(axis is None for _, axis in named_arguments(arguments, batch))


def _are_keys(leaf: Any, n: int) -> bool:
    """One key for each of n replicas, typed or raw?"""
    shape, dtype = shape_of(leaf)
    return shape[:1] == (n,) and is_key(jax.ShapeDtypeStruct(shape[1:], dtype)) and len(shape) < 3


def held_by_one(leaf: Any) -> jax.ShapeDtypeStruct:
    """A replica's own entry, as it is cut."""
    shape, dtype = shape_of(leaf)
    return jax.ShapeDtypeStruct((1, *shape[1:]), dtype)


def taken(leaves: Sequence[jax.Array], each: Collection[int]) -> list[jax.Array]:
    """The arguments as the step sees them."""
    return [lax.squeeze(x, (0,)) if i in each else x for i, x in enumerate(leaves)]


def given_back(call: Call, each: Collection[int], tree: Any, leaves: Sequence[Any]) -> list[Any]:
    """What the step returns, with a leading dimension on what takes the place of such arguments.

    That is a part of the result, or all of it, that has the structure, shapes and dtypes of an argument.
    """
    result, waiting = list(leaves), _arguments(call, each)
    parts, start = [tree] if tree in [t for t, _ in waiting] else tree.children(), 0
    for part in parts:
        stop = start + part.num_leaves
        kind = part, tuple(map(_kind, leaves[start:stop]))
        if kind in waiting:
            waiting.remove(kind)
            result[start:stop] = [jnp.asarray(x)[None] for x in leaves[start:stop]]
        start = stop
    return result


def _arguments(call: Call, each: Collection[int]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The structure and kinds of the arguments that hold nothing else, as the step sees them.

    But not of a single number: it may look like the loss, and where replicas differ, it comes back as a row anyway.
    """
    found, array, start = [], 0, 0
    for tree in call.arguments:
        traced = call.traced[start : start + tree.num_leaves]
        mine = range(array, array + sum(traced))
        if mine and all(traced) and all(i in each for i in mine):
            kinds = tuple((shape[1:], dtype) for shape, dtype in (shape_of(call.leaves[i]) for i in mine))
            if len(kinds) > 1 or kinds[0][0] or is_key(call.leaves[mine[0]]):
                found.append((tree, kinds))
        array, start = mine.stop, start + tree.num_leaves
    return found


def _kind(x: Any) -> Any:
    return shape_of(x) if hasattr(x, "shape") else None
