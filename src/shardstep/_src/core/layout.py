"""What a replica holds of a value.

A *layout* is one placement for each data axis of the mesh. Placements are plain frozen data: rules
compute with them, the planner prints them, and only `runtime/collectives.py` turns a change of placement into
communication.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .backend import Backend


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every replica along the axis holds all of it."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Split:
    """Each replica along the axis holds one block of dimension `dim`.

    With `outer > 1` the dimension is read as `(outer, rest)` and `rest` is what is split: this is how a batch survives
    `(T, B) -> (T*B)`. `permuted`: the blocks hold the examples in another order, which is only given to readers that do
    not mind (see `propagation/microbatches.py`). `batch` records that the split comes from the examples, not from the
    state, and so who yields when the two meet. Equality asks for the blocks alone; what is remembered by placements is
    remembered by their `origins`, too.

    A dimension that the replicas do not divide is padded to `extent` elements before it is cut. The contents of the
    padding are undefined: elementwise rules compute with it, and rules that mix elements fill it first. Where
    several axes split one dimension, the outermost carries the extent, and the others divide what it leaves.
    """

    dim: int
    outer: int = 1
    batch: bool = field(default=False, compare=False)
    permuted: bool = False
    extent: int = 0  # 0: the dimension divides as it is

    def on(self, dim: int, outer: int = 1) -> Split:
        """The same split, carried to another dimension."""
        return Split(dim, outer, self.batch, extent=self.extent)

    def __str__(self) -> str:
        outer = f", outer={self.outer}" if self.outer > 1 else ""
        padded = f", padded to {self.extent}" if self.extent else ""
        return f"split({self.dim}{outer}{padded})"


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
    backend: Backend = Backend()

    @property
    def name(self) -> str | tuple[str, ...]:
        """As JAX's collectives take it."""
        return self.names if len(self.names) > 1 else self.names[0]


def joined(axes: tuple[Axis, ...]) -> Axis:
    """All of these axes as one."""
    if len(axes) == 1:
        return axes[0]
    return Axis(tuple(n for a in axes for n in a.names), math.prod(a.size for a in axes), axes[0].backend)


def is_batch(placement: Placement) -> bool:
    """Does this placement carry the examples themselves (not yet reduced over them)?"""
    return isinstance(placement, Varying) or (isinstance(placement, Split) and placement.batch)


def origins(*held: Any) -> tuple[bool, ...]:
    """Of each split in these values, however deep inside tuples and dataclasses: does it carry the examples?"""
    found, seen = [], list(held)
    for value in seen:  # and for what is added meanwhile
        kind: Any = type(value)
        if kind is tuple:
            seen += value
        elif kind is Split:
            found.append(value.batch)
        elif names := _compared(kind):
            seen += [getattr(value, name) for name in names]
    return tuple(found)


@functools.cache
def _compared(kind: type) -> tuple[str, ...]:
    """The fields by which values of this type are compared; none if that is by identity."""
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        return tuple(f.name for f in dataclasses.fields(kind) if f.compare)
    return getattr(kind, "_fields", ())  # of a named tuple


def divides(shape: tuple[int, ...], split: Split, n: int) -> bool:
    """Can `split` cut this shape into n equal blocks?"""
    if split.dim >= len(shape) or shape[split.dim] <= 0:
        return False
    if split.extent:
        return split.outer == 1 and split.extent >= shape[split.dim] and split.extent % n == 0
    return shape[split.dim] % (split.outer * n) == 0


def cut(shape: tuple[int, ...], dim: int, n: int, batch: bool = False) -> Split:
    """The split of one dimension in n, padded where n does not divide it."""
    size = shape[dim]
    return Split(dim, batch=batch, extent=0 if size and size % n == 0 else -(-size // n) * n)


def is_padded(placement: Placement) -> bool:
    return isinstance(placement, Split) and placement.extent > 0


def local_shape(shape: tuple[int, ...], placement: Placement, n: int) -> tuple[int, ...]:
    """The shape of one replica's block."""
    if not isinstance(placement, Split):
        return shape
    assert divides(shape, placement, n), f"{placement} does not divide {shape} by {n}"
    return resized(shape, placement.dim, (placement.extent or shape[placement.dim]) // n)


def resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return shape[:dim] + (size,) + shape[dim + 1 :]


def padded_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape with its padding: that of the array which holds such a value at rest."""
    for placement in layout:
        if isinstance(placement, Split) and placement.extent:
            shape = resized(shape, placement.dim, placement.extent)
    return shape


def nested(layout: Layout) -> bool:
    """Is a dimension that several axes split padded by the outermost of them alone?"""
    split: set[int] = set()
    for placement in layout:
        if isinstance(placement, Split):
            if placement.extent and placement.dim in split:
                return False
            split.add(placement.dim)
    return True


def block_shape(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """The shape of one replica's block under a whole layout."""
    assert nested(layout), f"{show(layout)} pads a block of a dimension that is split already"
    for placement, axis in zip(layout, axes, strict=True):
        shape = local_shape(shape, placement, axis.size)
    return shape


def fits(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> bool:
    """Do all axes together cut this shape into equal blocks?"""
    if not nested(layout):
        return False
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            if not divides(shape, placement, axis.size):
                return False
            shape = local_shape(shape, placement, axis.size)
    return True


def whole(axes: tuple[Axis, ...]) -> Layout:
    """The layout of a value that every replica holds all of."""
    return (REPLICATED,) * len(axes)


def put(layout: Layout, k: int, placement: Placement) -> Layout:
    """The layout with another placement along axis k."""
    return (*layout[:k], placement, *layout[k + 1 :])


def partition_spec(ndim: int, layout: Layout, axes: tuple[Axis, ...]) -> PartitionSpec:
    """The layout as a PartitionSpec (several axes on one dimension nest in mesh order)."""
    names: list[list[str]] = [[] for _ in range(ndim)]
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            assert placement.outer == 1, "no leaf has an outer split at rest"
            names[placement.dim].extend(axis.names)
    while names and not names[-1]:
        names.pop()
    return PartitionSpec(*(None if not n else n[0] if len(n) == 1 else tuple(n) for n in names))


def describe(array: Array) -> str:
    """`f32[128,512]`, as jaxprs print it."""
    dtype = re.sub(r"^(b?f|u?i|c)(?:loat|nt|omplex)(?=\d)", r"\1", str(array.dtype)).replace("ui", "u")
    return f"{dtype}[{','.join(map(str, array.shape))}]"


def show(layout: Layout) -> str:
    """`split(0)` on one axis, `split(0) x replicated` on two."""
    return " x ".join(str(p) for p in layout)
