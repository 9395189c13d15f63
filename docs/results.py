"""A hook of MkDocs: the tables of `benchmarks.md` come from the files in `benchmarks/results/`, so they cannot age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
NAMES = {"replicated": "replicated `jit`", "zero1": "ZeRO-1 by hand", "shardstep": "shardstep"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `{{ results NAME }}` by the table of benchmarks/results/NAME.json."""
    for line in markdown.splitlines():
        if line.startswith("{{ results "):
            name = line.removeprefix("{{ results ").removesuffix(" }}")
            markdown = markdown.replace(line, table(json.loads((RESULTS / f"{name}.json").read_text())))
    return markdown


def table(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    lines = [f"{result['date'][:10]}, {result['machine']['cores']} cores, {versions}.", ""]
    for workload, variants in result["workloads"].items():
        lines += [
            f"| {workload} | a step (ms) | range | sent by a replica | arguments | temporaries |",
            "|---|---|---|---|---|---|",
        ]
        for v in variants:
            step, sizes = v["step"], (v["wire_bytes"], v["argument_bytes"], v["temporary_bytes"])
            cells = [NAMES.get(v["variant"], v["variant"]), f"{step['median']:.0f}"]
            cells += [f"{step['low']:.0f} to {step['high']:.0f}", *(f"{n / 1e6:.1f} MB" for n in sizes)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
