"""Run a schedule on a replica's blocks, inside `shard_map`.

Everything was decided by the planner. Here the transfers in front of an equation are made (the only place that
communicates), its primitive is bound on local blocks, and the results are remembered with their layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import compat, fixed_order
from ..core.layout import PARTIAL, Axis, Layout, Placement, Replicated, Split, whole
from ..core.program import Atom, Literal, Var
from ..core.schedule import Bundle, Schedule, Step
from ..core.user_shardings import Kept, by_axes, in_parts
from ..rules import Local
from ..rules.contract import filled
from . import control_flow
from .blocks import block_of
from .collectives import convert, varying
from .host_memory import Stream
from .packing import transfer
from .terms import in_pairs

NO_HINTS: Mapping[Atom, Kept] = {}
NOTHING: Mapping[int, int] = {}


def run(
    schedule: Schedule,
    arrays: Sequence[Any],
    constants: Sequence[Any] | None = None,
    kept: Mapping[Atom, Kept] = NO_HINTS,
    hosted: Mapping[int, int] = NOTHING,
) -> list[Any]:
    """The schedule's outputs on this replica, from this replica's blocks of its inputs.

    `constants` stand in for the program's own, which would otherwise be compiled into it. `kept` says which values lie
    in parts along axes that are not ours, `hosted` which inputs are in host memory, and what replaces them.
    """
    axes = schedule.axes
    env: dict[tuple[Var, Layout], Any] = {}

    def read(atom: Atom, layout: Layout) -> Any:
        if isinstance(atom, Literal):
            value = np.asarray(atom.value, atom.array.dtype)
            return value if layout == whole(axes) else convert(jax.numpy.asarray(value), (), whole(axes), layout, axes)
        return env[atom, layout]

    def write(var: Var, layout: Layout, value: Any) -> None:
        env[var, layout] = _typed(value, layout, axes)

    def move(bundles: Sequence[Bundle]) -> None:
        for bundle in bundles:
            for together in by_axes(bundle, [kept.get(t.var, ()) for t in bundle]):
                hints = [kept.get(t.var, ()) for t in together]
                arrays = [env[t.var, t.source] for t in together]
                moved = in_parts(lambda *xs, b=together: transfer(xs, b, axes), arrays, hints)
                env.update(((t.var, t.target), x) for t, x in zip(together, moved, strict=True))

    for var, layout, array in zip(schedule.program.inputs, schedule.inputs, arrays, strict=True):
        write(var, layout, array)
    for i, (var, value) in enumerate(schedule.program.constants):
        write(var, whole(axes), value if constants is None else constants[i])
    stream = Stream(schedule, hosted)
    for k, (step, bundles) in enumerate(zip(schedule.steps, schedule.transfers, strict=False)):
        stream.fetch(k, env)
        with compat.at_source(step.equation.sources):
            move(bundles)
            operands = [read(a, layout) for a, layout in zip(step.equation.inputs, step.operands, strict=True)]
            act = _in_fixed_order if schedule.fixed_order else _results
            results = act(step, operands, axes)
        for var, layout, value in zip(step.equation.outputs, step.results, results, strict=True):
            write(var, layout, value)
        stream.send(k, env)
    stream.fetch(len(schedule.steps), env)
    env.update(_all_made(schedule.transfers[-1], env, axes))
    move(schedule.transfers[-1])
    outputs = zip(schedule.program.outputs, schedule.outputs, strict=True)
    return stream.finish([_typed(read(atom, layout), layout, axes) for atom, layout in outputs])


def _all_made(
    bundles: Sequence[Bundle], env: Mapping[tuple[Var, Layout], Any], axes: tuple[Axis, ...]
) -> dict[tuple[Var, Layout], Any]:
    """What is gathered for the outputs, after one barrier: nothing is gathered until all of it is computed.

    A new weight is gathered into the donated memory of the old one. The backward pass still reads the old one for the
    layer before, and nothing says that it does so first: XLA would copy the old weight out of the way. But the gradient
    of the layer before waits for that reading, and so does everything that waits for all new weights.

    Only where replicas share one memory. Over a wire, gathers rather overlap with the backward pass, copies and all.
    XLA drops barriers after it has decided on copies; that of JAX 0.10 before, so there nothing changes.
    """
    if not axes[0].backend.in_memory:
        return {}
    alike: dict[frozenset[str], list[tuple[Var, Layout]]] = {}  # a barrier gives all that pass it one type
    for moved in (bundle[0] for bundle in bundles if len(bundle) == 1):  # what shares a bucket is copied anyway
        if any(isinstance(p, Split) for p in moved.source):
            made = moved.var, moved.source
            alike.setdefault(compat.varying_axes(env[made]), []).append(made)
    passed = (zip(made, lax.optimization_barrier([env[m] for m in made]), strict=True) for made in alike.values())
    return dict(itertools.chain.from_iterable(passed))


def _results(step: Step, operands: list[Any], axes: tuple[Axis, ...]) -> Sequence[Any]:
    if step.bodies:
        return control_flow.emit(step, _match(operands, step.operands, axes), run)
    equation, ruling = step.equation, step.ruling
    if ruling.fill:
        blocks = (block_of(a.array.shape, p, axes) for a, p in zip(equation.inputs, step.operands, strict=True))
        operands = [filled(*given) for given in zip(operands, blocks, step.operands, ruling.fill, strict=True)]
    operands = operands if ruling.apart else _alike(operands)
    if equation.primitive is lax.dynamic_slice_p:
        operands = _from_inside(operands, ruling.params["slice_sizes"])
    if ruling.emit is None and equation.primitive.multiple_results:
        return equation.primitive.bind(*operands, **ruling.params)
    if ruling.emit is None:
        return [equation.primitive.bind(*operands, **ruling.params)]
    inputs = tuple(block_of(a.array.shape, p, axes) for a, p in zip(equation.inputs, step.operands, strict=True))
    outputs = tuple(block_of(v.array.shape, p, axes) for v, p in zip(equation.outputs, step.results, strict=True))
    names = tuple(name for axis in axes for name in axis.names)
    local = Local(equation.primitive, ruling.params, inputs, outputs, names)
    return ruling.emit(local, *operands)


def _from_inside(operands: list[Any], window: Sequence[int]) -> list[Any]:
    """Where the window starts, clamped as `dynamic_slice` does, which XLA forgot before JAX 0.12 in a slice of a slice.

    Replicas cut their blocks out of what was sliced, and XLA makes one slice of the two.
    """
    array, *starts = operands
    last = (size - taken for size, taken in zip(array.shape, window, strict=True))
    return [array, *(_clamped(start, n) if n else start for start, n in zip(starts, last, strict=True))]


def _clamped(start: Any, last: int) -> Any:
    kind = start.dtype.type
    return lax.clamp(kind(0), start, kind(min(last, np.iinfo(kind).max)))


def _in_fixed_order(step: Step, operands: list[Any], axes: tuple[Axis, ...]) -> Sequence[Any]:
    """The same, in parts that are as large on any number of replicas: sums are added in pairs, rows joined again."""
    count = 0 if step.bodies else fixed_order.terms(step, axes)
    if count < 2:
        return _results(step, operands, axes)
    parts = [_parts(x, p, count) for x, (p,) in zip(operands, step.operands, strict=True)]
    made = [_results(step, list(part), axes) for part in zip(*parts, strict=True)]
    found = zip(zip(*made, strict=True), step.results, strict=True)
    return [_rejoined(parts, p) if isinstance(p, Split) else in_pairs(parts) for parts, (p,) in found]


def _parts(x: Any, placement: Placement, count: int) -> list[Any]:
    """An operand as each term of the sum reads it. What is a term of a sum itself is added once."""
    if isinstance(placement, Split):
        d, outer = placement.dim, placement.outer
        seen = x.reshape(*x.shape[:d], outer, -1, *x.shape[d + 1 :])
        return [part.reshape(*x.shape[:d], -1, *x.shape[d + 1 :]) for part in jnp.split(seen, count, d + 1)]
    return [x] + [jnp.zeros_like(x) if placement == PARTIAL else x] * (count - 1)


def _rejoined(parts: Sequence[Any], split: Split) -> Any:
    """The undoing of `_parts`."""
    d, outer = split.dim, split.outer
    seen = [x.reshape(*x.shape[:d], outer, -1, *x.shape[d + 1 :]) for x in parts]
    whole = jnp.concatenate(seen, d + 1)
    return whole.reshape(*whole.shape[:d], -1, *whole.shape[d + 2 :])


def _alike(operands: list[Any]) -> list[Any]:
    """JAX's types tell what differs between replicas; a primitive wants operands of one kind."""
    names = set().union(*(compat.varying_axes(x) for x in operands)) if operands else set()
    return [varying(x, *sorted(names)) for x in operands] if names else operands


def _match(operands: list[Any], layouts: Sequence[Layout], axes: tuple[Axis, ...]) -> list[Any]:
    return [_typed(x, layout, axes) for x, layout in zip(operands, layouts, strict=True)]


def _typed(x: Any, layout: Layout, axes: tuple[Axis, ...]) -> Any:
    """A block that its layout calls different between replicas is typed as such, even if it happens not to be."""
    names = [n for a, p in zip(axes, layout, strict=True) if not isinstance(p, Replicated) for n in a.names]
    return varying(x, *names) if names else x
