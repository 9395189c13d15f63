"""Several ways to run one training step, measured against each other.

The contenders take turns, so that whatever else the machine does falls on all of them. Each keeps its state from step
to step; where all of their states together do not fit into memory, they take turns in blocks of steps, and every block
begins with fresh state. Either way the first steps of a state are not counted.

`rows` gives one flat record for each contender. Its keys are the schema of `benchmarks/results/latest.json` and of
`shardstep bench --json`: step_ms is the median, spread the distance between the quartiles in milliseconds, bytes are
those of one device, and wire_bytes is what one device sends in a step.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import importlib.util
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.errors import ShardstepError
from .hlo import collectives, counts, wire_bytes

SCHEMA = (
    "workload",
    "optimizer",
    "devices",
    "variant",
    "step_ms",
    "spread",
    "arg_bytes",
    "temp_bytes",
    "wire_bytes",
    "compile_s",
)
# How far losses may be apart, as a share of the first: the first, the second (which follows from one whole update), and
# the third (which also follows from the moments that were carried over). They part by themselves where a model
# amplifies rounding. In ResNet-50 with BatchNorm on 16 small images, weights that differ by 1e-7 have gradients that
# differ by up to a third (the replicated program against itself); one update later its losses differ by 1e-3.
AGREEMENT = (1e-3, 1e-2, 5e-2)
SHARE_OF_MEMORY = 0.25  # all states together may take this much: at 0.5, on 24 GB, a cell was killed for want of memory


class Disagreement(ShardstepError):
    """The contenders do not compute the same."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to run the step. `advance` takes a state and returns the next one with the loss (or None)."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    start: Callable[[], Any]
    advance: Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Compiled:
    """What a contender's program is. Bytes are those of one device."""

    arg_bytes: int
    temp_bytes: int
    peak_bytes: int
    wire_bytes: float
    collectives: dict[str, int]
    trace_s: float  # down to StableHLO; for shardstep this is capturing, planning and rewriting too
    compile_s: float  # XLA


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, over all threads
    page_faults: int  # memory that was mapped afresh, 4 KiB each


@dataclass(frozen=True)
class Measured:
    contender: str
    compiled: Compiled
    costs: tuple[Cost, ...]
    losses: tuple[float, ...]  # of one unbroken run, warm-up included

    @property
    def step(self) -> Timing:
        return Timing.of([cost.wall for cost in self.costs])


class Timing(NamedTuple):
    """Milliseconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ms = [1e3 * s for s in seconds]
        if len(ms) < 2:
            return cls(ms[0], ms[0], ms[0])
        low, median, high = statistics.quantiles(ms, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def spread(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


def measure(
    contenders: Sequence[Contender], steps: int, warm_up: int = 2, blocks: int = 2, say: Callable[[str], object] = str
) -> list[Measured]:
    """Compile every contender, then run them in turn: `steps` counted steps of each. Their losses must agree."""
    compiled: dict[str, Compiled] = {}
    for contender in contenders:
        say(f"compiling {contender.name}")
        compiled[contender.name] = compile_one(contender)
    say(f"{steps} steps of each")
    if fit_together(list(compiled.values())):
        costs, losses = side_by_side(contenders, steps, warm_up)
    else:
        costs, losses = in_blocks(contenders, -(-steps // blocks), min(warm_up, 1), blocks)
    found = [Measured(c.name, compiled[c.name], tuple(costs[c.name]), tuple(losses[c.name])) for c in contenders]
    require_agreement(found)
    return found


# --- the programs ---------------------------------------------------------------------------------------------------


def compile_one(contender: Contender) -> Compiled:
    lowered, tracing = timed(contender.lower)
    program, compiling = timed(lowered.compile)
    memory = program.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    added = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # XLA's CPU backend leaves temporaries out of what it calls the peak
    peak = max(arguments + temporaries + added, getattr(memory, "peak_memory_in_bytes", 0))
    found = collectives(program.as_text())
    return Compiled(arguments, temporaries, peak, wire_bytes(found), counts(found), tracing.wall, compiling.wall)


def fit_together(programs: Sequence[Compiled]) -> bool:
    """Can the states of all programs be held at once? Simulated devices share the memory of this machine."""
    if jax.devices()[0].platform != "cpu":
        return False
    states = sum(program.arg_bytes for program in programs)
    working = max((program.temp_bytes for program in programs), default=0)
    return (states + 2 * working) * jax.device_count() < SHARE_OF_MEMORY * memory_bytes()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- the runs -------------------------------------------------------------------------------------------------------

Costs = dict[str, list[Cost]]
Losses = dict[str, list[float]]


def side_by_side(contenders: Sequence[Contender], steps: int, warm_up: int) -> tuple[Costs, Losses]:
    """One step each in turn."""
    costs: Costs = {c.name: [] for c in contenders}
    losses: Losses = {c.name: [] for c in contenders}
    states = {c.name: c.start() for c in contenders}
    for i in range(warm_up + steps):
        for c in contenders:
            states[c.name], loss, cost = one_step(c, states[c.name])
            losses[c.name].append(loss)
            costs[c.name] += [cost] if i >= warm_up else []
    return costs, losses


def in_blocks(contenders: Sequence[Contender], steps: int, warm_up: int, blocks: int) -> tuple[Costs, Losses]:
    """A block of steps each in turn, from fresh state, which is gone before the next contender's begins."""
    costs: Costs = {c.name: [] for c in contenders}
    losses: Losses = {}
    for _ in range(blocks):
        for c in contenders:
            state, losses[c.name] = c.start(), []
            for i in range(warm_up + steps):
                state, loss, cost = one_step(c, state)
                losses[c.name].append(loss)
                costs[c.name] += [cost] if i >= warm_up else []
            del state
            gc.collect()
    return costs, losses


