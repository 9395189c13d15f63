"""The plan: how each leaf rests, what the step communicates, what could not be sharded, and why."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..capture.step import Captured
from ..core import meshes
from ..core.errors import ShardstepError
from ..core.layout import (
    VARYING,
    Array,
    Axis,
    Layout,
    Varying,
    block_shape,
    is_batch,
    is_padded,
    padded_shape,
    partition_spec,
    show,
)
from ..core.options import Options
from ..core.program import Atom, Var
from ..core.schedule import Collective, Fallback, Schedule
from ..core.user_shardings import Kept, alike, joined, show_kept
from ..machine.replicas import Replicas
from ..runtime import sharded_init as initial
from ..tools.report.html import fragment, page
from . import engines
from .buckets import bucket_bytes, fuse
from .costs import axis_times, update_time, wire_time
from .placement import split_layout, split_on
from .plan_table import table
from .precision import travel_in
from .propagation.forward import Forward, schedule, whole
from .propagation.memo import Situations
from .timeline import Line, Segment, moments, segments, update_lines
from .torus_order import first_axis, spread


@dataclass(frozen=True)
class Leaf:
    """One input leaf of the step, and how it rests."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str  # weight, auxiliary, frozen, batch, input
    layout: str
    spec: PartitionSpec
    held: tuple[int, ...]  # the shape of the array that holds it: larger than `shape` where that is padded
    bytes_before: int  # a replica
    bytes_after: int
    reason: str


@dataclass(frozen=True)
class Argument:
    """One argument of a planned step, taken apart."""

    tree: Any
    leaves: tuple[Leaf | None, ...]  # None where something static stands
    values: tuple[Any, ...]  # shardings, and what is static

    @property
    def name(self) -> str:
        return next(re.split(r"[.\[]", leaf.path)[0] for leaf in self.leaves if leaf)


@dataclass(frozen=True)
class Total:
    """A quantity per replica and step, in the replicated and in the sharded program."""

    replicated: float
    sharded: float

    @property
    def ratio(self) -> float:
        return self.sharded / self.replicated if self.replicated else 1.0


