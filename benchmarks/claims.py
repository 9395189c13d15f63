"""The paper's two claims as numbers: what Adam costs over a simpler optimizer, in time and in memory.

Replicated, Adam's moments are more to read, to write and to keep on every replica; sharded, all of that is divided by
the replicas, and the two ratios come close to one. Read from what was measured on CPU (`latest.json`), compiled
ahead of time for TPUs (`tpu_aot.json`) and measured on an H200 as one replica of many (`gpu_replica.json`):

    python benchmarks/claims.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from recorded import RESULTS, Row, cells, read


class Claim(NamedTuple):
    """Adam's cost over that of `simpler`: ratios of a step's time and of a device's peak memory."""

    machine: str
    workload: str
    variant: str
    simpler: str
    time: float
    memory: float


class Cost(NamedTuple):
    time: float
    memory: float


ADAM = ("adam", "adamw")
SIMPLER = ("sgd", "momentum")
NAMES = {"weights replicated": "shardstep", "weights sharded": "shardstep-sharded"}  # tpu_aot.py's for the same
SHOWN = ("replicated", "shardstep", "shardstep-sharded")


def claims(folder: Path = RESULTS) -> list[Claim]:
    return [
        *compared(on_cpu(read("latest", folder))),
        *compared(on_tpu(read("tpu_aot", folder))),
        *compared(on_gpu(read("gpu_replica", folder))),
    ]


Where = tuple[str, str, str, str]  # machine, workload, variant, optimizer


def compared(costs: Iterable[tuple[Where, Cost]]) -> Iterator[Claim]:
    found = dict(costs)
    for (machine, workload, variant, optimizer), adam in found.items():
        for simpler in SIMPLER:
            other = found.get((machine, workload, variant, simpler))
            if optimizer in ADAM and other is not None and variant in SHOWN:
                ratios = adam.time / other.time, adam.memory / other.memory
                yield Claim(machine, workload, variant, simpler, *ratios)


def on_cpu(rows: list[Row]) -> Iterator[tuple[Where, Cost]]:
    for key, cell in cells(rows).items():
        for variant, row in cell.items():
            where = f"CPU, {key.devices} devices", key.workload, variant, key.optimizer
            yield where, Cost(row["step_ms"], row["peak_bytes"])


def on_tpu(found: list[Row]) -> Iterator[tuple[Where, Cost]]:
    """Time is the compiler's estimate of the cycles of everything but collectives."""
    for row in found:
        cycles = row["cycles_update"] + row["cycles_copies"] + row["cycles_rest"]
        variant = NAMES.get(row["variant"], row["variant"])
        yield (f"TPU {row['topology']}", row["workload"], variant, row["optimizer"]), Cost(cycles, row["peak_mb"])


def on_gpu(found: list[Row]) -> Iterator[tuple[Where, Cost]]:
    """Collectives are mocked, so time is that of the replica's own work."""
    for row in found:
        for variant, m in row.get("variants", {}).items():
            if "step_ms" in m:
                machine = f"{row['device']}, one replica of {row['replicas']}"
                memory = m["argument_bytes"] + m["temporary_bytes"]
                yield (machine, row["workload"], variant, row.get("optimizer", "adam")), Cost(m["step_ms"], memory)


if __name__ == "__main__":
    for c in claims():
        print(f"{c.machine:28s} {c.workload:18s} {c.variant:18s} Adam/{c.simpler:9s} {c.time:5.2f} {c.memory:5.2f}")
