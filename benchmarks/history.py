"""Medians by commit: `results/history.jsonl`, one line for each cell and variant of the suite and each commit.

    python benchmarks/history.py               # add what is in results/latest.json and was not there yet
    python benchmarks/history.py --from-git    # and every version of that file that Git knows

The suite adds its rows by itself; plots.py draws them. Compare lines of one machine and one version of JAX only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from recorded import RESULTS, ROOT, Row, read

WHAT = ("workload", "optimizer", "devices", "variant")
FIGURES = ("step_ms", "spread", "wire_bytes", "arg_bytes", "temp_bytes")


def line(row: Row) -> Row:
    """What is kept of a row."""
    about = {"date": row["date"], "cores": row["machine"]["cores"], "jax": row["versions"]["jax"]}
    return {"commit": row["commit"], **about, **{name: row[name] for name in (*WHAT, *FIGURES)}}


def known(folder: Path = RESULTS) -> list[Row]:
    path = folder / "history.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def same(entry: Row) -> tuple[object, ...]:
    """A measurement is one date of one cell, however often it was committed."""
    return tuple(entry[name] for name in (*WHAT, "date"))


def added(old: Iterable[Row], rows: Iterable[Row]) -> list[Row]:
    """The old lines and those of the rows that are new, by date."""
    found = {same(entry): entry for entry in old}
    for row in rows:
        found.setdefault(same(row), line(row))
    return sorted(found.values(), key=lambda entry: (entry["date"], *map(str, same(entry))))


def record(rows: Iterable[Row], folder: Path = RESULTS) -> None:
    entries = added(known(folder), rows)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def of_git(name: str = "benchmarks/results/latest.json") -> Iterator[Row]:
    """Rows of every committed version, oldest first. A row without a commit of its own is of the one it came in."""
    for commit in reversed(_git("log", "--format=%h", "--abbrev=12", "--", name).split()):
        for row in json.loads(_git("show", f"{commit}:{name}") or "[]"):
            yield {"commit": commit, **row}


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from-git", action="store_true")
    args = parser.parse_args()
    if args.from_git:
        record(of_git())
    record(read("latest"))
    print(f"{len(known())} lines")


if __name__ == "__main__":
    main()
