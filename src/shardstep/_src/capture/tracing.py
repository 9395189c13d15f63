"""Trace a step from the shapes of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import KeyPath

from ..core import meshes
from ..core.errors import ShardstepError
from . import one_each
from .arguments import NUMBERS, Argument, Call, Constant, abstract, is_array, shape_of


@dataclass(frozen=True, eq=False)
class Traced:
    jaxpr: Any
    out_tree: Any
    out_paths: tuple[KeyPath, ...]  # of all leaves
    out_shapes: tuple[Any, ...]  # of the array leaves
    out_constants: tuple[tuple[int, Constant], ...]

    @property
    def holds_objects(self) -> bool:
        """Does it return what is neither array nor number (functions and strings, as Equinox modules hold)?"""
        return any(not isinstance(c.value, NUMBERS) for _, c in self.out_constants)

    @property
    def out_leaves(self) -> list[Any]:
        """For each leaf of the result its constant, or the number of its array."""
        leaves: list[Any] = list(range(len(self.out_shapes)))
        for i, constant in self.out_constants:
            leaves.insert(i, constant)
        return leaves


class Shares(NamedTuple):
    """What is one replica's of the arguments of a per-replica step."""

    batch: Mapping[int, int] = {}  # leaf -> the dimension that holds the examples
    each: frozenset[int] = frozenset()  # leaves that hold one value for each replica

    def of(self, i: int, leaf: Any, replicas: int) -> jax.ShapeDtypeStruct:
        """One replica's share of a leaf."""
        aval, dim = abstract(leaf), 0 if i in self.each else self.batch.get(i)
        if dim is None:
            return aval
        shape = list(aval.shape)
        shape[dim] //= replicas
        return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


NOTHING_SHARED = Shares()

Keep = Callable[[int], bool]  # is a Python number returned as it is, if it stands at this leaf of the result?


def trace_guessing(
    step: Callable[..., Any],
    call: Call,
    arguments: Sequence[Argument],
    axis_name: str,
    replicas: int,
    each: frozenset[int],
    keep: Keep | None = None,
) -> Traced:
    """Trace a per-replica step whose batch is not known yet.

    Shapes of the state do not depend on the batch, so any batch size will do that the step can be traced with: a
    replica's share of the arguments that have one leading dimension in common, or the whole batch.
    """
    guesses: list[dict[int, int]] = [{}]
    for argument in arguments:
        if argument.start in each:
            continue
        shapes = [shape_of(call.leaves[i])[0] for i in range(argument.start, argument.stop)]
        sizes = {shape[0] for shape in shapes if shape}
        if len(sizes) == 1 and all(shapes) and not next(iter(sizes)) % replicas:
            mine = dict.fromkeys(range(argument.start, argument.stop), 0)
            guesses += [{**guess, **mine} for guess in guesses[:8]]
    for guess in guesses[1:]:
        try:
            return trace(step, call, axis_name, replicas, Shares(guess, each), keep=keep)
        except (TypeError, ValueError):
            continue
    return trace(step, call, axis_name, replicas, Shares(each=each), keep=keep)


def trace(
    step: Callable[..., Any],
    call: Call,
    axis_name: str | None = None,
    replicas: int = 1,
    shares: Shares = NOTHING_SHARED,
    mesh: Mesh | None = None,
    keep: Keep | None = None,
) -> Traced:
    """Trace a step; `mesh` is the user's, `keep` says which numbers are returned as numbers, not as arrays.

    Where shardings are types (Explicit axes), the step is read as ordinary code first. One that speaks of shardings
    itself (`reshard`, `out_sharding=`) cannot be, and is read as `jax.jit` would read it.
    """
    typed = meshes.explicit(mesh) if mesh is not None and axis_name is None else None
    if typed is None:
        return _trace(functools.partial(_flat, step, call, keep, shares.each), call, axis_name, replicas, shares)
    try:
        with meshes.within(meshes.auto(typed)):
            return _trace(functools.partial(_flat, step, call, keep, ()), call)
    except Exception as ordinary:
        try:
            with meshes.within(typed, always=True):
                return _trace(functools.partial(_flat, step, call, keep, ()), call, typed=typed)
        except Exception as error:
            if type(error) is type(ordinary):
                raise ordinary from None
            raise error from ordinary


def _flat(
    step: Callable[..., Any],
    call: Call,
    keep: Keep | None,
    each: Collection[int],
    found: dict[str, Any],
    leaves: Sequence[Any],
) -> list[Any]:
    """The arrays that the step returns for these; `found` gets what else it returns."""
    args, kwargs = call.rebuild(one_each.taken(leaves, each))
    with_paths, found["tree"] = jax.tree_util.tree_flatten_with_path(step(*args, **kwargs))
    found["paths"], out = tuple(path for path, _ in with_paths), [x for _, x in with_paths]
    out = one_each.given_back(call, each, found["tree"], out) if each else out
    objects = any(not is_array(x) and not isinstance(x, NUMBERS) for x in out)
    arrays = [
        is_array(x) or (isinstance(x, NUMBERS) and not (objects if keep is None else keep(i)))
        for i, x in enumerate(out)
    ]
    found["constants"] = tuple((i, Constant(x)) for i, (x, a) in enumerate(zip(out, arrays, strict=True)) if not a)
    return [x for x, a in zip(out, arrays, strict=True) if a]


def _trace(
    flat: Callable[[dict[str, Any], Sequence[Any]], list[Any]],
    call: Call,
    axis_name: str | None = None,
    replicas: int = 1,
    shares: Shares = NOTHING_SHARED,
    typed: AbstractMesh | None = None,
) -> Traced:
    found: dict[str, Any] = {}
    avals = [shares.of(i, leaf, replicas) for i, leaf in enumerate(call.leaves)]
    if typed is not None:
        avals = [_with_sharding(aval, leaf, typed) for aval, leaf in zip(avals, call.leaves, strict=True)]
    env = [(axis_name, replicas)] if axis_name is not None else None
    try:
        jaxpr, shapes = jax.make_jaxpr(lambda *leaves: flat(found, leaves), axis_env=env, return_shape=True)(*avals)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ShardstepError(
            f"the step uses a collective over an axis that is not bound ({error}). If it is a per-replica step, as for"
            " pmap or shard_map, give its axis: shardstep.shard(step, mesh, axis_name=...)."
        ) from error
    return Traced(jaxpr, found["tree"], found["paths"], tuple(shapes), found["constants"])


def _with_sharding(aval: jax.ShapeDtypeStruct, leaf: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    """With the argument's own sharding as its type, where it is on this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != mesh.axis_names:
        return aval
    sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
