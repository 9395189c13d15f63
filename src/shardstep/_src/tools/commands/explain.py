"""`shardstep explain`: what shardstep will do with a program, from shapes alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ...api import ShardedStep
from ...capture.arguments import shape_of
from ...core.errors import IndivisibleBatch
from ...core.gc_pause import undisturbed
from ...planning.plan import Plan
from ..report.terminal import NARROW, console_for, render
from . import ahead, target


@dataclass(frozen=True, eq=False)
class Explained:
    """A plan, the program it was made for, and what a reader should know about how it was made."""

    plan: Plan
    program: target.Target
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    program: str
    topology: str | None = None  # the devices are taken for those of this machine
    every: bool = False  # each leaf and collective, not groups of them
    as_json: bool = False
    html: str | None = None
    compile: bool = False  # ask the TPU compiler, too
    settings: Mapping[str, Any] = field(default_factory=dict)  # of `shard`, instead of the program's own


def explain(asked: Request) -> int:
    """Plan a program for all devices and show the plan."""
    target.require_place("--html", asked.html)
    check_compiler(asked)
    with undisturbed():
        found = plan_program(target.find(asked.program), all_devices(), asked.topology, asked.settings)
    plan, notes = found.plan, found.notes
    compilations: tuple[ahead.Compiled, ...] = ()
    if asked.compile and asked.topology is not None:
        compilations = ahead.compile_all(found.program, asked.topology)
    if asked.html is not None:
        plan.to_html(asked.html, title=asked.program, notes=notes)
    if asked.as_json:
        more = {"notes": [*plan.notes, *notes], "compiled": [asdict(c) for c in compilations]}
        print(json.dumps({"program": asked.program, **json.loads(plan.to_json()), **more}, indent=1))
        return 0
    console = console_for(NARROW)
    for part in render(plan, asked.every, notes):
        console.print(part)
    if compilations:
        console.print(ahead.table(compilations, asked.topology or ""))
    if asked.html is not None:
        console.print(f"Report: {asked.html}", soft_wrap=True)
    return 0


def check_compiler(asked: Request) -> None:
    if asked.compile and (asked.topology is None or not ahead.available(asked.topology)):
        raise target.UsageError(
            "--compile asks the TPU compiler: name a TPU with --topology, and install it with pip install"
            " 'shardstep[tpu]'"
        )


def all_devices() -> Mesh:
    return Mesh(np.asarray(jax.devices()), ("data",))


def plan_program(
    factory: Callable[[], Any], mesh: Mesh, topology: str | None = None, settings: Mapping[str, Any] | None = None
) -> Explained:
    """From shapes alone where the factory allows it."""
    try:
        return plan_for(target.shapes(factory), mesh, topology, settings)
    except Exception as error:  # whatever it is, the program on real values has the last word
        found = plan_for(target.call(factory), mesh, topology, settings)
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        note = f"the factory does not run on shapes alone ({why}), so it was run for real"
        return replace(found, notes=(*found.notes, note))


def plan_for(
    program: target.Target, mesh: Mesh, topology: str | None = None, settings: Mapping[str, Any] | None = None
) -> Explained:
    """The plan for as many examples as the replicas can share evenly."""
    sharded = program.sharded(mesh, topology, **(settings or {}))
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
