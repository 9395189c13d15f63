"""In which dtype values travel, where the user asks for another than their own.

`reduce_dtype` is for gradients, `gather_dtype` for weights that rest sharded. Neither word means anything to a program,
so both are told apart by where a value goes: a weight goes on to meet the examples; a gradient does not (it goes to the
state). Sums that the forward pass reads again (BatchNorm's statistics), scalars (a loss, a norm) and whatever the state
keeps are left as they are.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..core.layout import Layout, Partial, Replicated, Split, is_batch
from ..core.program import Atom, Var
from ..core.schedule import Schedule, Step, Transfer
from .propagation import loops


def travel_in(schedule: Schedule, reduce_dtype: Any, gather_dtype: Any, later: Container[int] = ()) -> Schedule:
    """The same schedule, with transfers of gradients and of weights in the dtypes asked for.

    `later`: the outputs that meet the examples outside, where this is the body of a loop.
    """
    if reduce_dtype is None and gather_dtype is None:
        return schedule
    meeting = _meeting_examples(schedule, later)

    def dressed(t: Transfer) -> Transfer:
        if reduce_dtype is not None and _is_gradient(t) and t.var not in meeting:
            return replace(t, dtype=reduce_dtype)
        if gather_dtype is not None and _is_weight(t, gather_dtype) and _only_met(schedule, t, meeting):
            return replace(t, dtype=gather_dtype)
        return t

    steps = []
    for step in schedule.steps:
        outside = _later(step, meeting)
        bodies = tuple(travel_in(body, reduce_dtype, gather_dtype, outside) for body in step.bodies)
        steps.append(step._replace(bodies=bodies) if bodies else step)
    transfers = tuple(tuple(tuple(map(dressed, b)) for b in bundles) for bundles in schedule.transfers)
    return replace(schedule, steps=tuple(steps), transfers=transfers)


def _is_gradient(t: Transfer) -> bool:
    """A sum over replicas is formed of more than one number."""
    formed = any(
        isinstance(a, Partial) and a.op == "add" and not isinstance(b, Partial)
        for a, b in zip(t.source, t.target, strict=True)
    )
    return formed and t.var.array.ndim > 0 and jnp.issubdtype(t.var.array.dtype, jnp.floating)


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
