"""A hook of MkDocs: the tables of `tpu.md` come from `benchmarks/results/tpu_aot.json`, so they cannot age."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _goals() -> Any:
    spec = importlib.util.spec_from_file_location("tpu_goals", BENCHMARKS / "tpu_goals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `{{ tpu WORKLOAD }}` by the rows of that workload, `{{ tpu goals }}` by what they say of the goals."""
    for line in markdown.splitlines():
        if line.startswith("{{ tpu "):
            markdown = markdown.replace(line, section(line.removeprefix("{{ tpu ").removesuffix(" }}")))
    return markdown


def section(name: str) -> str:
    rows = json.loads((BENCHMARKS / "results" / "tpu_aot.json").read_text())
    if name == "about":
        module = _goals()
        gone = "; ".join(module.missing(module.indexed(rows))) or "nothing"
        compilers = sorted({(r["versions"]["libtpu"], r["versions"]["jax"]) for r in rows})
        said = " and ".join(f"libtpu {libtpu}, JAX {jax}" for libtpu, jax in compilers)
        dates = sorted(r["date"][:10] for r in rows)
        return f"{said}; compiled {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.\n\nNot compiled yet: {gone}."
    return goals(rows) if name == "goals" else table([r for r in rows if r["workload"] == name])


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| topology | optimizer | program | all-reduces | sent, MB | update | copies | rest | total | peak, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    total = _goals().total
    for r in rows:
        cycles = (r["cycles_update"], r["cycles_copies"], r["cycles_rest"], total(r))
        cells = [r["topology"], r["optimizer"], r["variant"], str(r["large_all_reduces"])]
        cells += [f"{figure:.0f}" for figure in (r["wire_mb"], *cycles, r["peak_mb"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(rows: list[dict[str, Any]]) -> str:
    """One line for each goal, workload and program; what is missed is named with its figure and its limit."""
    lines = ["| goal | workload | program | met | missed |", "|---|---|---|---|---|"]
    module = _goals()
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for v in module.verdicts(module.indexed(rows)):
        groups.setdefault((v.goal, v.workload, v.program), []).append(v)
    for (goal, workload, program), members in sorted(groups.items()):
        missed = [v for v in members if not v.met]
        named = "; ".join(f"{v.topology} {v.optimizer}: {v.value:.1f} > {v.limit:.1f}" for v in missed)
        lines.append(f"| {goal} | {workload} | {program} | {len(members) - len(missed)} of {len(members)} | {named} |")
    return "\n".join(lines)
