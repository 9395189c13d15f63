"""Flax NNX: steps that mutate their arguments.

    @shardstep.nnx.shard(mesh=mesh)          # instead of @nnx.jit
    def train_step(model, optimizer, metrics, batch): ...

The step is made pure the way `nnx.jit` does it: objects are split into structure and arrays, the arrays go through
`shardstep.shard` as state, and what comes back is merged into the caller's own objects. Attributes that the step adds,
removes or shares come back too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ._src import api
from ._src.planning.plan import Plan
from ._src.runtime.bound import BoundStep

_TAG = "shardstep"


def shard(step: Callable[..., Any] | None = None, mesh: Mesh | None = None, **options: Any) -> Any:
    """`shardstep.shard` for a step whose arguments are NNX objects. Takes its arguments; use it in place of `nnx.jit`.

    As a decorator with arguments, `@shardstep.nnx.shard(mesh=mesh)`, or as a plain call.
    """
    if step is None:
        return functools.partial(shard, mesh=mesh, **options)
    return NnxStep(step, mesh, options)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("state",), meta_fields=("index",))
class _Object:
    """An object in a pure pytree: its arrays, and which of the objects it is."""

    def __init__(self, index: int, state: Any = None):
        self.index = index
        self.state = state


class NnxStep:
    """A step on NNX objects whose weight update is sharded. Called like the step itself; the objects are updated."""

    def __init__(self, step: Callable[..., Any], mesh: Mesh | None, options: dict[str, Any]):
        functools.update_wrapper(self, step, updated=())
        self.step = step
        self._mesh = mesh
        self._options = options
        self._sharded: dict[Any, api.ShardedStep] = {}  # by the structure of the objects

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(_TAG):
            sharded, args, kwargs = self._pure(args, kwargs)
            structure, states, added, out = sharded(*args, **kwargs)
            with nnx.merge_context(_TAG, inner=False) as context:
                objects = context.merge(structure, _joined(x.state for x in states), added)
        return _put_back(out, objects)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """As a method: the object is the first argument."""
        return self if owner is None else BoundStep(self, owner)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What would be done for these arguments; nothing is run."""
        with nnx.update_context(_TAG):
            sharded, args, kwargs = self._pure(args, kwargs)
            plan = sharded.plan(*args, **kwargs)
        return NnxPlan(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The rewritten step, lowered for arguments of these shapes."""
        with nnx.update_context(_TAG):
            sharded, args, kwargs = self._pure(args, kwargs)
            return sharded.lower(*args, **kwargs)

    def _pure(self, args: Any, kwargs: Any) -> tuple[api.ShardedStep, tuple[Any, ...], dict[str, Any]]:
        """The pure step for objects of this structure, and the arguments for it."""
        (args, kwargs), objects = _take_out((args, kwargs))
        with nnx.split_context(_TAG) as context:
            structure, state = context.split(objects)
        sharded = self._sharded.get(structure)
        if sharded is None:
            pure = _pure_step(self.step, structure)
            sharded = self._sharded[structure] = api.shard(pure, self._mesh, **self._options)
        args, kwargs = _with_states((args, kwargs), _apart(state, len(objects)))
        return sharded, args, kwargs


class NnxPlan(Plan):
    """A plan whose `init` creates NNX objects: the step's object arguments, in their order."""

    def init(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found: dict[str, Any] = {}

        def pure(*args: Any, **kwargs: Any) -> Any:
            tree, objects = _take_out(create_state(*args, **kwargs))
            found["structure"], state = nnx.split(objects)
            return _with_states(tree, _apart(state, len(objects)))

        born = super().init(pure, *args, **kwargs)
        marked = [x for x in jax.tree.leaves(born, is_leaf=_is_marker) if _is_marker(x)]
        return _put_back(born, nnx.merge(found["structure"], _joined(x.state for x in marked)))


def _pure_step(step: Callable[..., Any], structure: Any) -> Callable[..., Any]:
    def pure(*args: Any, **kwargs: Any) -> Any:
        marked = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_marker) if _is_marker(x)]
        before = _joined(x.state for x in sorted(marked, key=lambda x: x.index))
        with nnx.merge_context(_TAG, inner=True) as context:
            objects = context.merge(structure, before)
        out = step(*_put_back(args, objects), **_put_back(kwargs, objects))
        out, returned = _take_out(out, known=objects)
        with nnx.split_context(_TAG) as context:
            after, state = context.split(returned)
        kept, added = _compared(state, before)
        states = [_Object(i, s) for i, s in enumerate(_apart(kept, len(returned)))]
        return after, states, added, out  # the structure has no leaves: it comes back as part of the pytree

    pure.__name__ = getattr(step, "__name__", "step")
    pure.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    return pure


# -- pytrees with objects in them --------------------------------------------------------------------------------------


def _is_object(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x)


def _is_marker(x: Any) -> bool:
    return isinstance(x, _Object)


def _take_out(tree: Any, known: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """The tree with a marker for each object in it, and the objects (after those already known)."""
    objects = list(known)

    def mark(x: Any) -> Any:
        if not _is_object(x):
            return x
        objects.append(x)
        return _Object(len(objects) - 1)

    return jax.tree.map(mark, tree, is_leaf=_is_object), objects


def _with_states(tree: Any, states: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: _Object(x.index, states[x.index]) if _is_marker(x) else x, tree, is_leaf=_is_marker)


def _put_back(tree: Any, objects: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: objects[x.index] if _is_marker(x) else x, tree, is_leaf=_is_marker)


def _apart(state: Any, count: int) -> list[Any]:
    """One state per object. What objects share belongs to the first of them, so a state may be empty."""
    return [state[i] if i in state else nnx.State({}) for i in range(count)]


def _joined(states: Iterable[Any]) -> Any:
    return nnx.State({i: state for i, state in enumerate(states) if not _is_empty(state)})


def _compared(state: Any, before: Any) -> tuple[Any, Any]:
    """What was there before the step, and what the step added: only the first is state that goes in again."""
    paths = {path for path, _ in nnx.to_flat_state(before)}
    now = nnx.to_flat_state(state)
    kept = nnx.from_flat_state([(path, x) for path, x in now if path in paths])
    return kept, nnx.from_flat_state([(path, x) for path, x in now if path not in paths])


def _is_empty(state: Any) -> bool:
    return isinstance(state, nnx.State) and not state
