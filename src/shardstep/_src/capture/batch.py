"""Which arguments hold the examples, and on which dimension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..core import compat
from ..core.errors import IndivisibleBatch, ShardstepError
from ..core.program import Program
from .arguments import Argument, Call, shape_of

_DRAW = compat.primitive("random_bits")


@dataclass(frozen=True)
class Batch:
    """How the user told which arguments hold the examples (all None: find out)."""

    argnums: tuple[int, ...] | None = None
    argnames: tuple[str, ...] | None = None
    axis: int | tuple[int | None, ...] = 0  # None: no examples, but one value for each replica

    @property
    def axes(self) -> tuple[int | None, ...]:
        return (self.axis,) if isinstance(self.axis, int) else self.axis

    @property
    def first(self) -> int:
        """The dimension of arguments that are not named."""
        return self.axes[0] or 0 if self.axes else 0

    @property
    def named(self) -> bool:
        return self.argnums is not None or self.argnames is not None

    @property
    def nothing(self) -> bool:
        """Did the user say that no argument holds examples? (`batch_argnums=()`)"""
        return self.named and not (self.argnums or self.argnames)


@dataclass(frozen=True)
class Unit:
    """Values that are examples together or not at all: the leaves of one argument that have one size, or the rows of
    what the step makes itself (`drawn`: random numbers and constants with so many rows)."""

    name: str
    inputs: tuple[tuple[int, int], ...] = ()  # leaf -> the dimension that would hold the examples
    drawn: int = 0

    def along(self, size: int, call: Call) -> Unit:
        """The same leaves, each split on dimension 1 if that has this size (time-major), else on 0 if that has it."""
        dims = ((i, shape_of(call.leaves[i])[0]) for i, _ in self.inputs)
        found = ((i, next((d for d in (1, 0) if d < len(s) and s[d] == size), -1)) for i, s in dims)
        return replace(self, inputs=tuple((i, dim) for i, dim in found if dim >= 0))


@dataclass(frozen=True)
class Examples:
    """Where the examples of a step are, or the choices that are left."""

    inputs: dict[int, int]  # input -> the dimension that holds the examples
    why: str
    units: tuple[Unit, ...] = ()  # what the planner may choose among, by cost; if empty, nothing is left to choose
    axis: int | None = None  # the dimension that the user gave; None: any
    drawn: tuple[int, ...] = ()  # the rows of what the step makes itself that count as examples
    note: str = ""  # what the plan says of the choice
    each: frozenset[int] = frozenset()  # of the inputs, those that hold one value for each replica


def named_batch(call: Call, arguments: Sequence[Argument], batch: Batch) -> dict[int, int] | None:
    """Input -> the dimension that holds the examples, where the user said so; None where it has to be inferred."""
    if not batch.named or batch.nothing:
        return None
    chosen, axes = _examples(arguments, batch)
    return _dimensions(call, chosen, axes) if chosen else None


def named_arguments(arguments: Sequence[Argument], batch: Batch) -> list[tuple[Argument, int | None]]:
    """What the user named, and the dimension that holds the examples; None: one value for each replica."""
    chosen = _named(arguments, batch)
    return list(zip(chosen, _axes_for(chosen, batch), strict=True))


def _examples(arguments: Sequence[Argument], batch: Batch) -> tuple[list[Argument], list[int]]:
    """The named arguments that hold examples, and on which dimension."""
    named = [(a, axis) for a, axis in named_arguments(arguments, batch) if axis is not None]
    return [a for a, _ in named], [axis for _, axis in named]


def _named(arguments: Sequence[Argument], batch: Batch) -> list[Argument]:
    chosen = []
    for i in batch.argnums or ():
        count = 1 + max((a.position for a in arguments if a.position is not None), default=-1)
        wanted = i + count if i < 0 else i
        found = [a for a in arguments if a.position == wanted]
        if not found:
            raise ShardstepError(f"batch_argnums={i}: the step was called with {count} positional arguments")
        chosen += found
    for name in batch.argnames or ():
        found = [a for a in arguments if a.name == name]
        if not found:
            listed = ", ".join(a.name for a in arguments)
            raise ShardstepError(f"batch_argnames={name!r}: no such argument; the step was called with {listed}")
        chosen += found
    return chosen


def _axes_for(chosen: Sequence[Argument], batch: Batch) -> list[int | None]:
    if isinstance(batch.axis, int):
        return [batch.axis] * len(chosen)
    if len(batch.axis) != len(chosen):
        raise ShardstepError(
            f"batch_axis has {len(batch.axis)} entries for {len(chosen)} batch arguments: give one for each"
        )
    return list(batch.axis)


def _dimensions(call: Call, chosen: Sequence[Argument], axes: Sequence[int]) -> dict[int, int]:
    """Split what has the examples' dimension; a scalar or a table among the leaves is replicated."""
    sized = _sized(call, chosen, axes)
    if not sized:
        names = ", ".join(a.name for a in chosen)
        raise ShardstepError(
            f"the batch ({names}) has no array with a dimension {axes[0] if axes else 0}: see batch_axis"
        )
    examples, _ = Counter(size for _, _, size in sized).most_common(1)[0]
    return {i: dim for i, dim, size in sized if size == examples}


