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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from ..api import Rewritten, ShardedStep
from ..arguments import abstract
from ..report.summary import size
from ..topology import describe
from .target import Target


@dataclass(frozen=True)
class Compiled:
    """One program, as the compiler sees it: bytes on a replica, and cycles without those of collectives."""

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
        mesh = sharded.replicas.mesh
        everywhere = [PartitionSpec()] * len(program.captured.paths)
        by_hand = [_by_hand(leaf.role, leaf.shape, mesh) for leaf in program.plan.leaves]
        yield "replicated", _annotated(sharded, program, everywhere)
        yield "ZeRO-1 by hand", _annotated(sharded, program, by_hand)
    yield "shardstep", sharded.lower(*args)


def _by_hand(role: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """What one writes today: each moment split along its first dimension that the replicas divide."""
    dims = [d for d, n in enumerate(shape) if n % mesh.size == 0] if role == "auxiliary" else []
    return PartitionSpec(*[None] * dims[0], tuple(mesh.axis_names)) if dims else PartitionSpec()


def _annotated(sharded: ShardedStep, program: Rewritten, specs: list[PartitionSpec]) -> jax.stages.Lowered:
    """The user's own step under `jax.jit`, its state laid out as given."""
    captured, mesh = program.captured, sharded.replicas.mesh
    specs = list(specs)
    for i, dim in captured.batch.items():
        specs[i] = PartitionSpec(*[None] * dim, tuple(mesh.axis_names))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    outputs: list[NamedSharding | None] = [None] * len(captured.program.outputs)
    for i, o in captured.state.items():
        outputs[o] = shardings[i]

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = captured.call.rebuild(leaves)
        return [x for x in jax.tree.leaves(sharded.step(*args, **kwargs)) if hasattr(x, "dtype") or np.isscalar(x)]

    step = jax.jit(flat, in_shardings=shardings, out_shardings=outputs, donate_argnums=tuple(captured.state))
    return step.lower(*map(abstract, captured.call.leaves))


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
