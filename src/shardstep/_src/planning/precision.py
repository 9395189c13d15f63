"""In which dtype values travel and are added, where the user asks for another than their own.

`reduce_dtype` and `reduce` are for gradients, `gather_dtype` for weights that rest sharded, `wire` for both. Neither
word means anything to a program, so both are told apart by where a value goes: a weight goes on to meet the examples; a
gradient does not (it goes to the state). Sums that the forward pass reads again (BatchNorm's statistics), scalars (a
loss, a norm) and whatever the state keeps are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import fixed_order
from ..core.errors import ShardstepError
from ..core.layout import Layout, Partial, Replicated, Split, is_batch
from ..core.options import Options
from ..core.program import Atom, Var
from ..core.schedule import Schedule, Step, Transfer
from ..core.wire import BLOCK, Wire
from ..machine.replicas import Replicas
from .formatting import size
from .propagation import loops


def travel_in(schedule: Schedule, options: Options, later: Container[int] = ()) -> Schedule:
    """The same schedule, with transfers of gradients and of weights as asked for.

    `later`: the outputs that meet the examples outside, where this is the body of a loop.
    """
    asked = (options.reduce_dtype, options.gather_dtype, options.reduce, options.wire)
    if all(a is None for a in asked) and not options.deterministic:
        return schedule
    meeting = _meeting_examples(schedule, later)
    replicas = math.prod(axis.size for axis in schedule.axes)
    gathered_in = np.dtype(np.int8) if options.wire else options.gather_dtype

    def dressed(t: Transfer) -> Transfer:
        large = _is_large(t, replicas)
        if options.deterministic and _is_sum(t):
            return replace(t, wire=Wire(jnp.dtype(t.var.array.dtype), pairs=True))
        if _is_gradient(t) and t.var not in meeting:
            return _summed(t, options, large)
        if gathered_in is None or not _is_weight(t, gathered_in) or not _only_met(schedule, t, meeting):
            return t
        if options.wire:
            return replace(t, wire=Wire(gathered_in)) if large else t
        return replace(t, dtype=gathered_in)

    steps = []
    for step in schedule.steps:
        outside = _later(step, meeting)
        bodies = tuple(travel_in(body, options, outside) for body in step.bodies)
        steps.append(step._replace(bodies=bodies) if bodies else step)
    transfers = tuple(tuple(tuple(map(dressed, b)) for b in bundles) for bundles in schedule.transfers)
    return replace(schedule, steps=tuple(steps), transfers=transfers, fixed_order=options.deterministic)


def _summed(t: Transfer, options: Options, large: bool) -> Transfer:
    """A gradient on its way."""
    if options.wire:
        return replace(t, wire=Wire(np.dtype(np.int8))) if large and jnp.dtype(t.var.array.dtype).itemsize <= 4 else t
    travels = jnp.dtype(options.reduce_dtype or t.var.array.dtype)
    if options.reduce and travels.itemsize == 2 and t.var.array.size:
        return replace(t, wire=Wire(travels))
    return t if options.reduce_dtype is None else replace(t, dtype=options.reduce_dtype)


def lossy(schedule: Schedule, options: Options) -> str:
    """What an 8-bit wire costs in precision; empty without one."""
    if options.wire is None:
        return ""
    found = [c for c in schedule.collectives if c.dtype == options.wire]
    gathered = sum(c.tensors for c in found if c.kind == "all-gather")
    sums = sum(c.tensors for c in found if c.kind == "all-to-all")
    nbytes = sum(c.total for c in found)
    return (
        f"wire={options.wire!r}: {sums} gradients and {gathered} gathers travel in 8 bits ({size(nbytes)}), each"
        f" element to within 1/254 of the largest of {BLOCK}; shardstep.check measures what that does to the numbers"
    )


def added_in_float32(schedule: Schedule, options: Options) -> str:
    """Which sums are exact but for one rounding; empty where that was not asked for."""
    if options.reduce is None:
        return ""
    wires = {t.wire for t in _transfers(schedule) if t.wire}
    if not wires:
        return f"reduce={options.reduce!r}: no gradient travels in 16 bits, so nothing changes"
    return (
        f"reduce={options.reduce!r}: gradients travel in {', '.join(sorted(map(str, wires)))} and are added in float32"
    )


def in_fixed_order(schedule: Schedule, options: Options) -> tuple[str, ...]:
    """What is added in an order that knows no replicas, what that costs, and what is not."""
    if not options.deterministic:
        return ()
    found = list(fixed_order.sums(schedule))
    other = sorted({f"{s.equation.primitive} at {s.equation.line}" for s, terms in found if not terms})
    if any(p.permuted for s in schedule.steps for layout in s.operands for p in layout if isinstance(p, Split)):
        other.append("microbatches, which the replicas share in an order of their own")
    told = (
        f"deterministic=True: {len(found)} sums of up to {fixed_order.TERMS} terms are added in pairs, each at once, in"
        f" {len([c for c in schedule.collectives if c.kind == 'all-to-all'])} exchanges; products with the examples are"
        " done in as many parts"
    )
    but = f"deterministic=True: on another number of replicas another order for {'; '.join(other)}"
    return (told, but) if other else (told,)


def wire_notes(schedule: Schedule, options: Options) -> tuple[str, ...]:
    """What the plan has to say about sums."""
    return (*filter(None, [added_in_float32(schedule, options)]), *in_fixed_order(schedule, options))


def check_order(options: Options, axis_name: str | None, replicas: Replicas) -> None:
    """May sums be formed in a fixed order here?"""
    if not options.deterministic:
        return
    if axis_name is not None:
        raise ShardstepError(
            f"Options(deterministic=True) with axis_name={axis_name!r}: a per-replica step says itself what is added"
            " within a replica. Write the step for the whole batch."
        )
    if len(replicas.axes) > 1:
        raise ShardstepError(
            f"Options(deterministic=True) on {len(replicas.axes)} data axes (of the mesh, a torus, or group=): sums are"
            " formed axis by axis there. Use one axis: axis=, group=the number of replicas."
        )
    if fixed_order.TERMS % replicas.count:
        raise ShardstepError(
            f"Options(deterministic=True) on {replicas.count} replicas: sums are formed in pairs of up to"
            f" {fixed_order.TERMS} terms. Use 1, 2, 4, ... {fixed_order.TERMS} replicas."
        )


def _transfers(schedule: Schedule) -> Iterator[Transfer]:
    for bundles in schedule.transfers:
        for bundle in bundles:
            yield from bundle
    for step in schedule.steps:
        for body in step.bodies:
            yield from _transfers(body)


_LEAST = 8 * BLOCK  # elements per replica: biases and scales are few, and feel what is lost


def _is_large(t: Transfer, replicas: int) -> bool:
    return t.var.array.size >= replicas * _LEAST


def _is_gradient(t: Transfer) -> bool:
    """A sum over replicas is formed of more than one number."""
    return _is_sum(t) and t.var.array.ndim > 0 and jnp.issubdtype(t.var.array.dtype, jnp.floating)


def _is_sum(t: Transfer) -> bool:
    """A sum of floats over replicas is formed."""
    formed = any(
        isinstance(a, Partial) and a.op == "add" and not isinstance(b, Partial)
        for a, b in zip(t.source, t.target, strict=True)
    )
    return formed and t.var.array.size > 0 and jnp.issubdtype(t.var.array.dtype, jnp.inexact)


def _is_weight(t: Transfer, dtype: Any) -> bool:
    """Blocks of state become whole, and would travel in more bytes."""
    gathered = any(
        isinstance(a, Split) and not is_batch(a) and isinstance(b, Replicated)
        for a, b in zip(t.source, t.target, strict=True)
    )
    own = t.var.array.dtype
    return gathered and jnp.issubdtype(own, jnp.floating) and jnp.dtype(own).itemsize > jnp.dtype(dtype).itemsize


def _only_met(schedule: Schedule, t: Transfer, meeting: Container[Atom]) -> bool:
    """Does everybody who reads the value in its new layout take it to the examples? Nobody else gets it rounded."""
    if any(
        a is t.var and layout == t.target for a, layout in zip(schedule.program.outputs, schedule.outputs, strict=True)
    ):
        return False
    if any(o.var is t.var and o.source == t.target for bundles in schedule.transfers for b in bundles for o in b):
        return False
    readers = [s for s in schedule.steps if _reads(s, t.var, t.target)]
    return bool(readers) and all(
        s.ruling.over_examples or any(v in meeting for v in s.equation.outputs) for s in readers
    )


def _reads(step: Step, var: Var, layout: Layout) -> bool:
    return any(a is var and at == layout for a, at in zip(step.equation.inputs, step.operands, strict=True))


def _meeting_examples(schedule: Schedule, later: Container[int]) -> set[Atom]:
    """The values that some equation over the examples is computed from. Loops are not followed round."""
    meeting: set[Atom] = {a for i, a in enumerate(schedule.program.outputs) if i in later and isinstance(a, Var)}
    for step in reversed(schedule.steps):
        inputs = step.equation.inputs
        if step.bodies:
            first, outside = loops.first_operand(step), _later(step, meeting)
            inside = [_meeting_examples(body, outside) for body in step.bodies]
            for body, found in list(zip(step.bodies, inside, strict=True))[-len(step.equation.bodies) :]:
                meeting.update(a for a, v in zip(inputs[first:], body.program.inputs, strict=False) if v in found)
        elif step.ruling.over_examples or any(v in meeting for v in step.equation.outputs):
            meeting.update(a for a in inputs if isinstance(a, Var))
    return meeting


def _later(step: Step, meeting: Container[Atom]) -> set[int]:
    return {i for i, v in enumerate(step.equation.outputs) if v in meeting}