def _sized(call: Call, chosen: Sequence[Argument], axes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The leaves that have the dimension: leaf, dimension, size."""
    return [
        (i, axis % len(shape), shape[axis])
        for argument, axis in zip(chosen, axes, strict=True)
        for i in range(argument.start, argument.stop)
        if -len(shape := shape_of(call.leaves[i])[0]) <= axis < len(shape)
    ]


def _placed_on(leaf: Any, data_axes: tuple[str, ...]) -> int | None:
    """The dimension that the user's own NamedSharding lays over the data axes."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    for dim, names in enumerate(sharding.spec):
        if set(names if isinstance(names, tuple) else (names,)) & set(data_axes):
            return dim
    return None


def find_examples(
    call: Call,
    arguments: Sequence[Argument],
    state: dict[int, int],
    program: Program,
    batch: Batch,
    data_axes: tuple[str, ...],
) -> Examples:
    """Where the examples of a step for the whole batch are: as the user says, as arrays are laid out, or to be chosen.

    The rewrite is right for every choice, so nothing is refused here: what is not told is left to the planner.
    """
    if batch.nothing:
        return Examples({}, "as asked", drawn_units(program), None)
    if batch.named:
        chosen, axes = _examples(arguments, batch)
        named = _dimensions(call, chosen, axes)
        sized = [found for found in _sized(call, chosen, axes) if found[2]]
        if len({size for _, _, size in sized}) <= 1:
            return Examples(named, "as asked")
        return Examples(named, "as asked", _units(call, chosen, sized), axes[0])
    placed = {
        i: dim
        for i, leaf in enumerate(call.leaves)
        if i not in state and (dim := _placed_on(leaf, data_axes)) is not None
    }
    if placed:
        return Examples(placed, "as their NamedSharding lays them out")
    axis = batch.first
    sized = _free(call, arguments, state, axis)
    drawn = drawn_units(program)
    if not any(size for _, _, size in sized):
        if sized and not drawn:
            return Examples({i: dim for i, dim, _ in sized}, "")
        # a bare array that comes back in its shape (a reconstruction, say) passes for state until a batch is missed
        bare = {a.start for a in arguments if a.stop - a.start == 1}
        kept = {i: o for i, o in state.items() if i not in bare}
        if any(shape_of(call.leaves[i])[0] for i in kept):
            sized = _free(call, arguments, kept, axis)
    units = _units(call, arguments, [found for found in sized if found[2]])
    return Examples({}, "", units + drawn, axis or None)


def _free(call: Call, arguments: Sequence[Argument], state: dict[int, int], axis: int) -> list[tuple[int, int, int]]:
    """The leaves that might be examples: they are neither state nor a key (an array of keys might be)."""
    sized = _sized(call, arguments, [axis] * len(arguments))
    return [(i, dim, size) for i, dim, size in sized if i not in state and not _is_raw_key(call.leaves[i])]


_MOST_UNITS = 8  # each is planned with and without


def _units(call: Call, arguments: Sequence[Argument], sized: Sequence[tuple[int, int, int]]) -> tuple[Unit, ...]:
    """The leaves of one argument and one size together; if there are too many sizes, those of one argument together."""
    owner = {i: a.name for a in arguments for i in range(a.start, a.stop)}
    for by_size in (True, False):
        found: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for i, dim, size in sized:
            found.setdefault((owner[i], size if by_size else 0), []).append((i, dim))
        if len(found) <= _MOST_UNITS:
            break
    units = [Unit(f"{name} ({size} rows)" if size else name, tuple(where)) for (name, size), where in found.items()]
    largest = sorted(units, key=lambda u: -sum(np.prod(shape_of(call.leaves[i])[0]) for i, _ in u.inputs))
    return tuple(u for u in units if u in largest[:_MOST_UNITS])


def drawn_units(program: Program) -> tuple[Unit, ...]:
    """Random numbers that the step draws, by their rows, and constants that have as many; those with most elements."""
    elements = Counter[int]()
    for equation in program.walk():
        if equation.primitive is _DRAW and equation.outputs[0].array.ndim:
            elements[equation.outputs[0].array.shape[0]] += equation.outputs[0].array.size
    if not elements:
        for var, _ in program.constants:
            if var.array.ndim:
                elements[var.array.shape[0]] += var.array.size
    rows = [size for size, _ in elements.most_common(2) if size > 1]
    return tuple(Unit(f"what the step draws ({size} rows)", drawn=size) for size in rows)


def infer_batch(
    call: Call,
    arguments: Sequence[Argument],
    state: AbstractSet[int],
    each: AbstractSet[int],
    batch: Batch,
    data_axes: tuple[str, ...],
) -> dict[int, int]:
    """The batch of a per-replica step, which must be certain: it says what a replica computes.

    `each`: what holds one value for each replica is no batch.
    """
    placed = {
        i: dim
        for i, leaf in enumerate(call.leaves)
        if i not in state | each and (dim := _placed_on(leaf, data_axes)) is not None
    }
    if placed:
        return placed
    candidates = _candidates(call, arguments, state | each, batch)
    if not candidates:
        # a bare array that comes back in its shape (a reconstruction, say) passes for state until a batch is missed
        bare = {a.start for a in arguments if a.stop - a.start == 1}
        candidates = _candidates(call, arguments, (state - bare) | each, batch)
    sizes = {size for sized in candidates.values() for _, size in sized.values()}
    if len(sizes) == 1:
        return {i: dim for sized in candidates.values() for i, (dim, _) in sized.items()}
    raise ShardstepError(_no_batch(arguments) if not candidates else _ambiguous(candidates))


def _candidates(
    call: Call, arguments: Sequence[Argument], state: AbstractSet[int], batch: Batch
) -> dict[str, dict[int, tuple[int, int]]]:
    """Argument -> its leaves -> (dimension, size) of what may be the examples."""
    axis = batch.first
    found = {}
    for argument in arguments:
        leaves = range(argument.start, argument.stop)
        if any(i in state or is_key(call.leaves[i]) for i in leaves):
            continue
        shapes = {i: shape_of(call.leaves[i])[0] for i in leaves}
        sized = {i: (axis % len(s), s[axis]) for i, s in shapes.items() if -len(s) <= axis < len(s)}
        if sized:
            found[argument.name] = sized
    return found


def _no_batch(arguments: Sequence[Argument]) -> str:
    names = ", ".join(a.name for a in arguments)
    return (
        f"no batch found: every argument ({names}) is state, a key or a scalar. Name the batch:"
        " shardstep.shard(step, mesh, batch_argnums=...) or batch_argnames=..."
    )


def _ambiguous(candidates: dict[str, dict[int, tuple[int, int]]]) -> str:
    listed = []
    for name, sized in candidates.items():
        sizes = sorted({size for _, size in sized.values()})
        listed.append(f"{name} has leading dimension{'s' if len(sizes) > 1 else ''} {', '.join(map(str, sizes))}")
    return (
        f"the batch is ambiguous: {'; '.join(listed)}. Name it, e.g. shardstep.shard(step, mesh,"
        f" batch_argnames={next(iter(candidates))!r}), or by batch_argnums=...; what is not named is replicated."
        " What holds one value for each replica, as under pmap, is named with batch_axis=None."
    )


def is_key(leaf: Any) -> bool:
    """A PRNG key, typed or raw (uint32 with two or four words)."""
    _, dtype = shape_of(leaf)
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or _is_raw_key(leaf)


def _is_raw_key(leaf: Any) -> bool:
    shape, dtype = shape_of(leaf)
    return dtype == np.uint32 and shape in ((2,), (4,))


def check_not_empty(call: Call, paths: Sequence[str], examples: dict[int, int]) -> None:
    for i, dim in examples.items():
        if not shape_of(call.leaves[i])[0][dim]:
            raise ShardstepError(f"the batch is empty: {paths[i]} has no examples on dimension {dim}")


def check_divisible(call: Call, paths: Sequence[str], examples: dict[int, int], replicas: int) -> None:
    """A per-replica step speaks of one replica's share: shares of different sizes would be different programs."""
    for i, dim in examples.items():
        size = shape_of(call.leaves[i])[0][dim]
        if size % replicas:
            raise IndivisibleBatch(
                examples,
                f"the batch does not divide: {paths[i]} has {size} examples on dimension {dim}, and {replicas} replicas"
                f" share them. Use a multiple of {replicas} (e.g. {max(size // replicas, 1) * replicas}), or a mesh of"
                " fewer devices.",
            )
