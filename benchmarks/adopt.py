"""Rows that were measured on another machine, taken into `results/`: those of the same cells are replaced.

    python benchmarks/adopt.py gpu_replica /path/to/results.json

The rows get the commit that is checked out here if their code is, by its digest: a machine without Git cannot say which
commit it ran, and a copy of unpublished work names an older one. Other rows keep the commit that they name,
or are refused if they name none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recorded import RESULTS, Row, commit, digest, keep, read

CELL = ("workload", "replicas", "devices", "topology", "optimizer", "variant")
UNKNOWN = "unknown"


class OtherCode(SystemExit):
    """The rows are not of the code that is checked out."""


def cell(row: Row) -> tuple[object, ...]:
    return tuple(row.get(name) for name in CELL)


def adopted(name: str, old: list[Row], new: list[Row]) -> list[Row]:
    """The new rows in place of the old ones of their cells; a failed cell replaces nothing. Variants that were measured
    apart, of the same code, go into one row."""
    found = {cell(row): row for row in old}
    for row in new:
        if row.get("failure") and not row.get("variants"):
            continue
        row = {**row, "commit": _commit_of(name, row)}
        before = found.get(cell(row), {})
        if before.get("code") == row["code"] and "variants" in row:
            row = {**row, "variants": before["variants"] | row["variants"]}
        found[cell(row)] = row
    return list(found.values())


def _commit_of(name: str, row: Row) -> str:
    if row["code"] == digest(name):
        return commit()
    if row["commit"] == UNKNOWN:
        raise OtherCode(f"{cell(row)} was measured of other code ({row['code']}) than is checked out ({digest(name)})")
    return row["commit"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the file in results/, without .json")
    parser.add_argument("rows", type=Path)
    args = parser.parse_args()
    keep(args.name, adopted(args.name, read(args.name), json.loads(args.rows.read_text())), RESULTS)


if __name__ == "__main__":
    main()