@dataclass(frozen=True)
class Plan:
    """What shardstep will do with a step. `str(plan)` is a table; `to_json()` holds all of it."""

    replicas: int
    topology: str
    group: int  # how many replicas share one copy of the state
    why_group: str
    weights: str
    why_weights: str
    leaves: tuple[Leaf, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    state_bytes: Total
    wire_bytes: Total
    update_flops: Total
    wire_seconds: Total  # predicted by the cost model, see `links.py`
    update_seconds: Total
    axis_seconds: tuple[tuple[str, float], ...] = ()  # how long the links of each data axis are busy, of several
    notes: tuple[str, ...] = ()
    timeline: tuple[Segment, ...] = ()  # the sharded step in order
    timeline_before: tuple[Segment, ...] = ()  # the replicated one
    update: tuple[Line, ...] = ()  # the update, equation by equation
    engine: str = "rewrite"  # or "annotate": XLA partitions the step; its collectives are known once it is compiled
    why_engine: str = "as asked"
    shardings: Any = field(default=None, compare=False, repr=False)  # pytree like (args, kwargs) of NamedSharding

    def __getstate__(self) -> dict[str, Any]:
        """Devices do not travel between processes; everything else does."""
        return {**self.__dict__, "shardings": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def to_json(self) -> str:
        data = {name: value for name, value in self.__dict__.items() if name != "shardings"}
        data["auxiliary_share"] = self.auxiliary_share
        return json.dumps(data, default=_plain, indent=1)

    def to_html(self, path: str | os.PathLike[str], title: str = "shardstep report", notes: Sequence[str] = ()) -> None:
        """Write the report as one self-contained HTML file."""
        Path(path).write_text(page(self, title, notes), encoding="utf-8")

    def __str__(self) -> str:
        return table(self)

    def init(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `create_state(*args, **kwargs)` so that the state is born in its layout.

        It returns what `create_state` returns: the step's state argument, or a tuple of several of them. No device
        holds more of the optimizer's state than its own part, not even while it is created.
        """
        return initial.prepare(self, create_state, args, kwargs).run()

    def arguments(self) -> list[Argument]:
        """The arguments that hold arrays, with their leaves."""
        if self.shardings is None:
            raise ShardstepError("this plan has no devices (it was pickled): ask for it again with step.plan(...)")
        args, kwargs = self.shardings
        planned = iter(self.leaves)
        found = []
        for argument in [*args, *(kwargs[name] for name in sorted(kwargs))]:
            values, tree = jax.tree.flatten(argument)
            leaves = tuple(next(planned) if isinstance(x, NamedSharding) else None for x in values)
            if any(leaves):
                found.append(Argument(tree, leaves, tuple(values)))
        return found

    def sharding(self, leaf: Leaf) -> NamedSharding:
        """Over which devices the array lies that holds this leaf."""
        mesh = next(s.mesh for s in jax.tree.leaves(self.shardings) if isinstance(s, NamedSharding))
        return NamedSharding(mesh, leaf.spec)

    def _repr_html_(self) -> str:
        """How a notebook shows the plan."""
        return fragment(self)

    @property
    def auxiliary_share(self) -> float:
        """The share of the optimizer's state bytes that rests sharded."""
        auxiliary = [leaf for leaf in self.leaves if leaf.role == "auxiliary"]
        total = sum(leaf.bytes_before for leaf in auxiliary)
        return sum(leaf.bytes_before for leaf in auxiliary if "split" in leaf.layout) / total if total else 1.0


@dataclass(frozen=True, eq=False)
class Decided:
    """Everything that running the step needs to know. `describe` makes a Plan of it."""

    schedule: Schedule
    baseline: Schedule  # of the program that everyone runs today
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    roles: tuple[str, ...]  # of the inputs
    reasons: tuple[str, ...]
    weights: str
    why_weights: str
    kept: Mapping[Atom, Kept]  # of the values that lie as some state does, along the axes that are the user's
    engine: engines.Choice
    wire_bytes: float


def decide(captured: Captured, replicas: Replicas, weights: str, options: Options) -> Decided:
    """Plan a captured step."""
    unsharded = _walk_unsharded(captured)
    _check_outputs(captured, unsharded)
    roles = _roles(captured, unsharded)
    known = Situations()
    baseline = _baseline(captured, replicas.axes, known)
    chosen, why = choose_weights(weights, options, replicas.topology.platform)
    small = _small_bytes(captured, roles, replicas, options)

    def attempt(weights: str) -> tuple[Schedule, list[str]]:
        """With padding where that is needed; without most of it, if it is padding that makes the step send more."""
        before = engines.sent(baseline)
        found = _attempt(captured, replicas, roles, unsharded, weights, small, options, known)
        if engines.enough(engines.sent(found[0]), before) or not _padded(captured, found[0]):
            return found
        other = _attempt(captured, replicas, roles, unsharded, weights, small, options, known, room=_ROOM)
        return other if engines.enough(engines.sent(other[0]), before) else found

    rested, reasons = attempt(chosen)
    if weights == "auto" and options.gather_dtype is None and _is_doubtful(chosen, rested, baseline):
        instead, because, margin = _INSTEAD[chosen]
        other, others = attempt(instead)
        if engines.sent(other) < margin * engines.sent(rested):
            rested, reasons, chosen, why = other, others, instead, because
    return _with_engine(captured, replicas, roles, small, options, baseline, rested, reasons, chosen, why)


def _attempt(
    captured: Captured,
    replicas: Replicas,
    roles: Sequence[str],
    unsharded: Schedule,
    weights: str,
    small: int,
    options: Options,
    known: Situations,
    room: float = math.inf,
) -> tuple[Schedule, list[str]]:
    """The step with its weights resting so, and why each leaf rests as it does.

    A leaf that padding would make more than `room` times as large rests whole.
    """
    program, axes = captured.program, replicas.axes
    examples = _examples(captured, axes)
    uses = program.uses
    rests = []
    for i, (var, role) in enumerate(zip(program.inputs, roles, strict=True)):
        updating = role == "frozen" and uses[var] > 1 and i not in unsharded.met_batch  # the update alone reads it
        rest = _rest(var.array, "auxiliary" if updating else role, weights, replicas, small, captured.kept[i], room)
        rests.append(rest)
    alone = bucket_bytes(options.bucket_bytes, replicas.topology.platform)
    rests = _take_turns(captured, replicas, roles, rests, alone)
    inputs = [examples.get(i, layout) for i, (layout, _) in enumerate(rests)]
    outputs: list[Layout | None] = [None] * len(program.outputs)
    for i, o in captured.state.items():
        outputs[o] = inputs[i]
    decided = schedule(program, axes, inputs, outputs, known=known)
    decided = travel_in(decided, options.reduce_dtype, options.gather_dtype)
    decided = fuse(decided, alone)
    return decided, [reason for _, reason in rests]


def _take_turns(
    captured: Captured, replicas: Replicas, roles: Sequence[str], rests: list[tuple[Layout, str]], alone: int
) -> list[tuple[Layout, str]]:
    """On a torus, some tensors begin with another axis."""
    if not replicas.topology.tiled or any(captured.kept):
        return rests
    layouts = [layout for layout, _ in rests]
    weights = {i for i, role in enumerate(roles) if role == "weight"}
    rings = replicas.topology.rings
    turned = spread(captured.program, captured.state, weights, layouts, replicas.axes, rings, alone)
    rests = list(rests)
    for i, layout in turned.items():
        shape = captured.program.inputs[i].array.shape
        axis = "+".join(replicas.axes[first_axis(shape, layout, replicas.axes)].names)
        rests[i] = layout, f"{rests[i][1]}; {axis} first, so that all links work"
    return rests


def _with_engine(
    captured: Captured,
    replicas: Replicas,
    roles: Sequence[str],
    small: int,
    options: Options,
    baseline: Schedule,
    rested: Schedule,
    reasons: Sequence[str],
    weights: str,
    why_weights: str,
) -> Decided:
    program = captured.program
    updated = [
        v.array for v, role in zip(program.inputs, roles, strict=True) if role == "weight" and v.array.nbytes >= small
    ]
    everywhere = whole(rested.axes)
    unpadded = tuple(engines.unpadded(layout, everywhere) for layout in rested.inputs)
    ours, theirs = engines.sent(rested), engines.sent(baseline)
    shares = any(unpadded[i] != everywhere for i in captured.state)  # or else XLA runs the replicated step
    left_to_xla = engines.estimate(baseline, rested, updated, replicas.count) if shares else theirs
    uneven = any(is_padded(p) for i in captured.batch for p in rested.inputs[i])
    typed = meshes.explicit(replicas.user_mesh) is not None
    alone = replicas.count == 1 and options.gather_dtype is None  # one replica rounds as well
    choice = engines.choose(options.engine, captured.axis_name, uneven, ours, theirs, left_to_xla, shares, typed, alone)
    inputs, outputs = rested.inputs, rested.outputs
    if choice.engine == "annotate":
        ours = left_to_xla
        reasons = [r if a == b else f"{r}; XLA does not pad" for r, a, b in zip(reasons, inputs, unpadded, strict=True)]
        inputs = unpadded
        resting = {o: inputs[i] for i, o in captured.state.items()}
        outputs = tuple(resting.get(o, everywhere) for o in range(len(program.outputs)))
    return Decided(
        schedule=rested,
        baseline=baseline,
        inputs=inputs,
        outputs=outputs,
        roles=tuple(roles),
        reasons=tuple(reasons),
        weights=weights,
        why_weights=why_weights,
        kept=alike(program, captured.kept),
        engine=choice,
        wire_bytes=ours,
    )


def describe(captured: Captured, decided: Decided, replicas: Replicas) -> Plan:
    """The plan in the user's terms, beside the program that everyone runs today."""
    axes, inputs, topology = replicas.axes, captured.program.inputs, replicas.topology
    leaves = tuple(map(_leaf, captured.paths, inputs, decided.roles, decided.inputs, repeat(axes), decided.reasons))
    leaves = tuple(map(_keeping, leaves, captured.kept, repeat(replicas.mesh)))
    state = [leaves[i] for i in captured.state]
    baseline, ours = decided.baseline, decided.schedule
    rewritten = decided.engine.engine == "rewrite"
    told = tuple(moments(ours)) if rewritten else ()
    busy = axis_times(ours.collectives, axes, topology) if rewritten and len(axes) > 1 else []
    return Plan(
        replicas=replicas.count,
        topology=str(topology),
        group=replicas.group,
        why_group=replicas.why_group,
        weights=decided.weights,
        why_weights=decided.why_weights,
        leaves=leaves,
        collectives=ours.collectives if rewritten else (),
        fallbacks=_merged(ours.fallbacks) if rewritten else (),
        state_bytes=Total(sum(x.bytes_before for x in state), sum(x.bytes_after for x in state)),
        wire_bytes=Total(engines.sent(baseline), decided.wire_bytes),
        update_flops=Total(_update_work(baseline), _update_work(ours)),
        wire_seconds=Total(
            wire_time(baseline.collectives, axes, topology),
            wire_time((ours if rewritten else baseline).collectives, axes, topology),
        ),
        update_seconds=Total(update_time(baseline, topology), update_time(ours, topology)),
        axis_seconds=tuple(("+".join(axis.names), seconds) for axis, seconds in zip(axes, busy, strict=False)),
        engine=decided.engine.engine,
        why_engine=decided.engine.why,
        notes=(replicas.note,) if replicas.note else (),
        timeline=segments(told),
        timeline_before=segments(moments(baseline)),
        update=update_lines(told, dict(zip(inputs, captured.paths, strict=True))),
        shardings=captured.call.rebuild([NamedSharding(replicas.mesh, leaf.spec) for leaf in leaves]),
    )


def _walk_unsharded(captured: Captured) -> Schedule:
    """Who meets the examples, what would differ between replicas? Asked of one replica, which divides everything."""
    alone = (Axis(("replica",), 1),)
    examples = _examples(captured, alone)
    inputs = [examples.get(i, whole(alone)) for i in range(len(captured.program.inputs))]
    walk = Forward(captured.program, alone, Situations(), draws=False)
    return walk.run(inputs, [None] * len(captured.program.outputs), raw=True)


def _baseline(captured: Captured, axes: tuple[Axis, ...], known: Situations) -> Schedule:
    """The program that everyone runs today: all state replicated, gradients all-reduced over all replicas at once."""
    joined = (Axis(tuple(n for a in axes for n in a.names), _replicas(axes), axes[0].widens),)
    examples = _examples(captured, joined)
    outputs: list[Layout | None] = [None] * len(captured.program.outputs)
    for o in captured.state.values():
        outputs[o] = whole(joined)
    inputs = [examples.get(i, whole(joined)) for i in range(len(captured.program.inputs))]
    return schedule(captured.program, joined, inputs, outputs, known=known if joined == axes else None)


def _replicas(axes: tuple[Axis, ...]) -> int:
    n = 1
    for axis in axes:
        n *= axis.size
    return n


def _examples(captured: Captured, axes: tuple[Axis, ...]) -> dict[int, Layout]:
    """The batch: split on its examples, or each replica's own in a per-replica step."""
    if captured.axis_name is not None:
        return dict.fromkeys(captured.batch, (VARYING,) * len(axes))
    inputs, all_axes = captured.program.inputs, (True,) * len(axes)
    return {i: split_on(inputs[i].array.shape, dim, axes, all_axes, batch=True) for i, dim in captured.batch.items()}


# -- roles --------------------------------------------------------------------------------------------------------


def _roles(captured: Captured, unsharded: Schedule) -> list[str]:
    """A weight meets the examples; auxiliary state only meets the update; frozen state comes back as it went in."""
    frozen = captured.frozen

    def role(i: int) -> str:
        if i in captured.batch:
            return "batch"
        if i not in captured.state:
            return "input"
        if i in frozen:
            return "frozen"
        return "weight" if i in unsharded.met_batch else "auxiliary"

    return [role(i) for i in range(len(captured.program.inputs))]


def choose_weights(weights: str, options: Options, platform: str) -> tuple[str, str]:
    """How weights rest, and why."""
    if options.gather_dtype is not None and weights != "sharded":
        if weights == "replicated":
            raise ShardstepError(
                f"gather_dtype={options.gather_dtype.name} with weights='replicated': weights that rest whole would be"
                " rounded at every step. Give weights='sharded': they rest as they are, and the forward pass reads them"
                " rounded."
            )
        return "sharded", f"gather_dtype={options.gather_dtype.name}: they rest as they are and are rounded on the way"
    return _AUTO[platform] if weights == "auto" else (weights, "as asked")


def _is_doubtful(weights: str, rested: Schedule, baseline: Schedule) -> bool:
    """Might weights that rest otherwise send less?"""
    if weights == "sharded":
        return engines.sent(rested) > engines.ENOUGH * engines.sent(baseline)
    return any(step.ruling.visits for step in rested.steps)


# What "auto" takes instead, why, and how much less that must send.
_INSTEAD = {
    "sharded": ("replicated", "to gather them in the step would send more", 1.0),
    "replicated": ("sharded", "a table of which the examples read few rows then never moves", 0.5),
}


# What "auto" means, by measurement.
# GPU: benchmarks/gpu_replica.py, H200, bf16 compute. A 1.3B transformer, one replica of 8: 45.2 ms a step sharded, 44.2
# replicated, but 5.0 GB sent against 7.1 and 2.0 GB of state against 6.6; of 64: 41.1 ms against 43.0. Six 8192x8192
# weights: 1.23 ms against 1.69.
# TPU: the compiler's estimates for 4 weights of 2048x2048, thousand cycles: 416 sharded, 847 replicated on v3:4x4; 133
# and 115 on v5e:4x4; 160 and 308 on v5p:4x4x4; a fifth to a half of the memory.
# CPU: benchmarks/suite.py, 4 weights of 1024x1024 on 8 devices: 29 ms sharded, 32 replicated. But simulated devices are
# there to try things out, and whole weights are what evaluation code expects to find.
_AUTO = {
    "cpu": ("replicated", "on CPU: evaluation code finds whole weights on every replica"),
    "gpu": (
        "sharded",
        "on GPU: less memory, for bf16 models fewer bytes sent, and measured about as fast or faster",
    ),
    "tpu": ("sharded", "on TPU: the compiler expects fewer cycles and less memory than for replicated weights"),
}


# -- where a leaf rests -------------------------------------------------------------------------------------------


_LEAST_BYTES = 16 * 1024  # smaller leaves are not worth a message on any machine
_LEFT_WHOLE = 0.002  # the share of the optimizer's bytes that may stay on every replica for the sake of speed


def _small_bytes(captured: Captured, roles: Sequence[str], replicas: Replicas, options: Options) -> int:
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


_WHY_SPLIT = "only the update reads it (split: a partial sum would rest whole on every replica)"


_ROOM = 1.5  # what padding makes larger than this, and more costly to send than it was, is not worth sharding


def _padded(captured: Captured, decided: Schedule) -> bool:
    return any(is_padded(p) for i in captured.state for p in decided.inputs[i])


def _rest(
    array: Array,
    role: str,
    weights: str,
    replicas: Replicas,
    small: int,
    kept: Kept = (),
    room: float = math.inf,
) -> tuple[Layout, str]:
    axes, shared = replicas.axes, replicas.shared
    everywhere = whole(axes)
    if role == "batch":
        return everywhere, "the examples"
    if role == "input":
        return everywhere, "an input, not state"
    if role == "frozen":
        return everywhere, "frozen: returned unchanged"
    if role == "weight" and weights == "replicated":
        return everywhere, "a weight: every replica reads it whole; its update is sharded and gathered"
    if array.nbytes < small:
        return everywhere, f"small: {array.nbytes} bytes, below min_shard_bytes={small}"
    free = tuple(1 if d < len(kept) and kept[d] else size for d, size in enumerate(array.shape))
    leaf, tiled = Array(free, array.dtype), replicas.topology.tiled
    layout = split_layout(leaf, axes, shared, tiled, room)
    if layout is None and room < math.inf and split_layout(leaf, axes, shared, tiled) is not None:
        return everywhere, f"{list(array.shape)} would have to be padded so much that more is sent than before"
    if layout is None:
        besides = f" that is free ({show_kept(kept)})" if kept else ""
        return everywhere, f"{list(array.shape)} has no dimension{besides} to split"
    verb = "gathered where the forward pass reads it" if role == "weight" else _WHY_SPLIT
    return layout, verb


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
    """The same leaf on the mesh axes that are the user's too. Bytes are a replica's, which spans several devices."""
    if not kept:
        return leaf
    parts = math.prod(mesh.shape[n] for names in kept for n in names)
    return replace(
        leaf,
        layout=f"{leaf.layout}, {show_kept(kept)}",
        spec=joined(leaf.spec, kept),
        reason=f"{leaf.reason}; {show_kept(kept)} is kept as it came: {parts} devices share a replica's block",
    )


def _check_outputs(captured: Captured, unsharded: Schedule) -> None:
    for i, o in captured.state.items():
        if any(isinstance(p, Varying) for p in unsharded.outputs[o]):
            raise ShardstepError(
                f"the state leaf {captured.paths[i]} would differ between replicas: the step computes it from one"
                f" replica's batch. Reduce it over the replicas, e.g. with lax.pmean(x, {captured.axis_name!r})."
            )


def _merged(fallbacks: Sequence[Fallback]) -> tuple[Fallback, ...]:
    """One entry for each line and reason."""
    moved: dict[tuple[str, str, str], float] = {}
    for f in fallbacks:
        moved[f.primitive, f.why, f.line] = moved.get((f.primitive, f.why, f.line), 0.0) + f.bytes
    return tuple(Fallback(primitive, why, nbytes, line) for (primitive, why, line), nbytes in moved.items())


def _update_work(decided: Schedule) -> float:
    """Elements computed by a replica in equations that do not run over the examples."""
    return float(sum(step.ruling.elements_made for step in decided.steps if not step.ruling.over_examples))


def _plain(value: Any) -> Any:
    """JSON's view of what a plan holds."""
    if isinstance(value, PartitionSpec):
        return [list(x) if isinstance(x, tuple) else x for x in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
