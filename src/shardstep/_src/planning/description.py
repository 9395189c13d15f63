"""A decision in the user's terms: the plan, beside the program that everyone runs today."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..capture.step import Captured
from ..core import trees
from ..core.execution import HOST
from ..core.layout import Array, Axis, Layout, Varying, block_shape, is_batch, padded_shape, partition_spec, show
from ..core.program import Var
from ..core.schedule import Fallback
from ..core.user_shardings import Kept, joined, show_kept
from ..machine.replicas import Replicas
from . import engines, host_memory
from .costs import axis_times, wire_time
from .decision import Decided
from .plan import Leaf, Plan
from .programs import Programs, Total


def describe(captured: Captured, decided: Decided, replicas: Replicas) -> Plan:
    """The plan in the user's terms, beside the program that everyone runs today."""
    axes, inputs, topology = replicas.axes, captured.program.inputs, replicas.topology
    leaves = tuple(map(_leaf, captured.paths, inputs, decided.roles, decided.inputs, repeat(axes), decided.reasons))
    leaves = tuple(map(_keeping, leaves, captured.kept, repeat(replicas.mesh)))
    if replicas.count == 1:
        leaves = tuple(map(_alone, leaves))
    leaves = tuple(replace(leaf, memory=HOST) if i in decided.hosted else leaf for i, leaf in enumerate(leaves))
    state = [leaves[i] for i in captured.state]
    baseline, ours = decided.baseline, decided.schedule
    rewritten = decided.engine.engine == "rewrite"
    programs = Programs(captured, decided.roles, baseline, ours, rewritten, decided.donated, decided.hosted, replicas)
    busy = axis_times(ours.collectives, axes, topology) if rewritten and len(axes) > 1 else []
    shardings = captured.call.merged([leaf.sharding(replicas.mesh) for leaf in leaves])
    return Plan(
        replicas=replicas.count,
        topology=str(topology),
        group=replicas.group,
        why_group=replicas.why_group,
        weights=decided.weights,
        why_weights=decided.why_weights,
        leaves=leaves,
        fallbacks=_merged(ours.fallbacks) if rewritten else (),
        state_bytes=Total(sum(x.bytes_before for x in state), sum(x.bytes_after for x in state)),
        wire_bytes=Total(engines.sent(baseline), decided.wire_bytes),
        wire_seconds=Total(
            wire_time(baseline.collectives, axes, topology),
            wire_time((ours if rewritten else baseline).collectives, axes, topology),
        ),
        memory=decided.memory,
        axis_seconds=tuple(("+".join(axis.names), seconds) for axis, seconds in zip(axes, busy, strict=False)),
        engine=decided.engine.engine,
        why_engine=decided.engine.why,
        notes=tuple(note for note in (captured.examples.note, replicas.note, *decided.notes) if note),
        lossy=decided.lossy,
        why_offload=host_memory.told(decided.schedule, decided.hosted, decided.why_hosted),
        owned=decided.owned,
        programs=programs,
        shardings=captured.call.with_static_arguments(*trees.like(captured.call.treedef, shardings)),
        structure=_structure(captured, shardings),
    )


def _structure(captured: Captured, values: Sequence[Any]) -> tuple[Any, ...]:
    """Of each argument its structure, what stands at its leaves, and where."""
    found, start = [], 0
    for tree in captured.call.arguments:
        stop = start + tree.num_leaves
        found.append((tree, tuple(values[start:stop]), tuple(path[2:] for path in captured.key_paths[start:stop])))
        start = stop
    return tuple(found)


def _leaf(path: str, var: Var, role: str, layout: Layout, axes: tuple[Axis, ...], reason: str) -> Leaf:
    array = var.array
    if any(isinstance(p, Varying) for p in layout):  # the program sees one replica's share of the batch already
        return Leaf(
            path,
            array.shape,
            str(array.dtype),
            role,
            show(layout),
            PartitionSpec(),
            array.shape,
            array.nbytes,
            array.nbytes,
            reason,
        )
    block = Array(block_shape(array.shape, layout, axes), array.dtype)
    spec = partition_spec(array.ndim, layout, axes)
    before = block.nbytes if any(map(is_batch, layout)) else array.nbytes
    held = padded_shape(array.shape, layout)
    if held != array.shape:
        reason += f"; padded by {1 - array.size / math.prod(held):.2%}"
    return Leaf(path, array.shape, str(array.dtype), role, show(layout), spec, held, before, block.nbytes, reason)


def _keeping(leaf: Leaf, kept: Kept, mesh: Mesh) -> Leaf:
    """The same leaf with the user's own mesh axes. Bytes are per replica, and a replica spans several devices."""
    if not kept:
        return leaf
    parts = math.prod(mesh.shape[n] for names in kept for n in names)
    return replace(
        leaf,
        layout=f"{leaf.layout}, {show_kept(kept)}",
        spec=joined(leaf.spec, kept),
        reason=f"{leaf.reason}; {show_kept(kept)} is kept as it came: {parts} devices share a replica's block",
    )


def _alone(leaf: Leaf) -> Leaf:
    """The same leaf where there is one replica: a split into one block is none."""
    return replace(leaf, layout="replicated", reason="one replica holds everything")


def _merged(fallbacks: Sequence[Fallback]) -> tuple[Fallback, ...]:
    """One entry for each line and reason."""
    moved: dict[tuple[str, str, str], float] = {}
    for f in fallbacks:
        moved[f.primitive, f.why, f.line] = moved.get((f.primitive, f.why, f.line), 0.0) + f.bytes
    return tuple(Fallback(primitive, why, nbytes, line) for (primitive, why, line), nbytes in moved.items())
