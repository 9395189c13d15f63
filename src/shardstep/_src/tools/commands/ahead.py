"""What the TPU compiler itself says of a step, without a TPU.

The package libtpu compiles for a machine that is only named. Three programs are compiled: the state replicated, the
optimizer's state annotated by hand (ZeRO-1), and what shardstep makes of the step.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from ...api import ShardedStep
from ...capture.arguments import abstract
from ...machine.topology import describe
from ...planning.formatting import size
from .. import baselines
from .target import Target


@dataclass(frozen=True)
class Compiled:
    """One program, as the compiler sees it: bytes per replica, and cycles without those of collectives."""

    program: str
    argument_bytes: int
    temporary_bytes: int
    cycles: int
    compile_seconds: float


def available(topology: str) -> bool:
    return describe(topology).platform == "tpu" and importlib.util.find_spec("libtpu") is not None


def compile_all(target: Target, topology: str) -> tuple[Compiled, ...]:
    """Compile the three programs for the machine."""
    from jax.experimental import topologies

    found: list[Any] = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(np.array(sorted(found, key=lambda d: d.id)), ("data",))
    sharded = target.sharded(mesh)
    return tuple(_measured(name, lowered) for name, lowered in _programs(sharded, target.args))


def _programs(sharded: ShardedStep, args: tuple[Any, ...]) -> Iterator[tuple[str, jax.stages.Lowered]]:
    program, _ = sharded.program(args, {})
    if sharded.axis_name is None:
        mesh, leaves = sharded.replicas.mesh, [abstract(leaf) for leaf in program.captured.call.leaves]
        for name, lay_out in (("replicated", baselines.everywhere), ("ZeRO-1 by hand", baselines.zero1)):
            yield name, baselines.annotated(sharded, program, mesh, lay_out(program, mesh)).lower(*leaves)
    yield "shardstep", sharded.lower(*args)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def _measured(name: str, lowered: jax.stages.Lowered) -> Compiled:
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    cycles = sum(map(int, _CYCLES.findall(compiled.as_text() or "")))
    return Compiled(name, memory.argument_size_in_bytes, memory.temp_size_in_bytes, cycles, seconds)


def table(found: tuple[Compiled, ...], topology: str) -> Table:
    title = f"What the TPU compiler says, for {topology} (cycles of collectives are not counted)"
    shown = Table("program", title=title, title_justify="left", title_style="bold")
    for name in ("arguments", "temporaries", "estimated cycles", "compiled in"):
        shown.add_column(name, justify="right")
    for c in found:
        memory = size(c.argument_bytes), size(c.temporary_bytes)
        shown.add_row(c.program, *memory, f"{c.cycles:,}", f"{c.compile_seconds:.1f} s")
    return shown
