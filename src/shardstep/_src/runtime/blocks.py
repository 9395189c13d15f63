"""Where a replica's block of a value sits in the whole."""

from __future__ import annotations

from typing import Any

from jax import lax

from ..core.layout import Axis, Layout, Split, local_shape
from ..rules import Block


def block_of(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> Block:
    local = shape
    offsets: list[Any] = [0] * len(shape)
    for placement, axis in zip(layout, axes, strict=True):
        if isinstance(placement, Split):
            local = local_shape(local, placement, axis.size)
            offsets[placement.dim] = offsets[placement.dim] + lax.axis_index(axis.name) * local[placement.dim]
    return Block(shape, local, tuple(offsets))
