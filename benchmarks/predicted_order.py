"""Does the cost model put the variants of the suite in the order in which they were measured?

    python benchmarks/predicted_order.py                      # all cells of benchmarks/results/latest.json
    python benchmarks/predicted_order.py --only mlp-4x1024    # some of them

For each cell: the replicated step, and shardstep with its weights replicated and sharded, planned by shapes for as many
simulated devices as were measured. Two variants are compared where the measured times differ by more than 15 %. Nothing
runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]
APART = 1.15
PLANNED = {"shardstep": "replicated", "shardstep-sharded": "sharded"}


class Pair(NamedTuple):
    """Two variants of one cell, the one that was measured to be faster first."""

    cell: str
    names: tuple[str, str]
    measured: tuple[float, float]  # milliseconds
    predicted: tuple[float, float]

    @property
    def agrees(self) -> bool:
        return self.predicted[0] < self.predicted[1]

    def __str__(self) -> str:
        sides = (f"{n} {m:.0f} ({p:.1f})" for n, m, p in zip(self.names, self.measured, self.predicted, strict=True))
        return f"{'agrees   ' if self.agrees else 'DISAGREES'} {self.cell:34s} {' before '.join(sides)} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "latest.json")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    pairs = []
    for cell, measured in cells(json.loads(args.results.read_text())):
        if args.only is None or cell[0] in args.only:
            for pair in compared(cell, measured, predicted(*cell)):
                pairs.append(pair)
                print(pair, flush=True)
    print(f"{sum(p.agrees for p in pairs)} of {len(pairs)} pairs that differ by more than 15 % are in the right order")


def cells(rows: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, int], dict[str, float]]]:
    """Each workload, optimizer and number of devices (several: one has nothing to share), with its milliseconds."""
    from workloads import WORKLOADS

    key = lambda r: (r["workload"], r["optimizer"], r["devices"])  # noqa: E731
    for cell, group in itertools.groupby(sorted(rows, key=key), key):
        if cell[0] in WORKLOADS and cell[2] > 1:
            yield cell, {r["variant"]: r["step_ms"] for r in group}


def predicted(name: str, optimizer: str, devices: int) -> dict[str, float]:
    """Milliseconds by variant."""
    from workloads import WORKLOADS

    import shardstep

    workload = WORKLOADS[name](devices, optimizer)
    state = jax.eval_shape(workload.init)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    found = {}
    for variant, weights in PLANNED.items():
        options = shardstep.Options(engine="rewrite")
        plan = shardstep.shard(workload.step, mesh, weights=weights, batch_argnums=1, options=options)
        seconds = plan.plan(state, workload.batch).step_seconds
        found |= {variant: 1e3 * seconds.sharded, "replicated": 1e3 * seconds.replicated}
    return found


def compared(cell: tuple[str, str, int], measured: dict[str, float], found: dict[str, float]) -> Iterator[Pair]:
    for pair in itertools.combinations(sorted(found.keys() & measured.keys()), 2):
        fast, slow = sorted(pair, key=measured.__getitem__)
        if measured[slow] > APART * measured[fast]:
            times = (measured[fast], measured[slow]), (found[fast], found[slow])
            yield Pair(" ".join(map(str, cell)), (fast, slow), *times)


if __name__ == "__main__":
    main()
