"""A hook of MkDocs: the tables of `tpu.md` come from `benchmarks/results/tpu_aot.json`, so they cannot age."""

from __future__ import annotations

import importlib.util
import json
import sys
from operator import itemgetter
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
    if name.startswith("paper"):
        rows = _read("tpu_paper")
        return claims(rows) if name.endswith("claims") else paper(rows)
    if name == "muon":
        return muon(_read("tpu_muon"))
    rows = _read("tpu_aot")
    if name == "about":
        module = _goals()
        gone = "; ".join(module.missing(module.indexed(rows))) or "nothing"
        compilers = sorted({(r["versions"]["libtpu"], r["versions"]["jax"]) for r in rows})
        said = " and ".join(f"libtpu {libtpu}, JAX {jax}" for libtpu, jax in compilers)
        dates = sorted(r["date"][:10] for r in rows)
        return f"{said}; compiled {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.\n\nNot compiled yet: {gone}."
    if name == "original":
        return original(rows)
    return goals(rows) if name == "goals" else table([r for r in rows if r["workload"] == name])


def _read(name: str) -> list[dict[str, Any]]:
    path = BENCHMARKS / "results" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def paper(rows: list[dict[str, Any]]) -> str:
    """One line for each program: the update's share of its cycles, what it sends and how long that takes, its peak."""
    head = ("topology", "model, per core", "optimizer", "program", "thousand cycles", "update, %", "sent, MB")
    head = (*head, "wire, us (model)", "peak, MB")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    total = _goals().total
    for r in rows:
        share = 100 * r["cycles_update"] / total(r)
        cells = [r["topology"], r["workload"], r["optimizer"], _PROGRAMS.get(r["variant"], r["variant"])]
        cells += [f"{total(r):.0f}", f"{share:.1f}", *(f"{r[k]:.0f}" for k in ("wire_mb", "predicted_us", "peak_mb"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_PROGRAMS = {"zero1": "ZeRO-1 by hand", "original": "the closed original"}
_PROGRAMS |= {f"weights {how}": f"shardstep, weights {how}" for how in ("replicated", "sharded")}


def claims(rows: list[dict[str, Any]]) -> str:
    """The paper's claim: what an expensive optimizer costs over a cheap one, in cycles and at the peak."""
    goals = _goals()
    found, lines = goals.indexed(rows), ["| topology | model, per core | program | optimizers | cycles | peak |"]
    lines.append("|---|---|---|---|---|---|")
    for (topology, workload, optimizer, program), r in found.items():
        for simpler in ("sgd", "momentum"):
            other = found.get((topology, workload, simpler, program))
            if optimizer in ("adam", "lars") and other:
                ratios = goals.total(r) / goals.total(other), r["peak_mb"] / other["peak_mb"]
                cells = [topology, workload, _PROGRAMS.get(program, program), f"{optimizer} / {simpler}"]
                lines.append(f"| {' | '.join(cells)} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines)


def muon(rows: list[dict[str, Any]]) -> str:
    """Matrices that chips own: the update's cycles as a share of the replicated program's, beside 1/N."""
    head = ("topology", "program", "all-reduces", "sent, MB", "update", "over 1/N of replicated", "copies", "peak, MB")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    base = {r["topology"]: r["cycles_update"] for r in rows if r["variant"] == "replicated"}
    for r in rows:
        share = r["replicas"] * r["cycles_update"] / base[r["topology"]] if r["topology"] in base else None
        cells = [r["topology"], _PROGRAMS.get(r["variant"], r["variant"]), str(r["large_all_reduces"])]
        cells += [f"{r['wire_mb']:.0f}", f"{r['cycles_update']:.0f}", f"{share:.2f}" if share else "not compiled"]
        cells += [f"{r['cycles_copies']:.0f}", f"{r['peak_mb']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def original(rows: list[dict[str, Any]]) -> str:
    """The closed original's program beside ours, wherever both were compiled; in bold what is below the other."""
    goals = _goals()
    compared = {"thousand cycles": goals.total, "peak, MB": itemgetter("peak_mb"), "sent, MB": itemgetter("wire_mb")}
    found, lines = goals.indexed(rows), []
    head = ["topology", "program", "optimizer", *(f"{k}: {who}" for k in compared for who in ("original", "shardstep"))]
    for (topology, workload, optimizer, program), theirs in found.items():
        ours = found.get((topology, workload, optimizer, goals.OURS[0]))
        if program == goals.ORIGINAL and ours:
            pairs = [(get(theirs), get(ours)) for get in compared.values()]
            cells = [f"**{x:.0f}**" if x == min(pair) < max(pair) else f"{x:.0f}" for pair in pairs for x in pair]
            lines.append(f"| {' | '.join((topology, workload, optimizer, *cells))} |")
    return "\n".join((f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines))


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
