"""What was measured, read back from `benchmarks/results/`. What judges or draws starts here; no JAX is needed."""

from __future__ import annotations

import json
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