def one_step(contender: Contender, state: Any) -> tuple[Any, float, Cost]:
    (state, loss), cost = timed(lambda: jax.block_until_ready(contender.advance(state)))
    return state, float("nan") if loss is None else float(loss), cost


def timed(call: Callable[[], Any]) -> tuple[Any, Cost]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = call()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return result, Cost(wall, cpu, after.ru_minflt - before.ru_minflt)


def require_agreement(found: Sequence[Measured]) -> None:
    """They ran the same step on the same examples, so they saw the same losses; a wrong program may well be fast."""
    told = [m for m in found if not np.isnan(m.losses).all()]
    for m in told[1:]:
        first = told[0]
        apart = np.abs(np.subtract(m.losses, first.losses)) / max(abs(first.losses[0]), 1e-3)
        if not all(a <= limit for a, limit in zip(apart, AGREEMENT, strict=False)):
            raise Disagreement(
                f"{m.contender} computes something else than {first.contender}: losses {m.losses} and {first.losses}"
            )


# --- the records ----------------------------------------------------------------------------------------------------


def rows(found: Sequence[Measured], workload: str, optimizer: str, devices: int, **more: Any) -> list[dict[str, Any]]:
    """One flat record for each contender: the schema's keys first."""
    return [
        {
            "workload": workload,
            "optimizer": optimizer,
            "devices": devices,
            "variant": m.contender,
            "step_ms": round(m.step.median, 4),
            "spread": round(m.step.spread, 4),
            "arg_bytes": m.compiled.arg_bytes,
            "temp_bytes": m.compiled.temp_bytes,
            "wire_bytes": m.compiled.wire_bytes,
            "compile_s": round(m.compiled.compile_s, 3),
            "trace_s": round(m.compiled.trace_s, 3),
            "peak_bytes": m.compiled.peak_bytes,
            "collectives": m.compiled.collectives,
            "cpu_ms": round(Timing.of([cost.cpu for cost in m.costs]).median, 3),
            "page_faults": statistics.median(cost.page_faults for cost in m.costs),
            "steps": len(m.costs),
            "loss": m.losses[-1],
            **more,
            **circumstances(),
        }
        for m in found
    ]


def circumstances() -> dict[str, Any]:
    """When, on what, and with what."""
    named = ("jax", "jaxlib", "libtpu", "optax", "flax", "numpy")
    installed = {d: importlib.metadata.version(d) for d in named if importlib.util.find_spec(d)}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gb": round(memory_bytes() / 1e9, 1),
            "platform": platform.platform(),
            "backend": jax.devices()[0].platform,
            "load": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **installed},
    }


def processor() -> str:
    """The processor's name; Linux keeps it in a file, and `platform` does not look there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
