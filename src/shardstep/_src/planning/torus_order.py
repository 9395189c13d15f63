"""Torus axes take turns: along which one a tensor is scattered first.

A tensor is scattered along one axis of a torus after the other, and its first scatter carries most of its bytes. If
all tensors began with the same axis, the links of the others would have little to do. So tensors are given different
orders, balanced by the time that each axis is busy. What meets in the update must match: a weight, its
gradient and its moments are one family and take one order. So do the rows of a stack, which travel together to those
who own them.

An order is only given where it costs nothing: the blocks take as much memory as in the usual order and cut no more
tiles, and the tensor travels alone (small ones share collectives, for which they must make the same moves).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ..core.layout import PARTIAL, Array, Axis, Layout, Split
from ..core.moves import moves, priced_moves
from ..core.program import Program
from ..machine.links import Ring
from .placement import beginning_with
from .tied_leaves import families


def spread(
    program: Program,
    state: Mapping[int, int],
    weights: AbstractSet[int],
    resting: Sequence[Layout],
    axes: tuple[Axis, ...],
    rings: Sequence[Ring],
    least: int,
) -> dict[int, Layout]:
    """Another layout for some of the inputs: those of more than `least` bytes that rest split along several axes."""
    torus = [k for k, ring in enumerate(rings) if ring.link.torus and ring.hosts == 1 and ring.size > 1]
    if len(torus) < 2:
        return {}
    busy = [0.0] * len(axes)
    found: dict[int, Layout] = {}
    large = [f for f in families(program, state, stacks=True) if program.inputs[f[0]].array.nbytes > least]
    for family in sorted(large, key=lambda f: -program.inputs[f[0]].array.nbytes):  # a stable order, on every process
        array = program.inputs[family[0]].array
        split = [i for i in family if any(isinstance(p, Split) for p in resting[i])]
        layouts = {resting[i] for i in split}
        if len(layouts) != 1:
            continue
        (usual,) = layouts
        choices = [usual, *_orders(array, usual, axes, torus)]
        tensors = max(len(weights & set(family)), 1)
        loads = [_added(busy, tensors, array, layout, axes, rings) for layout in choices]
        best = min(range(len(choices)), key=lambda c: max(loads[c]))
        busy = loads[best]
        if best:
            found.update(dict.fromkeys(split, choices[best]))
    return found


def first_axis(shape: tuple[int, ...], layout: Layout, axes: tuple[Axis, ...]) -> int:
    """The axis along which a gradient is scattered into this layout first."""
    return next(moves(_summed(layout), layout, shape, axes)).axis


def _summed(layout: Layout) -> Layout:
    return tuple(PARTIAL if isinstance(p, Split) else p for p in layout)


def _added(
    busy: Sequence[float], tensors: int, array: Array, layout: Layout, axes: tuple[Axis, ...], rings: Sequence[Ring]
) -> list[float]:
    """Seconds that the links of each axis are busy, with the scatter of these further tensors.

    (Gathers take the same way back.)
    """
    seconds = list(busy)
    for move, sent in priced_moves(_summed(layout), layout, array, axes):
        seconds[move.axis] += tensors * sent / rings[move.axis].rate
    return seconds


def _orders(array: Array, usual: Layout, axes: tuple[Axis, ...], torus: Sequence[int]) -> list[Layout]:
    """The layouts in which another axis comes first, at no cost."""
    begun = first_axis(array.shape, usual, axes)
    others = (beginning_with(first, array.shape, usual, axes) for first in torus if first != begun)
    return [layout for layout in others if layout is not None and first_axis(array.shape, layout, axes) != begun]
