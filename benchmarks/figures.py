"""Every measured figure that the README and the documentation show in their own words, held against the rows.

    python benchmarks/figures.py     # those that are in no row; exit status 1 if there are any

A figure is a number with a unit of what is measured (milliseconds, megabytes, cycles, ...), or any number with decimals
in a table. `SOURCES` says which files of `results/` a page quotes: a figure must be the rounding of something in their
rows. Tables that are made from rows need no check, nor does what is inside code. Binary units (KiB, MiB) are settings
and sizes by definition, not measurements.

What was measured once, by a script that keeps no rows, is in `results/notes.json`: the figures as rows, with the
commit, the date, the machine and the versions.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from recorded import RESULTS, ROOT, Row, read

SOURCES = {
    "README.md": ("latest",),
    "docs/benchmarks.md": ("gpu_replica", "gpu_muon", "notes"),
    "docs/checkpoints.md": ("checkpoints", "faults", "notes"),
    "docs/communication.md": ("gpu_replica", "tpu_aot", "notes"),
    "docs/how-it-decides.md": ("gpu_replica", "notes"),
    "docs/limits.md": ("matrices", "notes"),
    "docs/tpu.md": ("tpu_aot", "tpu_paper", "notes"),
}

# Settings, sizes and thresholds that look like measurements.
NOT_MEASURED = {
    "docs/benchmarks.md": {"5 %", "76 %", "24 GB"},
    "docs/checkpoints.md": {"300 s", "100 s", "600 s", "10 s", "30 s"},
    "docs/how-it-decides.md": {"15 %", "1 MB"},
    "docs/tpu.md": {"1 MB", "64 KB"},
}
GENERATED = {"docs/state.md"}  # printed by state_table.py: sizes by definition

UNITS = {"ms": "time", "us": "time", "s": "time", "MB": "bytes", "GB": "bytes", "KB": "bytes", "%": "share"}
UNITS |= {"times": "ratio", "thousand cycles": "cycles", "million cycles": "cycles", "cycles": "cycles"}
SCALE = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01, "times": 1.0}
SCALE |= {"thousand cycles": 1e3, "million cycles": 1e6, "cycles": 1.0}

_NUMBER = r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)"
_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_WITH_UNIT = re.compile(rf"{_NUMBER}\s?({_UNIT})(?![\w/])")
_DECIMAL = re.compile(r"(?<![\w.,/:-])(\d[\d,]*\.\d+)(?![\w.])(?!\s?[KMG]i?B)")
_UNSEEN = re.compile(r"```.*?```|`[^`]*`|<!-- .*?-->", re.S)
_VERSION = re.compile(r"\b(?:JAX|libtpu|Python|PyTorch|torch|Optax|Orbax|NumPy) (?:\d+\.)+\d+", re.I)


class Figure(NamedTuple):
    page: str
    line: int
    text: str
    value: float  # in seconds, bytes, cycles, ...
    step: float  # of the last digit that is shown
    kind: str | None  # none: a number in a table, of whatever kind

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def figures(page: str, text: str) -> Iterator[Figure]:
    """What a page shows in its own words."""
    seen = _UNSEEN.sub(lambda m: "\n" * m[0].count("\n"), text)
    for number, line in enumerate(_VERSION.sub("", seen).splitlines(), 1):
        units = list(_WITH_UNIT.finditer(line))
        for found in units:
            unit = found[2]
            yield _figure(page, number, found[0], found[1], SCALE[unit], UNITS[unit])
        if line.startswith("|"):
            taken = {found.start(1) for found in units}
            for found in _DECIMAL.finditer(line):
                if found.start(1) not in taken:
                    yield _figure(page, number, found[0], found[1], 1.0, None)


def _figure(page: str, line: int, text: str, number: str, scale: float, kind: str | None) -> Figure:
    plain = number.replace(",", "")
    digits = len(plain.partition(".")[2])
    return Figure(page, line, text, float(plain) * scale, 10.0**-digits * scale, kind)


# --- what rows say --------------------------------------------------------------------------------------------------


def values(name: str, rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    """Everything in the rows of a file that a page may quote: (kind, value)."""
    rows = list(rows)
    if name == "notes":
        for row in rows:
            yield from ((UNITS.get(unit, unit), value * SCALE.get(unit, 1)) for value, unit in row["figures"])
        return
    if name == "faults":
        yield from (("steps", row["lost, average"]) for row in rows)
        return
    if name == "checkpoints":
        kinds = {(row.get("what"), row.get("examples")) for row in rows}
        for alike in ([row for row in rows if (row.get("what"), row.get("examples")) == kind] for kind in kinds):
            yield from _of_checkpoints(alike)
        return
    for row in rows:
        for part in (row, *row.get("variants", {}).values()):
            yield from _of_row(part)


def _of_checkpoints(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Rows of one kind: medians."""
    for what in (key for key, value in rows[0].items() if isinstance(value, float) and key != "load"):
        value = statistics.median(row[what] for row in rows)
        yield ("share", abs(value - 1)) if what.startswith("ratio") else ("time", value)


def _of_row(row: Row) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            unit = key.rpartition("_")[2]
            if key.startswith("cycles"):
                yield "cycles", 1e3 * value
            elif unit == "bytes":
                yield "bytes", value
            elif unit in ("ms", "us", "s", "mb"):
                yield ("bytes" if unit == "mb" else "time"), value * SCALE["MB" if unit == "mb" else unit]
    if "cycles_update" in row:
        yield "cycles", 1e3 * sum(value for key, value in row.items() if key.startswith("cycles_"))
    for one, other in (("arg_bytes", "temp_bytes"), ("argument_bytes", "temporary_bytes")):
        if one in row:
            yield "bytes", row[one] + row[other]


def is_there(figure: Figure, known: Iterable[tuple[str, float]]) -> bool:
    """Is it the rounding of one of these?"""
    for kind, value in known:
        scales = (1.0,) if figure.kind else (1.0, *(SCALE[unit] for unit, of in UNITS.items() if of == kind))
        if figure.kind in (None, kind) and any(_rounds(value, figure, scale) for scale in scales):
            return True
    return False


def _rounds(value: float, figure: Figure, scale: float) -> bool:
    return math.isclose(value, figure.value * scale, rel_tol=0, abs_tol=0.5000001 * figure.step * scale)


def unknown(root: Path = ROOT, folder: Path = RESULTS) -> list[Figure]:
    """The figures of the README and of the documentation that are in no row."""
    missing = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        page = str(path.relative_to(root))
        if page in GENERATED:
            continue
        settings = NOT_MEASURED.get(page, set())
        known = [v for name in SOURCES.get(page, ()) for v in set(values(name, read(name, folder)))]
        missing += [
            f
            for f in figures(page, path.read_text(encoding="utf-8"))
            if f.text not in settings and not is_there(f, known)
        ]
    return missing


def main() -> Any:
    found = unknown()
    for figure in found:
        print(figure)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
