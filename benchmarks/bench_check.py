"""Which rows are older than the code they measure: `make bench-check`. Exit status 1 if there are any.

Every row says what it was measured of: the commit, and a digest of the files that the figures depend on (which those
are, file by file, is in recorded.py). A row is old if one of them is different now. Rows from before there were digests
are judged by their commit alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import recorded
from recorded import RESULTS, ROOT, SCRIPTS, Row

NEEDED = ("commit", "date", "machine", "versions")


@dataclass(frozen=True)
class Old:
    """Rows of one file and one commit that are older than their code."""

    name: str
    commit: str
    date: str
    rows: int
    changed: tuple[str, ...]  # files; none if the commit is gone

    def __str__(self) -> str:
        why = f"{len(self.changed)} files changed since" if self.changed else "the code differs"
        some = ", ".join(self.changed[:3]) + (", ..." if len(self.changed) > 3 else "")
        return f"{self.name}.json: {self.rows} rows of {self.commit} ({self.date}): {why}{': ' if some else ''}{some}"


def old(folder: Path = RESULTS, root: Path = ROOT) -> Iterator[Old]:
    for name in SCRIPTS:
        groups: dict[tuple[str, str | None], list[Row]] = {}
        for row in recorded.read(name, folder):
            groups.setdefault((row["commit"], row.get("code")), []).append(row)
        for (commit, code), rows in groups.items():
            if code is not None and code == recorded.digest(name, root):
                continue
            changed = changed_since(commit, name, root)
            if code is not None or changed or changed is None:
                date = max(row["date"] for row in rows)[:10]
                yield Old(name, commit, date, len(rows), changed or ())


def changed_since(commit: str, name: str, root: Path = ROOT) -> tuple[str, ...] | None:
    """The files that these rows depend on and that are not as they were; None if nobody knows that commit any more."""
    paths = [str(path.relative_to(root)) for path in recorded.measured_code(name, root)]
    if not paths:
        return ()
    command = ("git", "diff", "--name-only", commit, "--", *paths)
    said = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return None if said.returncode else tuple(said.stdout.split())


def main() -> None:
    found = list(old())
    for group in found:
        print(group)
    if not found:
        print("every row is of the code as it is")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
