"""The benchmark suite: shardstep against what one would do instead.

    make bench                                  # everything; on two idle cores well under an hour
    make bench-quick                            # a few cells, under five minutes
    python benchmarks/suite.py --only resnet50  # the cells of one workload; other rows stay as they are
    python benchmarks/suite.py --estimate       # how long it will take, from the rows that are there

Each cell runs in a process of its own (see cell.py), in which its variants take turns. Rows are kept in
`results/latest.json`, a list that is written anew after every cell, with the commit and a digest of the code; the quick
suite leaves the rows of other cells as they are. `results/calls.json` holds what a call costs in Python,
`results/planning.json` what planning costs, `results/growth.json` how cost grows, `results/history.jsonl` the medians
of every commit. The goals are judged from those files (goals.py), and so are the
claims of the paper (claims.py).

GPT-2-small is measured on 4 devices: 8 replicas of its Adam state and of its temporaries would need 20 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import goals
import history
from recorded import RESULTS, Key, Row, cells, keep, kind, read, revision

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Cell:
    workload: str
    optimizer: str
    devices: int = 8
    steps: int = 9
    malloc: str = "keep"

    def __str__(self) -> str:
        return f"{self.workload}, {self.optimizer}, {self.devices} devices"


FULL = (
    # the transformer with every optimizer: the paper's claims
    Cell("transformer-42m", "adamw+clip"),
    *(Cell("transformer-42m", name, steps=5) for name in ("sgd", "momentum", "adam", "lamb", "adafactor")),
    # scaling with the number of replicas, and with the model
    *(Cell("transformer-42m", "adamw+clip", devices) for devices in (1, 2, 4)),
    *(Cell(f"transformer-{width}", "adamw+clip") for width in (256, 512, 768)),
    # what large users run: layers that are scanned, matrix optimizers, experts, accumulation
    Cell("scanned-gpt", "adamw+clip"),
    Cell("scanned-gpt", "sgd", steps=6),
    Cell("transformer-512", "muon", steps=4),
    Cell("transformer-256", "shampoo", steps=2),
    Cell("mixture", "adam", steps=7),
    Cell("accumulating", "adam", steps=5),
    # other models, each with the optimizer that it is trained with
    Cell("gpt2-small", "adamw+clip", devices=4, steps=4),
    Cell("bert-small", "lamb", steps=7),
    Cell("resnet50", "momentum", steps=4),
    Cell("recommender", "adam"),
    Cell("small-tensors", "adam", steps=25),
    Cell("mlp-4x1024", "adam", steps=25),
    Cell("mlp-4x960", "adam", steps=25),
    Cell("mlp-4x1024", "adam", steps=25, malloc="default"),
    Cell("transformer-compute", "adam", steps=15),
)

QUICK = (
    Cell("mlp-4x1024", "adam", steps=15),
    Cell("transformer-512", "adam", steps=6),
    Cell("transformer-512", "adam", devices=2, steps=4),
    Cell("scanned-gpt", "adamw+clip", steps=4),
    Cell("transformer-256", "muon", steps=3),
    Cell("transformer-compute", "adam", steps=8),
)


# --- how long it takes ----------------------------------------------------------------------------------------------

STARTING = 10.0  # seconds: a process, its imports, the first state of every variant
WARM_UP = 2  # rounds


def expected(cell: Cell, rows: Sequence[Row]) -> float | None:
    """Seconds on a machine like that of the rows; None if that cell was never measured."""
    workload = cell.workload if cell.malloc == "keep" else f"{cell.workload} (malloc {cell.malloc})"
    found = cells(rows).get(Key(workload, cell.optimizer, cell.devices))
    if not found:
        return None
    building = sum(row["trace_s"] + row["compile_s"] for row in found.values())
    in_turn = sum(row["step_ms"] for row in found.values()) + next(iter(found.values()))["forward_backward_ms"]
    return STARTING + building + (cell.steps + WARM_UP) * in_turn / 1e3


def estimate(grid: Sequence[Cell], rows: Sequence[Row]) -> str:
    found = {cell: expected(cell, rows) for cell in grid}
    lines = [f"{'?' if s is None else f'{s:.0f} s':>8s}  {cell}" for cell, s in found.items()]
    known = [s for s in found.values() if s is not None]
    lines.append(f"{sum(known) / 60:.0f} minutes for {len(known)} cells; {len(grid) - len(known)} were never measured")
    return "\n".join(lines)


# --- running --------------------------------------------------------------------------------------------------------


def run(cell: Cell) -> list[Row]:
    """The rows of one cell, from a process of its own; none if that failed, which is said."""
    arguments = [cell.workload, cell.optimizer, "--devices", str(cell.devices), "--steps", str(cell.steps)]
    found = in_process("cell.py", *arguments, "--malloc", cell.malloc)
    found = [{**row, **revision("latest")} for row in found]
    if cell.malloc != "keep":
        return [{**row, "workload": f"{row['workload']} (malloc {cell.malloc})"} for row in found]
    return found


def in_process(script: str, *arguments: str) -> list[Row]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / script), *arguments, "--json", str(out)]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"  FAILED: {script} {' '.join(arguments)}\n{done.stderr[-2000:]}", flush=True)
            return []
        return json.loads(out.read_text())


def replaced(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows without those of the cells that were measured again."""
    again = cells(new)
    return [r for r in old if (r["workload"], r["optimizer"], r["devices"]) not in again] + list(new)


def measure(grid: Sequence[Cell], old: Sequence[Row], folder: Path) -> list[Row]:
    rows, started = list(old), time.monotonic()
    for i, cell in enumerate(grid, 1):
        print(f"[{i}/{len(grid)}, {time.monotonic() - started:.0f} s] {cell}", flush=True)
        found = run(cell)
        rows = replaced(rows, found)
        keep("latest", rows, folder)
        for measured in cells(found).values():
            print(line(measured), flush=True)
    return rows


def line(cell: dict[str, Row]) -> str:
    times = "  ".join(f"{name} {row['step_ms']:.0f}" for name, row in cell.items())
    share = cell["replicated"]["update_share"]
    return f"  {kind(cell)} ({share:.0%} of the replicated step is update); ms per step: {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small cells")
    parser.add_argument("--only", nargs="*", help="the cells of these workloads, or calls, planning, growth")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the files go (default: %(default)s)")
    parser.add_argument("--estimate", action="store_true", help="run nothing: say how long it would take")
    args = parser.parse_args()
    grid = [cell for cell in (QUICK if args.quick else FULL) if not args.only or cell.workload in args.only]
    if args.estimate:
        print(estimate(grid, read("latest", args.out)))
        return
    measure(grid, read("latest", args.out) if args.only or args.quick else [], args.out)
    for part in ("calls", "planning"):
        if not args.only or part in args.only:
            print(part, flush=True)
            found = in_process("scaling.py", part, *(["--quick"] if args.quick else []))
            keep(part, [{**row, **revision(part)} for row in found], args.out)
    if "growth" in args.only if args.only else not args.quick:
        print("growth", flush=True)
        keep("growth", in_process("growth.py"), args.out)
    history.record(read("latest", args.out), args.out)
    for goal in goals.judge(args.out):
        print(goal, flush=True)
    if args.out == RESULTS:
        draw()


def draw() -> None:
    """The pictures of the documentation."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (make bench installs it)")
        return
    import plots

    for path in (*plots.draw(read("latest")), plots.draw_history(history.known())):
        print(path)


if __name__ == "__main__":
    main()
