"""What was measured, read back from `benchmarks/results/`. What judges or draws starts here; no JAX is needed."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


class Key(NamedTuple):
    """One cell of the suite."""

    workload: str
    optimizer: str
    devices: int

    def __str__(self) -> str:
        return f"{self.workload}, {self.optimizer}, {self.devices} devices"


def read(name: str, folder: Path = RESULTS) -> Any:
    """The file `name`.json; an empty list where it was never measured."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def keep(name: str, rows: Any, folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


# --- where a row comes from -----------------------------------------------------------------------------------------

ROOT = RESULTS.parents[1]


def stamp(name: str) -> Row:
    """What every row of the file `name` carries: the commit and the code it measured, when, on what, with what."""
    from shardstep._src.tools.measuring import circumstances

    return {**circumstances(), **revision(name)}


def revision(name: str) -> Row:
    """The commit that is checked out, and a digest of the code that the rows of this file measure as it is now.

    The digest says more than the commit: it also tells of changes that are not committed, and outlives a rebase.
    """
    return {"commit": commit(), "code": digest(name)}


def commit() -> str:
    said = subprocess.run(("git", "rev-parse", "--short=12", "HEAD"), cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


def digest(name: str, root: Path = ROOT) -> str:
    """Of the files that the rows of the file `name` depend on."""
    found = hashlib.sha256()
    for path in measured_code(name, root):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def measured_code(name: str, root: Path = ROOT) -> list[Path]:
    """The files whose change makes the rows of the file `name` old: what they measure, and what measures them."""
    parts = (*LIBRARY, *BESIDES.get(name, ()))
    patterns = [f"src/shardstep/_src/{part}/**/*.py" for part in parts] if name in OF_THE_LIBRARY else []
    patterns += [f"benchmarks/{script}.py" for script in SCRIPTS[name]] + list(FILES.get(name, ()))
    return sorted({path for pattern in patterns for path in root.glob(pattern)})


BESIDES = {"checkpoints": ("checkpoint",), "faults": ("checkpoint",)}
FILES = {"faults": ("src/shardstep/_src/tools/training.py", "examples/distributed.py")}
LIBRARY = ("core", "machine", "rules", "capture", "planning", "runtime")  # the rest shows, or is not part of a step
SUITE = ("cell", "variants", "workloads", "optimization")
SCRIPTS = {
    "latest": SUITE,
    "calls": ("scaling",),
    "planning": ("scaling",),
    "growth": ("growth",),
    "checkpoints": ("checkpoints",),
    "faults": ("faults",),
    "torch": ("against_torch", "jax_worker", "torch_worker", "turns"),
    "wire": ("against_torch", "jax_worker", "turns"),
    "tpu_aot": ("tpu_aot",),
    "tpu_muon": ("tpu_muon", "tpu_aot"),
    "tpu_paper": ("tpu_paper", "paper_models", "replica_mode", "tpu_aot"),
    "matrices": ("matrix_optimizers", "matrix_zoo"),
    "gpu_replica": ("gpu_replica",),
    "gpu_muon": ("gpu_muon", "gpu_replica"),
    "notes": (),
}
OF_THE_LIBRARY = set(SCRIPTS) - {"notes"}


# --- the rows of the suite ------------------------------------------------------------------------------------------


def cells(rows: Iterable[Row]) -> dict[Key, dict[str, Row]]:
    """The rows by cell, and by variant in each."""
    found: dict[Key, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(Key(row["workload"], row["optimizer"], row["devices"]), {})[row["variant"]] = row
    return found


FACTOR = 3.0  # over replicated data parallelism, where the update is what takes the time


def update_bound(cell: dict[str, Row]) -> bool:
    """Could a perfect sharding of the update make the replicated step `FACTOR` times as fast on 8 devices? (Amdahl)

    The update's share is what the replicated step takes beyond the forward and backward pass: reduction and update.
    """
    share = cell["replicated"]["update_share"]
    return (1 - share) + share / 8 <= 1 / FACTOR


def kind(cell: dict[str, Row]) -> str:
    return "update-bound" if update_bound(cell) else "compute-bound"
