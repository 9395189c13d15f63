"""How state is laid out at rest: between steps, each replica keeps whole leaves or blocks of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..capture.step import Captured
from ..core.errors import ShardstepError
from ..core.layout import Array, Layout, Split, is_padded, whole
from ..core.options import Options
from ..core.schedule import Schedule
from ..core.user_shardings import Kept, show_kept
from ..machine.replicas import Replicas
from .placement import split_layout
from .summed_whole import Summed, left_whole
from .torus_order import first_axis, spread


def choose_weights(weights: str, options: Options, platform: str) -> tuple[str, str]:
    """How weights are kept at rest, and why. Where that is open: what suits the platform (see `weights.py`)."""
    if options.gather_dtype is not None and weights != "sharded":
        if weights == "replicated":
            raise ShardstepError(
                f"gather_dtype={options.gather_dtype.name} with weights='replicated': weights that are whole at rest"
                " would be rounded at every step. Give weights='sharded': they keep their dtype, and the forward pass"
                " reads them rounded."
            )
        return "sharded", f"gather_dtype={options.gather_dtype.name}: they keep their dtype and are rounded on the way"
    if options.wire is not None and weights == "auto":
        return "sharded", f"wire={options.wire!r}: they keep their dtype and are rounded on the way"
    return _AUTO[platform] if weights == "auto" else (weights, "as asked")


# What "auto" means where both ways are predicted to take about as long: measured, see docs/decisions/001.
_AUTO = {
    "cpu": ("replicated", "on CPU: evaluation expects whole weights"),
    "gpu": ("sharded", "on GPU: less memory, and measured as fast or faster"),
    "tpu": ("sharded", "on TPU: less memory and fewer estimated cycles"),
}


_LEAST_BYTES = 16 * 1024  # smaller leaves are not worth a message on any machine
_LEFT_WHOLE = 0.002  # the share of the optimizer's bytes that may stay on every replica for the sake of speed


def small_bytes(captured: Captured, roles: Sequence[str], replicas: Replicas, options: Options) -> int:
    """The size below which a leaf rests replicated.

    By cost that is where the saved update takes as long as a message. But memory comes first: of the leaves between
    `_LEAST_BYTES` and there, only as many stay whole as hold a negligible share of the optimizer's bytes.
    """
    if options.min_shard_bytes is not None:
        return options.min_shard_bytes
    state = zip(captured.program.inputs, roles, strict=True)
    sizes = Counter(var.array.nbytes for var, role in state if role == "auxiliary")
    limit = _LEAST_BYTES
    left = _LEFT_WHOLE * sum(size * count for size, count in sizes.items())
    for size, count in sorted(sizes.items()):
        if size < _LEAST_BYTES:
            continue
        left -= size * count
        if left < 0 or size >= replicas.topology.break_even_bytes:
            break
        limit = size + 1
    return limit


WHY_WHOLE = "a weight: every replica reads it whole"
_WHY_SPLIT = "optimizer state: only the update uses it, so each replica keeps 1/N"
_SUMMED = "whole along an axis where blocks would end inside of a tile: gradients are summed there, not scattered"
_SLICED_ROOM = 1.1  # how much larger padding may make a leaf, so that the layers that a loop reads stay in one piece
ROOM = 1.5  # what padding makes larger than this, and more costly to send than it was, is not worth sharding


@dataclass(frozen=True)
class Policy:
    """Which leaves are whole at rest, of those that could be split."""

    weights: str  # "replicated": all weights, "sharded": none for being a weight
    small: int  # leaves of fewer bytes
    room: float = math.inf  # leaves that padding would enlarge by more than this factor
    visits: bool = False  # and may examples go to weights, instead of weights to examples?
    summed: Summed = frozenset()  # leaves that rest whole along an axis, since their gradients are summed there anyway


def pads_state(captured: Captured, decided: Schedule) -> bool:
    return any(is_padded(p) for i in captured.state for p in decided.inputs[i])


@dataclass(frozen=True)
class Taken:
    """The dimensions of a leaf that others have a use for."""

    kept: Kept = ()  # the dimensions that are split over the user's own axes: never split by us
    sliced: AbstractSet[int] = frozenset()  # a loop takes slices along them: not split if there is another one

    @property
    def why(self) -> str:
        return (
            f"a loop takes slices along dimension {' and '.join(map(str, sorted(self.sliced)))}: another one is split"
        )


NOTHING_TAKEN = Taken()


def layout_at_rest(
    array: Array, role: str, replicas: Replicas, policy: Policy, taken: Taken = NOTHING_TAKEN
) -> tuple[Layout, str]:
    """How a leaf of this role is laid out between steps, and why."""
    axes, shared = replicas.axes, replicas.shared
    everywhere = whole(axes)
    if role == "batch":
        return everywhere, "the examples"
    if role == "input":
        return everywhere, "an input, not state"
    if role == "frozen":
        return everywhere, "frozen: returned unchanged"
    if array.nbytes < policy.small:
        return everywhere, f"small: {array.nbytes} bytes, below min_shard_bytes={policy.small}"
    if role == "weight" and policy.weights == "replicated":
        return everywhere, WHY_WHOLE
    verb = "gathered where the forward pass reads it" if role == "weight" else _WHY_SPLIT
    kept = taken.kept
    free = tuple(1 if d < len(kept) and kept[d] else size for d, size in enumerate(array.shape))
    if taken.sliced:
        slices = Array(tuple(1 if d in taken.sliced else size for d, size in enumerate(free)), array.dtype)
        layout = split_layout(slices, axes, shared, replicas.topology.tiled, min(policy.room, _SLICED_ROOM))
        if layout is not None:
            return left_whole(array.shape, layout, axes, policy.summed), f"{verb}; {taken.why}"
    leaf, tiled = Array(free, array.dtype), replicas.topology.tiled
    layout = split_layout(leaf, axes, shared, tiled, policy.room)
    if layout is None and policy.room < math.inf and split_layout(leaf, axes, shared, tiled) is not None:
        return everywhere, f"{list(array.shape)} would have to be padded so much that more is sent than before"
    if layout is None:
        besides = f" that is free ({show_kept(kept)})" if kept else ""
        return everywhere, f"{list(array.shape)} has no dimension{besides} to split"
    lying = left_whole(array.shape, layout, axes, policy.summed)
    return lying, verb if lying == layout else f"{verb}; {_SUMMED}"


def take_turns(
    captured: Captured,
    replicas: Replicas,
    roles: Sequence[str],
    rests: list[tuple[Layout, str]],
    alone: int,
    sliced: Mapping[int, AbstractSet[int]],
) -> list[tuple[Layout, str]]:
    """On a torus, some tensors begin with another axis; none that would then be split along its layers."""
    if not replicas.topology.tiled or any(captured.kept):
        return rests
    layouts = [layout for layout, _ in rests]
    weights = {i for i, role in enumerate(roles) if role == "weight"}
    rings = replicas.topology.rings
    turned = spread(captured.program, captured.state, weights, layouts, replicas.axes, rings, alone)
    rests = list(rests)
    for i, layout in turned.items():
        if any(isinstance(p, Split) and p.dim in sliced.get(i, ()) for p in layout):
            continue
        shape = captured.program.inputs[i].array.shape
        axis = "+".join(replicas.axes[first_axis(shape, layout, replicas.axes)].names)
        rests[i] = layout, f"{rests[i][1]}; {axis} first, so that all links work"
    return rests
