"""`shardstep explain`: what shardstep will do with a program, from shapes alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...api import ShardedStep
from ...capture.arguments import shape_of
from ...core.errors import IndivisibleBatch
from ...core.gc_pause import undisturbed
from ...planning.plan import Plan
from ..report.terminal import console_for, render
from . import ahead, target


@dataclass(frozen=True, eq=False)
class Explained:
    """A plan, the program it was made for, and what a reader should know about how it was made."""

    plan: Plan
    program: target.Target
    notes: tuple[str, ...]


def explain(name: str, topology: str | None, every: bool, as_json: bool, html: str | None, compiled: bool) -> int:
    """Plan the program `name` for all devices, taken for those of a topology if one is named, and show the plan."""
    target.require_place("--html", html)
    with undisturbed():
        found = plan_program(target.find(name), all_devices(), topology)
    plan, notes = found.plan, found.notes
    compilations: tuple[ahead.Compiled, ...] = ()
    if compiled and topology is not None and ahead.available(topology):
        compilations = ahead.compile_all(found.program, topology)
    if html is not None:
        plan.to_html(html, title=name, notes=notes)
    if as_json:
        more = {"notes": [*plan.notes, *notes], "compiled": [asdict(c) for c in compilations]}
        print(json.dumps({"program": name, **json.loads(plan.to_json()), **more}, indent=1))
        return 0
    console = console_for()
    for part in render(plan, every, notes):
        console.print(part)
    if compilations:
        console.print(ahead.table(compilations, topology or ""))
    if html is not None:
        console.print(f"Report: {html}", soft_wrap=True)
    return 0


def all_devices() -> Mesh:
    return Mesh(np.asarray(jax.devices()), ("data",))


def plan_program(factory: Callable[[], Any], mesh: Mesh, topology: str | None = None) -> Explained:
    """From shapes alone where the factory allows it."""
    try:
        return plan_for(target.shapes(factory), mesh, topology)
    except Exception as error:  # whatever it is, the program on real values has the last word
        found = plan_for(target.call(factory), mesh, topology)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        note = f"the factory does not run on shapes alone ({why}), so it was run for real"
        return replace(found, notes=(*found.notes, note))


def plan_for(program: target.Target, mesh: Mesh, topology: str | None = None) -> Explained:
    """The plan for as many examples as the replicas can share evenly."""
    sharded = program.sharded(mesh, topology)
    try:
        examples = sharded.program(program.args, {})[0].captured.batch
    except IndivisibleBatch as error:
        examples = error.examples
    args, notes = _rebatched(sharded, program.args, examples)
    return Explained(sharded.plan(*args), replace(program, args=args), notes)


def _rebatched(
    sharded: ShardedStep, args: tuple[Any, ...], examples: dict[int, int]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The arguments with as many examples as the replicas need to share them evenly: only shapes change."""
    call, replicas = sharded.take_apart(args), sharded.replicas.count
    leaves = list(call.leaves)
    sizes = {shape_of(leaves[i])[0][dim] for i, dim in examples.items()}
    scale = {size: math.ceil(size / replicas) * replicas for size in sizes if size % replicas}
    if not scale:
        return args, ()
    for i, dim in examples.items():
        shape, dtype = shape_of(leaves[i])
        size = scale.get(shape[dim], shape[dim])
        leaves[i] = jax.ShapeDtypeStruct((*shape[:dim], size, *shape[dim + 1 :]), dtype)
    given, used = (" and ".join(map(str, sorted(n))) for n in (scale, scale.values()))
    rebuilt, _ = call.rebuild(leaves)
    return rebuilt, (f"planned for a batch of {used} examples: {replicas} replicas do not share {given} evenly",)
