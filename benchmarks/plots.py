"""Draws what the suite measured: `python benchmarks/plots.py` (needs matplotlib).

docs/images/bench-step.png      step time of every variant, relative to replicated jit
docs/images/bench-memory.png    bytes of a device
docs/images/bench-scaling.png   with the number of replicas, and with the size of the model
docs/images/bench-history.png   by commit: results/history.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from history import known
from recorded import RESULTS, Row, cells, read
from scaling import fit, sizes

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COLOURS = {
    "replicated": "#9aa0a6",
    "shard_map": "#bdc1c6",
    "zero1": "#f2c14e",
    "fsdp": "#f58518",
    "shardstep": "#4c78a8",
    "expert": "#a0cbe8",
    "shardstep-sharded": "#2f6b4f",
    "expert-sharded": "#88d27a",
    "over-data": "#b279a2",
    "expert-layers": "#54a24b",
    "expert-owned": "#72b7b2",
}


def bars(rows: list[Row], value: Any, label: str, title: str) -> Any:
    """A group of bars for each cell; one colour for each variant."""
    found = {key: cell for key, cell in cells(rows).items() if key.devices > 1}
    figure, axes = plt.subplots(figsize=(max(7, 0.9 * len(found) + 3), 4.8), layout="constrained")
    where = np.arange(len(found))
    for i, (variant, colour) in enumerate(COLOURS.items()):
        heights = [value(cell, variant) if variant in cell else np.nan for cell in found.values()]
        axes.bar(where + 0.075 * (i - 5), heights, 0.075, label=variant, color=colour)
    names = [f"{k.workload}\n{k.optimizer}, {k.devices}" for k in found]
    axes.set_xticks(where, names, rotation=60, ha="right", fontsize=7)
    axes.set(ylabel=label, title=title)
    axes.legend(fontsize=7, ncols=4)
    axes.grid(axis="y", alpha=0.3)
    return figure


def step_time(rows: list[Row]) -> Any:
    return bars(
        rows,
        lambda cell, variant: cell[variant]["step_ms"] / cell["replicated"]["step_ms"],
        "step time, replicated jit = 1",
        "A step (lower is better)",
    )


def memory(rows: list[Row]) -> Any:
    return bars(
        rows,
        lambda cell, variant: cell[variant]["peak_bytes"] / cell["replicated"]["peak_bytes"],
        "bytes of a device, replicated jit = 1",
        "Arguments and temporaries of a device (lower is better)",
    )


def scaling(rows: list[Row]) -> Any:
    figure, (replicas, model) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for variant, colour in COLOURS.items():
        if points := with_replicas(rows, variant):
            replicas.plot([r["devices"] for r in points], [r["step_ms"] for r in points], "o-", color=colour)
        of_size = [cell[variant] for cell in sizes(rows) if variant in cell]
        weights = [r["parameters"] / 1e6 for r in of_size]
        model.plot(weights, [r["step_ms"] for r in of_size], "o", color=colour, label=variant)
        if (line := fit(of_size)) is not None:
            model.plot(weights, [line.fixed + line.slope * w / 8 for w in weights], "-", color=colour, alpha=0.5)
    title = "with replicas, which share the cores"
    replicas.set(xlabel="replicas", ylabel="ms per step", title=title, xscale="log", xticks=(1, 2, 4, 8))
    replicas.set_xticks((1, 2, 4, 8), ("1", "2", "4", "8"))
    replicas.minorticks_off()
    model.set(
        xlabel="million weights, 8 replicas", ylabel="ms per step", title="with the model; lines are least squares"
    )
    model.legend(fontsize=7)
    for axes in (replicas, model):
        axes.grid(alpha=0.3)
    return figure


def by_commit(entries: list[Row]) -> Any:
    """shardstep's step relative to replicated `jit` of the same run: a line for each cell that was measured twice."""
    whole = {_run(entry): entry["step_ms"] for entry in entries if entry["variant"] == "replicated"}
    lines: dict[str, list[tuple[str, float]]] = {}
    for entry in entries:
        if entry["variant"] == "shardstep" and entry["devices"] > 1 and _run(entry) in whole:
            name = f"{entry['workload']}, {entry['optimizer']}, {entry['devices']}"
            when = f"{entry['date'][5:16].replace('T', ' ')} {entry['commit'][:7]}"
            lines.setdefault(name, []).append((when, entry["step_ms"] / whole[_run(entry)]))
    figure, axes = plt.subplots(figsize=(11, 5.5), layout="constrained")
    order = sorted({when for points in lines.values() if len(points) > 1 for when, _ in points})
    for name, points in lines.items():
        if len(points) > 1:
            axes.plot([order.index(when) for when, _ in points], [ratio for _, ratio in points], "o-", label=name)
    axes.set_xticks(range(len(order)), order, rotation=90, fontsize=5)
    axes.set(ylabel="shardstep's step, replicated jit = 1", title="By commit (lower is better)", ylim=(0, None))
    axes.legend(fontsize=6, ncols=3)
    axes.grid(alpha=0.3)
    return figure


def _run(entry: Row) -> tuple[Any, ...]:
    """The rows of one cell are written together, by one process."""
    return (*(entry[name] for name in ("workload", "optimizer", "devices", "commit")), entry["date"][:16])


def with_replicas(rows: list[Row], variant: str) -> list[Row]:
    """The workload that was measured on most numbers of devices."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["variant"] == variant:
            found.setdefault((row["workload"], row["optimizer"]), []).append(row)
    most = max(found.values(), key=len, default=[])
    return sorted(most, key=lambda row: row["devices"]) if len(most) > 1 else []


def draw(rows: list[Row], folder: Path = IMAGES) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, picture in (("step", step_time), ("memory", memory), ("scaling", scaling)):
        figure = picture(rows)
        drawn.append(folder / f"bench-{name}.png")
        figure.savefig(drawn[-1], dpi=130, metadata={"Software": None})
        plt.close(figure)
    return drawn


def draw_history(entries: list[Row], folder: Path = IMAGES) -> Path:
    figure = by_commit(entries)
    path = folder / "bench-history.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args()
    for path in (*draw(read("latest", args.results), args.out), draw_history(known(args.results), args.out)):
        print(path)
