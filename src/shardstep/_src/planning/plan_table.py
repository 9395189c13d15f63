"""The plan as a plain-text table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .engines import enough
from .formatting import array, count, duration, size
from .host_memory import REFUSED
from .plan import Leaf, Owned, Plan
from .programs import Total


def _change(total: Total) -> str:
    return f"{duration(total.replicated)} -> {duration(total.sharded)}"


def _busy(plan: Plan) -> list[str]:
    """Where there are several data axes: how evenly their links are used."""
    if not plan.axis_seconds:
        return []
    listed = ", ".join(f"{axis} {duration(seconds)}" for axis, seconds in plan.axis_seconds)
    return [f"  links busy        {listed}: what the wire would take if collectives overlap"]


def too_large(plan: Plan) -> str:
    """How much memory is missing, and what would help; empty if the plan fits."""
    if plan.fits or plan.memory is None:
        return ""
    state = sum(leaf.bytes_after for leaf in plan.leaves if leaf.role != "batch" and leaf.memory == "device")
    said = (
        f"the step needs {size(plan.peak_bytes.sharded)} per device, {size(plan.missing_bytes)} more than the"
        f" {size(plan.memory)} there are"
    )
    helps = []
    if plan.weights == "replicated":
        helps.append('weights="sharded"')
    if plan.why_offload == REFUSED:
        helps.append("Options(offload=None), which lets optimizer state rest in the host's memory")
    if plan.group < plan.replicas:
        helps.append(f"group={plan.replicas}")
    if state > plan.memory:
        helps.append(f"more replicas (weights, moments and inputs alone take {size(state)})")
    else:
        helps.append("fewer examples per replica, jax.checkpoint around each layer, or more replicas")
    return f"{said}; what would help: {'; '.join(helps)}"


def more_wire(plan: Plan) -> str:
    """What is sent beyond the replicated step, and why; empty if nothing is."""
    before, after = plan.wire_bytes.replicated, plan.wire_bytes.sharded
    if enough(after, before):
        return ""
    layers = sum(c.total for c in plan.collectives if c.kind == "all-gather" and c.loop and c.times > 1)
    fallbacks = sum(f.bytes for f in plan.fallbacks)
    said = f"{size(after)} per replica and step, {size(after - before)} more than the replicated step"
    if layers and layers >= fallbacks:
        limit = " so that the step fits" if plan.memory and plan.peak_bytes.replicated > plan.memory else ""
        return f"{said}: {size(layers)} are layers that are gathered where a loop reads them, not held whole{limit}"
    return f"{said}: {plan.why_engine}"


def _limit(plan: Plan) -> str:
    return "" if plan.memory is None else f" of {size(plan.memory)} per device"


def _hosted(plan: Plan) -> list[str]:
    """Optimizer state that rests in the host's memory; or why none does although that was asked for."""
    if not plan.why_offload:
        return []
    return [f"  host memory       {size(plan.host_bytes)} per replica ({plan.why_offload})"]


def _gathered(plan: Plan) -> list[str]:
    """What is listed at the end is announced at the beginning."""
    if not plan.fallbacks:
        return []
    moved = size(sum(f.bytes for f in plan.fallbacks))
    return [f"  not sharded       {len(plan.fallbacks)} x, {moved} gathered: see the end"]


def table(plan: Plan) -> str:
    """The plan as text: the headline, every leaf, what is communicated, what could not be sharded."""
    rows = [("leaf", "shape", "role", "layout", "bytes", "why")]
    for leaf in plan.leaves:
        shape = array(leaf.dtype, leaf.shape)
        change = f"{size(leaf.bytes_before)} -> {size(leaf.bytes_after)}"
        rows.append((leaf.path, shape, leaf.role, leaf.layout, change, leaf.reason + _where(leaf)))
    if plan.replicas == 1:
        return "\n".join([*_alone(plan), "", *_table(rows)])
    lines = [*_headline(plan), "", *_table(rows), "", "collectives"]
    grouped = Counter((c.kind, c.dtype, c.loop) for c in plan.collectives)
    moved = Counter[tuple[str, str, str]]()
    for c in plan.collectives:
        moved[c.kind, c.dtype, c.loop] += round(c.bytes)
    for (kind, dtype, loop), number in grouped.items():
        inside = f"  in each iteration of {loop}" if loop else ""
        lines.append(f"  {number} x {kind} {dtype}, {size(moved[kind, dtype, loop])}{inside}")
    if plan.engine == "annotate":
        lines.append("  XLA's own: see step.lower(...).compile().as_text()")
    elif not plan.collectives:
        lines.append("  none")
    if plan.owned:
        lines += ["", "whole matrices in the update", *(f"  {_owner(o)}" for o in plan.owned)]
    if plan.fallbacks:
        lines += ["", "not sharded"]
        lines += [f"  {f.primitive} at {f.line}: {f.why} ({size(f.bytes)} gathered)" for f in plan.fallbacks]
    return "\n".join(lines)


def _alone(plan: Plan) -> list[str]:
    """The headline where there is one replica."""
    return [
        "shardstep plan for one replica: there is nothing to share, so the step runs as it is",
        *(f"  DOES NOT FIT      {line}" for line in [too_large(plan)] if line),
        f"  machine           {plan.topology}",
        f"  state             {size(plan.state_bytes.sharded)}",
        f"  predicted peak    {size(plan.peak_bytes.sharded)}{_limit(plan)}",
        *(f"  note              {note}" for note in plan.notes),
    ]


def _headline(plan: Plan) -> list[str]:
    return [
        f"shardstep plan for {plan.replicas} replicas, weights {plan.weights} ({plan.why_weights})",
        *(f"  DOES NOT FIT      {line}" for line in [too_large(plan)] if line),
        *(f"  SENDS MORE        {line}" for line in [more_wire(plan)] if line),
        *(f"  LOSES PRECISION   {line}" for line in [plan.lossy] if line),
        f"  machine           {plan.topology}",
        f"  state shared by   {plan.group} replicas ({plan.why_group})",
        f"  state per replica {size(plan.state_bytes.replicated)} -> {size(plan.state_bytes.sharded)}"
        f"   ({plan.auxiliary_share:.1%} of the optimizer's bytes are sharded)",
        f"  wire per replica  {size(plan.wire_bytes.replicated)} -> {size(plan.wire_bytes.sharded)}",
        f"  predicted         wire {_change(plan.wire_seconds)}, update {_change(plan.update_seconds)}",
        f"  predicted peak    {size(plan.peak_bytes.replicated)} -> {size(plan.peak_bytes.sharded)}{_limit(plan)}",
        f"  predicted step    {_change(plan.step_seconds)} (wire, products and passes over memory, without overlap)",
        *_busy(plan),
        f"  update work       {plan.update_flops.replicated:.3g} -> {plan.update_flops.sharded:.3g} elements",
        f"  engine            {plan.engine} ({plan.why_engine})",
        *_hosted(plan),
        *(f"  note              {note}" for note in plan.notes),
        *_gathered(plan),
    ]


def _where(leaf: Leaf) -> str:
    return "" if leaf.memory == "device" else "; in host memory"


def _owner(o: Owned) -> str:
    """`12 x float32[192,512]: 1 or 2 per replica, 146G -> 24.3G flops per replica, train.py:12`"""
    work = f"{count(o.flops_before)} -> {count(o.flops_after)} flops per replica"
    return f"{o.count} x {array(o.dtype, o.shape)}: {o.who}, {work}; {o.why}; {o.line}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
