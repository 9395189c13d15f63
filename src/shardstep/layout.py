"""What a replica holds of a value.

A *layout* is one placement for each data axis of the mesh. Placements are plain frozen data: rules
compute with them, the planner prints them, and only `collectives.py` turns a change of placement into
communication.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every replica along the axis holds all of it."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Split:
    """Each replica along the axis holds one block of dimension `dim`.

    With `outer > 1` the dimension is read as `(outer, rest)` and `rest` is what is split: this is how a batch survives
    `(T, B) -> (T*B)`. `dealt`: the blocks hold the examples in another order, which is only given to readers that do
    not mind (see `rules/microbatches.py`). `batch` records that the split comes from the examples, not from the state;
    it never makes two placements differ, it only says who yields when the two meet.
    """

    dim: int
    outer: int = 1
    batch: bool = field(default=False, compare=False)
    dealt: bool = False

    def on(self, dim: int, outer: int = 1) -> Split:
        """The same split, carried to another dimension."""
        return Split(dim, outer, self.batch)

    def __str__(self) -> str:
        return f"split({self.dim})" if self.outer == 1 else f"split({self.dim}, outer={self.outer})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each replica along the axis holds a term; the value is their sum (or max, min)."""

    op: str = "add"

    def __str__(self) -> str:
        return f"partial({self.op})"


@dataclass(frozen=True, slots=True)
class Varying:
    """Each replica along the axis holds a value of its own (per-replica steps only)."""

    def __str__(self) -> str:
        return "varying"


Placement = Replicated | Split | Partial | Varying
Layout = tuple[Placement, ...]

REPLICATED = Replicated()
PARTIAL = Partial()
VARYING = Varying()


class Array(NamedTuple):
    """The shape and dtype of a value; no data."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * getattr(self.dtype, "itemsize", 4)


class Axis(NamedTuple):
    """A data axis: one axis of the mesh, or several that act as one."""

    names: tuple[str, ...]
    size: int
    widens: bool = False  # are sums of 16-bit floats formed in float32, as XLA's own all-reduce does on CPU?

    @property
    def name(self) -> str | tuple[str, ...]:
        """As JAX's collectives take it."""
        return self.names if len(self.names) > 1 else self.names[0]


def is_batch(placement: Placement) -> bool:
    """Does this placement carry the examples themselves (not yet reduced over them)?"""
    return isinstance(placement, Varying) or (isinstance(placement, Split) and placement.batch)


def divides(shape: tuple[int, ...], split: Split, n: int) -> bool:
    """Can `split` cut this shape into n equal blocks?"""
    return split.dim < len(shape) and shape[split.dim] > 0 and shape[split.dim] % (split.outer * n) == 0


def local_shape(shape: tuple[int, ...], placement: Placement, n: int) -> tuple[int, ...]:
    """The shape of one replica's block."""
    if not isinstance(placement, Split):
        return shape
    assert divides(shape, placement, n), f"{placement} does not divide {shape} by {n}"
    return shape[: placement.dim] + (shape[placement.dim] // n,) + shape[placement.dim + 1 :]


def block_shape(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """The shape of one replica's block under a whole layout."""
    for placement, axis in zip(layout, axes, strict=True):
        shape = local_shape(shape, placement, axis.size)
    return shape


def fits(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> bool:
    """Do all axes together cut this shape into equal blocks?"""
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            if not divides(shape, placement, axis.size):
                return False
            shape = local_shape(shape, placement, axis.size)
    return True


def put(layout: Layout, k: int, placement: Placement) -> Layout:
    """The layout with another placement along axis k."""
    return (*layout[:k], placement, *layout[k + 1 :])


def partition_spec(ndim: int, layout: Layout, axes: tuple[Axis, ...]) -> PartitionSpec:
    """The layout as a PartitionSpec (several axes on one dimension nest in mesh order)."""
    names: list[list[str]] = [[] for _ in range(ndim)]
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            assert placement.outer == 1, "an outer split never rests between steps"
            names[placement.dim].extend(axis.names)
    while names and not names[-1]:
        names.pop()
    return PartitionSpec(*(None if not n else n[0] if len(n) == 1 else tuple(n) for n in names))


def show(layout: Layout) -> str:
    """`split(0)` on one axis, `split(0) x replicated` on two."""
    return " x ".join(str(p) for p in layout)
