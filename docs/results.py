"""A hook of MkDocs: the tables of `benchmarks.md` come from the files in `benchmarks/results/`, so they cannot age.

A line `{{ NAME }}` in a page is replaced by the table of that name. What is met and what is missed is judged by
`benchmarks/goals.py`; nothing is written here by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

from claims import claims  # noqa: E402
from goals import default, judge  # noqa: E402
from growth import slopes  # noqa: E402
from recorded import RESULTS, Row, cells, kind, read  # noqa: E402
from scaling import fit, sizes  # noqa: E402

NAMES = {
    "replicated": "replicated `jit`",
    "shard_map": "replicated `shard_map`",
    "zero1": "ZeRO-1 by hand",
    "fsdp": "FSDP by hand",
    "over-data": "as MaxText's `shard_optimizer_over_data`",
    "expert": "expert",
    "expert-layers": "expert, layer by layer",
    "expert-owned": "expert, owned matrices",
    "shardstep-sharded": "shardstep, weights sharded",
    "expert-sharded": "expert, weights sharded",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every line that names a table."""
    return "\n".join(
        TABLES[line[3:-3]](RESULTS) if line.startswith("{{ ") and line[3:-3] in TABLES else line
        for line in markdown.splitlines()
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def circumstances(folder: Path) -> str:
    rows = read("latest", folder)
    if not rows:
        return "Not measured yet."
    row, dates = rows[0], sorted({r["date"][:10] for r in rows})
    machine, versions = row["machine"], ", ".join(f"{k} {v}" for k, v in row["versions"].items())
    loads = sorted(r["machine"]["load"] for r in rows)
    return (
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {machine['processor']}, {machine['cores']} cores,"
        f" {machine['memory_gb']:.0f} GB; {versions}. Load at the end of a cell: {loads[0]} to {loads[-1]}."
    )


# Why another program is ahead, by what it is; read from compiled programs (see "What the programs say about it").
REASONS = {
    "fsdp": "XLA moves activations instead of weights, which is less where a replica has few examples",
    "zero1": "gathers fewer weights than shardstep's default does here",
    "replicated": "bound by the forward and backward pass; within the spread where it is less than 3 %",
    "shard_map": "bound by the forward and backward pass; within the spread where it is less than 3 %",
    "over-data": 'weights rest split there; `weights="sharded"` is the program to compare',
    "expert": "XLA's CPU backend copies donated weights that rest replicated",
    "expert-sharded": 'weights rest split there; `weights="sharded"` is the program to compare',
    "expert-layers": "each layer is gathered inside the loop, by somebody who knows the model",
    "expert-owned": "matrices are owned whole, by somebody who knows the optimizer",
}
BEHIND_EXPERT = 1.05
SHORT = {"shard_map": "`shard_map`", "replicated": "`jit`", "zero1": "ZeRO-1", "fsdp": "FSDP", "over-data": "MaxText's"}


def summary(folder: Path) -> str:
    """One line for each cell: the best in bold; in red where shardstep's default is behind, and why."""
    found = {key: cell for key, cell in cells(read("latest", folder)).items() if key.devices > 1}
    by_hand = [name for name in SHORT if any(name in cell for cell in found.values())]
    head = (
        "",
        *(SHORT[name] for name in by_hand),
        "shardstep",
        "weights sharded",
        "an expert's best",
        "why it is behind",
    )
    return table(head, (_summed(str(key), cell, by_hand) for key, cell in found.items()))


def _summed(name: str, cell: dict[str, Row], by_hand: Sequence[str]) -> Sequence[str]:
    experts = [variant for variant in cell if variant.startswith("expert")]
    expert = min(experts, key=lambda variant: cell[variant]["step_ms"], default=None)
    ours, times = default(cell), {variant: row["step_ms"] for variant, row in cell.items()}
    best, ahead = min(times.values()), ahead_of(cell)

    def shown(variant: str | None) -> str:
        if variant not in cell:
            return ""
        text = f"{times[variant]:.0f}" if times[variant] >= 10 else f"{times[variant]:.1f}"
        if times[variant] == best:
            text = f"**{text}**"
        return f'<span style="color:#c0392b">{text}</span>' if ahead and cell[variant] is ours else text

    columns = (shown(variant) for variant in (*by_hand, "shardstep", "shardstep-sharded", expert))
    return (name, *columns, "" if ahead is None else f"{NAMES.get(ahead, ahead)}: {REASONS[ahead]}")


def ahead_of(cell: dict[str, Row]) -> str | None:
    """Which program is ahead of what a user gets who asks for nothing: the fastest; an expert's by more than 5 %."""
    ours = default(cell)["step_ms"]
    beaten = {
        variant: row["step_ms"] * (BEHIND_EXPERT if variant.startswith("expert") else 1)
        for variant, row in cell.items()
        if not variant.startswith("shardstep")
    }
    first = min(beaten, key=beaten.__getitem__, default=None)
    return first if first is not None and beaten[first] < ours else None


def growth_slopes(folder: Path) -> str:
    """Exponents of power laws, beside what theory says."""
    rows = (
        (s.what, s.axis, str(s.points), f"{s.exponent:.2f}", f"{s.expected:g}", "" if s.as_expected else "**no**")
        for s in slopes(read("growth", folder))
    )
    return table(("", "grows with", "points", "exponent", "expected", "as expected"), rows)


def wire(folder: Path) -> str:
    """What the kernel counted on loopback, beside the plan and the compiled program."""
    rows = []
    for r in read("wire", folder):
        said = r["planned_wire_bytes"] or r["wire_bytes"]
        sizes = (f"{r[k] / 1e6:.1f}" if r[k] else "" for k in ("planned_wire_bytes", "wire_bytes", "loopback_bytes"))
        apart = f"{100 * (r['loopback_bytes'] / said - 1):+.1f} %" if said else ""
        rows.append((r["workload"], str(r["devices"]), NAMES.get(r["variant"], r["variant"]), *sizes, apart))
    head = ("", "processes", "", "plan, MB", "compiled program, MB", "kernel, MB", "kernel beside what was said")
    return table(head, rows)


def goals(folder: Path) -> str:
    """Met and missed, and what exactly was missed."""
    return table(
        ("goal", "", "missed"), ((goal.name, f"**{goal.verdict}**", "<br>".join(goal.missed)) for goal in judge(folder))
    )


def suite(folder: Path) -> str:
    """A table for each cell."""
    parts = []
    for key, cell in cells(read("latest", folder)).items():
        first = next(iter(cell.values()))
        share = first["update_share"]
        said = f"{kind(cell)}: {share:.0%} of the replicated step is not forward or backward pass"
        parts += [f"### {key}", f"{first['parameters'] / 1e6:.1f} million parameters. {said}.", in_cell(cell)]
    return "\n\n".join(parts)


def in_cell(cell: dict[str, Row]) -> str:
    ours = cell["shardstep"]["step_ms"]
    head = ("", "a step (ms)", "spread", "of shardstep's", "arguments", "temporaries", "sent", "traced", "compiled")
    return table(
        head,
        (
            (
                NAMES.get(name, name),
                f"{row['step_ms']:.1f}",
                f"{row['spread']:.1f}",
                f"{row['step_ms'] / ours:.2f}",
                *(f"{row[k] / 1e6:.1f} MB" for k in ("arg_bytes", "temp_bytes", "wire_bytes")),
                f"{row['trace_s']:.1f} s",
                f"{row['compile_s']:.1f} s",
            )
            for name, row in cell.items()
        ),
    )


def paper(folder: Path) -> str:
    return table(
        ("machine", "workload", "", "over", "a step", "peak memory"),
        (
            (c.machine, c.workload, NAMES.get(c.variant, c.variant), c.simpler, f"{c.time:.2f}x", f"{c.memory:.2f}x")
            for c in claims(folder)
        ),
    )


def model_size(folder: Path) -> str:
    """The line through step times of models of several sizes."""
    found = sizes(read("latest", folder))
    fits = ((name, fit([cell[name] for cell in found if name in cell])) for name in ("replicated", *NAMES, "shardstep"))
    return table(
        ("", "fixed (ms)", "ms for a million weights/N", "largest residual", "models"),
        (
            (NAMES.get(name, name), f"{f.fixed:.1f}", f"{f.slope:.1f}", f"{f.residual:.1%}", str(f.points))
            for name, f in dict(fits).items()
            if f is not None
        ),
    )


def calls(folder: Path) -> str:
    return table(
        ("leaves", "`jit` (us)", "shardstep (us)", "ratio"),
        (
            (f"{r['leaves']:,}", f"{r['jit_us']:.0f}", f"{r['shardstep_us']:.0f}", f"{r['ratio']:.2f}")
            for r in read("calls", folder)
        ),
    )


def planning(folder: Path) -> str:
    return table(
        ("leaves", "plan, tracing included (s)", "tracing alone (s)"),
        ((f"{r['leaves']:,}", f"{r['plan_s']:.2f}", f"{r['trace_s']:.2f}") for r in read("planning", folder)),
    )


def matrices(folder: Path) -> str:
    """Matrix optimizers on simulated devices: times, CPU time of all replicas, work per replica, bytes beside SGD's."""
    rows = {r["optimizer"]: r for r in read("matrices", folder)}
    if "sgd" not in rows:
        return "Not measured yet."
    sgd = rows.pop("sgd")["variants"]["shardstep"]["wire_bytes"]
    head = ("", "replicated", "ZeRO-1 by hand", "shardstep", "times as fast", "times less CPU time")
    head = (*head, "update's flops per replica, over 1/N", "factorizations per replica", "sent, over SGD's")
    return table(head, (_of_matrices(row, sgd) for row in rows.values()))


def _of_matrices(row: Row, sgd: float) -> Sequence[str]:
    of, passes = row["variants"], row["passes_flops"]
    base, ours = of["replicated"], of["shardstep"]
    share = row["devices"] * (ours["flops"] - passes) / (base["flops"] - passes)
    times = [f"{of[who]['step_ms']:.0f} ms" for who in ("replicated", "zero1", "shardstep")]
    ratios = [f"{base[what] / ours[what]:.1f}x" for what in ("step_ms", "cpu_ms")]
    called = f"{ours['factorizations']} of {base['factorizations']}" if base["factorizations"] else ""
    return (row["optimizer"], *times, *ratios, f"{share:.2f}", called, f"{ours['wire_bytes'] / sgd:.2f}")


def matrices_about(folder: Path) -> str:
    rows = read("matrices", folder)
    if not rows:
        return "Not measured yet."
    loads = sorted(r["machine"]["load"] for r in rows)
    versions, machine = rows[0]["versions"], rows[0]["machine"]
    return (
        f"{rows[0]['date'][:10]}; {machine['processor']}, {machine['cores']} cores; JAX {versions['jax']}. Load of the"
        f" machine after each: {loads[0]:.0f} to {loads[-1]:.0f}. Where that is above the number of cores, the clock"
        " says less than the CPU time."
    )


TABLES = {
    "matrices": matrices,
    "matrices about": matrices_about,
    "summary": summary,
    "slopes": growth_slopes,
    "wire": wire,
    "circumstances": circumstances,
    "goals": goals,
    "suite": suite,
    "claims": paper,
    "model size": model_size,
    "calls": calls,
    "planning": planning,
}
