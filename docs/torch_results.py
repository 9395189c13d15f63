"""A hook of MkDocs: the table against PyTorch in `benchmarks.md` comes from benchmarks/results/torch.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "torch.json"
PLACE = "{{ torch results }}"
NAMES = {
    "shardstep": "**shardstep**",
    "shardstep-sharded": '**shardstep**, `weights="sharded"`',
    "replicated": "replicated `jit`",
    "ddp": "DDP",
    "ddp-zero": "DDP, ZeroRedundancyOptimizer",
    "fsdp2": "FSDP2",
    "shardstep-one-process": "shardstep, one process",
    "shardstep-sharded-one-process": 'shardstep, one process, `weights="sharded"`',
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(PLACE, tables(json.loads(RESULTS.read_text()))) if PLACE in markdown else markdown


def tables(result: list[dict[str, Any]]) -> str:
    first, known = result[0], {name: v for r in result for name, v in r["versions"].items()}
    versions = ", ".join(f"{k} {v}" for k, v in known.items())
    lines = [f"{first['date'][:10]}, {first['machine']['processor']}, {first['machine']['cores']} cores, {versions}."]
    for devices in sorted({r["devices"] for r in result}):
        lines += [
            "",
            f"| {devices} replicas | step (ms) | quartiles | forward+backward | clip, AdamW | optimizer | peak RSS |",
            "|---|---|---|---|---|---|---|",
            *(_line(r) for r in result if r["devices"] == devices),
        ]
    return "\n".join(lines) + "\n"


def _line(r: dict[str, Any]) -> str:
    name = NAMES[r["variant"].removesuffix("-fused")] + (f", {r['adamw']} AdamW" if r["adamw"] else "")
    if r["step_ms"] is None:
        return f"| {name} | {r['error']} | | | | | |"
    low, high = r["spread"]
    parts = ["" if r[k] is None else f"{r[k]:.0f}" for k in ("forward_backward_ms", "clip_and_update_ms")]
    sizes = ["" if r[k] is None else f"{r[k] / 1e6:.0f} MB" for k in ("optimizer_bytes", "peak_rss_bytes")]
    cells = [name, f"{r['step_ms']:.0f}", f"{low:.0f} to {high:.0f}", *parts, *sizes]
    return f"| {' | '.join(cells)} |"
