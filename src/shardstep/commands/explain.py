"""`shardstep explain`: what shardstep will do with a program, from shapes alone."""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..api import ShardedStep
from ..arguments import shape_of
from ..errors import IndivisibleBatch
from ..plan import Plan
from ..report.terminal import console_for, render
from . import target

Planned = tuple[Plan, list[str]]


def explain(name: str, topology: str | None, every: bool, as_json: bool, html: str | None) -> int:
    """Plan the program `name` for all devices, taken for those of a topology if one is named, and show the plan."""
    with undisturbed():
        plan, notes = plan_program(target.find(name), all_devices(), topology)
    if html is not None:
        plan.to_html(html, title=name, notes=notes)
    if as_json:
        print(json.dumps({"program": name, **json.loads(plan.to_json()), "notes": [*plan.notes, *notes]}, indent=1))
        return 0
    console = console_for()
    for part in render(plan, every, notes):
        console.print(part)
    if html is not None:
        console.print(f"Report: {html}", soft_wrap=True)
    return 0


def all_devices() -> Mesh:
    return Mesh(np.asarray(jax.devices()), ("data",))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without the garbage collector: planning makes no garbage, and a walk through a large program's millions of
    objects every so often would take longer than the planning.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_program(factory: Callable[[], Any], mesh: Mesh, topology: str | None = None) -> Planned:
    """The plan, and what a reader should know about how it was made."""
    try:
        return plan_for(target.shapes(factory), mesh, topology)
    except Exception as error:  # whatever it is, the program on real values has the last word
        plan, notes = plan_for(target.call(factory), mesh, topology)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        return plan, [*notes, f"the factory does not run on shapes alone ({why}), so it was run for real"]


def plan_for(program: target.Target, mesh: Mesh, topology: str | None = None) -> Planned:
    sharded = program.sharded(mesh, topology)
    try:
        return sharded.plan(*program.args), []
    except IndivisibleBatch as error:
        args, kwargs, note = _rebatched(sharded, program.args, error.examples)
        return sharded.plan(*args, **kwargs), [note]


def _rebatched(sharded: ShardedStep, args: tuple[Any, ...], examples: dict[int, int]) -> tuple[Any, dict, str]:
    """The arguments with as many examples more as the replicas need to share them evenly: only shapes."""
    call = sharded.take_apart(args)
    leaves = list(call.leaves)
    sizes = {shape_of(leaves[i])[0][dim] for i, dim in examples.items()}
    scale = {size: math.ceil(size / sharded.replicas.count) * sharded.replicas.count for size in sizes}
    for i, dim in examples.items():
        shape, dtype = shape_of(leaves[i])
        leaves[i] = jax.ShapeDtypeStruct((*shape[:dim], scale[shape[dim]], *shape[dim + 1 :]), dtype)
    given, used = (" and ".join(map(str, sorted(n))) for n in (scale, scale.values()))
    rebuilt, kwargs = call.rebuild(leaves)
    return rebuilt, kwargs, f"planned for a batch of {used} examples: the factory's {given} do not divide"
