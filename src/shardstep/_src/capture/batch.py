"""Which arguments hold the examples, and on which dimension."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..core.errors import IndivisibleBatch, ShardstepError
from .arguments import Argument, Call, shape_of


@dataclass(frozen=True)
class Batch:
    """How the user told which arguments hold the examples (all None: find out)."""

    argnums: tuple[int, ...] | None = None
    argnames: tuple[str, ...] | None = None
    axis: int | tuple[int, ...] = 0

    @property
    def named(self) -> bool:
        return self.argnums is not None or self.argnames is not None


def named_batch(call: Call, arguments: Sequence[Argument], batch: Batch) -> dict[int, int] | None:
    """Input -> the dimension that holds the examples, where the user said so; None where it has to be inferred."""
    if not batch.named:
        return None
    chosen = _named(arguments, batch)
    return _dimensions(call, chosen, _axes_for(chosen, batch))


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


def _axes_for(chosen: Sequence[Argument], batch: Batch) -> list[int]:
    if isinstance(batch.axis, int):
        return [batch.axis] * len(chosen)
    if len(batch.axis) != len(chosen):
        raise ShardstepError(
            f"batch_axis has {len(batch.axis)} entries for {len(chosen)} batch arguments: give one for each"
        )
    return list(batch.axis)


def _dimensions(call: Call, chosen: Sequence[Argument], axes: Sequence[int]) -> dict[int, int]:
    """Split what has the examples' dimension; a scalar or a table among the leaves is replicated."""
    sized = [
        (i, axis % len(shape), shape[axis])
        for argument, axis in zip(chosen, axes, strict=True)
        for i in range(argument.start, argument.stop)
        if -len(shape := shape_of(call.leaves[i])[0]) <= axis < len(shape)
    ]
    if not sized:
        names = ", ".join(a.name for a in chosen)
        raise ShardstepError(
            f"the batch ({names}) has no array with a dimension {axes[0] if axes else 0}: see batch_axis"
        )
    examples, _ = Counter(size for _, _, size in sized).most_common(1)[0]
    return {i: dim for i, dim, size in sized if size == examples}


def _placed_on(leaf: Any, data_axes: tuple[str, ...]) -> int | None:
    """The dimension that the user's own NamedSharding lays over the data axes."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    for dim, names in enumerate(sharding.spec):
        if set(names if isinstance(names, tuple) else (names,)) & set(data_axes):
            return dim
    return None


def infer_batch(
    call: Call, arguments: Sequence[Argument], state: dict[int, int], batch: Batch, data_axes: tuple[str, ...]
) -> dict[int, int]:
    """Find the batch among the arguments that are not state: as they are laid out, or by their leading dimension."""
    placed = {
        i: dim
        for i, leaf in enumerate(call.leaves)
        if i not in state and (dim := _placed_on(leaf, data_axes)) is not None
    }
    if placed:
        return placed
    candidates = _candidates(call, arguments, set(state), batch)
    if not candidates:
        # a bare array that comes back in its shape (a reconstruction, say) passes for state until a batch is missed
        bare = {a.start for a in arguments if a.stop - a.start == 1}
        candidates = _candidates(call, arguments, set(state) - bare, batch)
    sizes = {size for sized in candidates.values() for _, size in sized.values()}
    if len(sizes) == 1:
        return {i: dim for sized in candidates.values() for i, (dim, _) in sized.items()}
    raise ShardstepError(_no_batch(arguments) if not candidates else _ambiguous(candidates))


def _candidates(
    call: Call, arguments: Sequence[Argument], state: set[int], batch: Batch
) -> dict[str, dict[int, tuple[int, int]]]:
    """Argument -> its leaves -> (dimension, size) of what may be the examples."""
    axis = batch.axis if isinstance(batch.axis, int) else batch.axis[0]
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
    )


def is_key(leaf: Any) -> bool:
    """A PRNG key, typed or raw (uint32 with two or four words)."""
    shape, dtype = shape_of(leaf)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
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
