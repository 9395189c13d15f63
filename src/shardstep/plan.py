"""The plan: how each leaf rests, what the step communicates, what could not be sharded, and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .capture import Captured
from .errors import ShardstepError
from .layout import (
    REPLICATED,
    VARYING,
    Array,
    Axis,
    Layout,
    Replicated,
    Split,
    Varying,
    block_shape,
    divides,
    is_batch,
    partition_spec,
    show,
)
from .options import Options
from .propagate import Forward, schedule, whole
from .schedule import Collective, Fallback, Schedule


@dataclass(frozen=True)
class Leaf:
    """One input leaf of the step, and how it rests."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str  # weight, auxiliary, frozen, batch, input
    layout: str
    spec: PartitionSpec
    bytes_before: int  # a replica
    bytes_after: int
    reason: str


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
    weights: str
    why_weights: str
    leaves: tuple[Leaf, ...]
    collectives: tuple[Collective, ...]
    fallbacks: tuple[Fallback, ...]
    state_bytes: Total
    wire_bytes: Total
    update_flops: Total
    shardings: Any = field(default=None, compare=False, repr=False)  # pytree like (args, kwargs) of NamedSharding

    def __getstate__(self) -> dict[str, Any]:
        """Devices do not travel between processes; everything else does."""
        return {**self.__dict__, "shardings": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def to_json(self) -> str:
        data = {name: value for name, value in self.__dict__.items() if name != "shardings"}
        return json.dumps(data, default=_plain, indent=1)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @property
    def auxiliary_share(self) -> float:
        """The share of the optimizer's state bytes that rests sharded."""
        auxiliary = [leaf for leaf in self.leaves if leaf.role == "auxiliary"]
        total = sum(leaf.bytes_before for leaf in auxiliary)
        return sum(leaf.bytes_before for leaf in auxiliary if "split" in leaf.layout) / total if total else 1.0


@dataclass(frozen=True, eq=False)
class Decided:
    """A plan with what carries it out."""

    plan: Plan
    schedule: Schedule
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


def decide(
    captured: Captured, mesh: Mesh, axes: tuple[Axis, ...], shared: tuple[bool, ...], weights: str, options: Options
) -> Decided:
    """Plan a captured step. `shared[k]` says whether state may be split along data axis k (hybrid groups: not all)."""
    program = captured.program
    arrays = [v.array for v in program.inputs]
    examples = _examples(captured, axes)
    plain = [examples.get(i, whole(axes)) for i in range(len(arrays))]
    roles = _roles(captured, axes, plain)
    chosen, why = _choose_weights(weights)
    rests, reasons = [], []
    for i, array in enumerate(arrays):
        layout, reason = _rest(array, roles[i], chosen, axes, shared, options)
        rests.append(examples.get(i, layout))
        reasons.append(reason)
    outputs: list[Layout | None] = [None] * len(program.outputs)
    for i, o in captured.state.items():
        outputs[o] = rests[i]
    decided = schedule(program, axes, rests, outputs)
    _check_outputs(captured, decided)
    baseline = _baseline(captured, axes)
    leaves = tuple(
        _leaf(captured.paths[i], array, roles[i], rests[i], axes, reasons[i]) for i, array in enumerate(arrays)
    )
    state = [leaves[i] for i in captured.state]
    shardings = captured.call.rebuild([NamedSharding(mesh, leaf.spec) for leaf in leaves])
    plan = Plan(
        replicas=_replicas(axes),
        weights=chosen,
        why_weights=why,
        leaves=leaves,
        collectives=decided.collectives,
        fallbacks=decided.fallbacks,
        state_bytes=Total(sum(x.bytes_before for x in state), sum(x.bytes_after for x in state)),
        wire_bytes=Total(sum(c.total for c in baseline.collectives), sum(c.total for c in decided.collectives)),
        update_flops=Total(_update_work(baseline), _update_work(decided)),
        shardings=shardings,
    )
    return Decided(plan, decided, tuple(rests), decided.outputs)


def _baseline(captured: Captured, axes: tuple[Axis, ...]) -> Schedule:
    """The program that everyone runs today: all state replicated, gradients all-reduced over all replicas at once."""
    joined = (Axis(tuple(n for a in axes for n in a.names), _replicas(axes)),)
    examples = _examples(captured, joined)
    outputs: list[Layout | None] = [None] * len(captured.program.outputs)
    for o in captured.state.values():
        outputs[o] = whole(joined)
    inputs = [examples.get(i, whole(joined)) for i in range(len(captured.program.inputs))]
    return schedule(captured.program, joined, inputs, outputs)


def _replicas(axes: tuple[Axis, ...]) -> int:
    n = 1
    for axis in axes:
        n *= axis.size
    return n


def _examples(captured: Captured, axes: tuple[Axis, ...]) -> dict[int, Layout]:
    """The batch: split on its examples, or each replica's own in a per-replica step."""
    if captured.axis_name is not None:
        return dict.fromkeys(captured.batch, (VARYING,) * len(axes))
    return {i: (Split(dim, batch=True),) * len(axes) for i, dim in captured.batch.items()}


# -- roles --------------------------------------------------------------------------------------------------------


def _roles(captured: Captured, axes: tuple[Axis, ...], plain: Sequence[Layout]) -> list[str]:
    """A weight meets the examples; auxiliary state only meets the update; frozen state comes back as it went in."""
    program = captured.program
    walk = Forward(program, axes, {}, draws=False).run(plain, [None] * len(program.outputs), raw=True)
    frozen = captured.frozen

    def role(i: int) -> str:
        if i in captured.batch:
            return "batch"
        if i not in captured.state:
            return "input"
        if i in frozen:
            return "frozen"
        return "weight" if i in walk.met_batch else "auxiliary"

    return [role(i) for i in range(len(program.inputs))]


def _choose_weights(weights: str) -> tuple[str, str]:
    if weights == "auto":
        return "replicated", "the default: evaluation code finds whole weights on every replica"
    return weights, "as asked"


# -- where a leaf rests -------------------------------------------------------------------------------------------


def _rest(
    array: Array, role: str, weights: str, axes: tuple[Axis, ...], shared: tuple[bool, ...], options: Options
) -> tuple[Layout, str]:
    everywhere = whole(axes)
    if role == "batch":
        return everywhere, "the examples"
    if role == "input":
        return everywhere, "an input, not state"
    if role == "frozen":
        return everywhere, "frozen: returned unchanged"
    if role == "weight" and weights == "replicated":
        return everywhere, "a weight: every replica reads it whole; its update is sharded and gathered"
    if array.nbytes < options.min_shard_bytes:
        return everywhere, f"small: {array.nbytes} bytes, below min_shard_bytes={options.min_shard_bytes}"
    layout = split_layout(array, axes, shared)
    if layout is None:
        n = " and ".join(str(a.size) for a, s in zip(axes, shared, strict=True) if s)
        return everywhere, f"no dimension of {list(array.shape)} divides by {n}"
    verb = "gathered where the forward pass reads it" if role == "weight" else "only the update reads it"
    return layout, verb


def split_layout(array: Array, axes: tuple[Axis, ...], shared: tuple[bool, ...]) -> Layout | None:
    """The first dimension that divides evenly, so that all leaves of one shape agree."""
    sharded = [(k, axis) for k, axis in enumerate(axes) if shared[k]]
    for dim in range(array.ndim):
        shape, layout = array.shape, list(whole(axes))
        for k, axis in sharded:
            split = Split(dim)
            if not divides(shape, split, axis.size):
                break
            layout[k] = split
            shape = block_shape(shape, (split,), (axis,))
        else:
            return tuple(layout)
    return None


def _leaf(path: str, array: Array, role: str, layout: Layout, axes: tuple[Axis, ...], reason: str) -> Leaf:
    if any(isinstance(p, Varying) for p in layout):  # the program sees one replica's share of the batch already
        return Leaf(
            path, array.shape, str(array.dtype), role, show(layout), PartitionSpec(), array.nbytes, array.nbytes, reason
        )
    block = Array(block_shape(array.shape, layout, axes), array.dtype)
    spec = partition_spec(array.ndim, layout, axes)
    before = block.nbytes if any(map(is_batch, layout)) else array.nbytes
    return Leaf(path, array.shape, str(array.dtype), role, show(layout), spec, before, block.nbytes, reason)


def _check_outputs(captured: Captured, decided: Schedule) -> None:
    for i, o in captured.state.items():
        if any(isinstance(p, Varying) for p in decided.outputs[o]):
            raise ShardstepError(
                f"the state leaf {captured.paths[i]} would differ between replicas: the step computes it from one"
                f" replica's batch. Reduce it over the replicas, e.g. with lax.pmean(x, {captured.axis_name!r})."
            )


def _update_work(decided: Schedule) -> float:
    """Elements computed by a replica in equations that do not run over the examples."""
    done = 0.0
    for step in decided.steps:
        if not any(is_batch(p) for layout in step.operands + step.results for p in layout):
            for var, layout in zip(step.equation.outputs, step.results, strict=True):
                done += Array(block_shape(var.array.shape, layout, decided.axes), var.array.dtype).size
    return done


# -- to read ------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, PartitionSpec):
        return [list(x) if isinstance(x, tuple) else x for x in value]
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return str(value)


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _lines(plan: Plan) -> list[str]:
    lines = [
        f"shardstep plan for {plan.replicas} replicas, weights {plan.weights} ({plan.why_weights})",
        f"  state a replica   {size(plan.state_bytes.replicated)} -> {size(plan.state_bytes.sharded)}"
        f"   ({plan.auxiliary_share:.1%} of the optimizer's bytes are sharded)",
        f"  wire a replica    {size(plan.wire_bytes.replicated)} -> {size(plan.wire_bytes.sharded)}",
        f"  update work       {plan.update_flops.replicated:.3g} -> {plan.update_flops.sharded:.3g} elements",
        "",
    ]
    rows = [("leaf", "shape", "role", "layout", "bytes", "why")]
    for leaf in plan.leaves:
        shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        change = f"{size(leaf.bytes_before)} -> {size(leaf.bytes_after)}"
        rows.append((leaf.path, shape, leaf.role, leaf.layout, change, leaf.reason))
    lines += _table(rows)
    lines += ["", "collectives"]
    grouped = Counter((c.kind, c.dtype, c.loop) for c in plan.collectives)
    moved = Counter[tuple[str, str, str]]()
    for c in plan.collectives:
        moved[c.kind, c.dtype, c.loop] += round(c.bytes)
    for (kind, dtype, loop), count in grouped.items():
        inside = f"  in each iteration of {loop}" if loop else ""
        lines.append(f"  {count} x {kind} {dtype}, {size(moved[kind, dtype, loop])}{inside}")
    if not plan.collectives:
        lines.append("  none")
    if plan.fallbacks:
        lines += ["", "not sharded"]
        lines += [f"  {f.primitive} at {f.line}: {f.why} ({size(f.bytes)} gathered)" for f in plan.fallbacks]
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


__all__ = ["REPLICATED", "Decided", "Leaf", "Plan", "Replicated", "Total", "decide", "size", "split_layout"]
