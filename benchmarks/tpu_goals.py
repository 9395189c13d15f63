"""The goals for TPU (issue 5), computed from the rows of `results/tpu_aot.json`: what is met, what is missed.

    python benchmarks/tpu_aot.py --summary

No compiler is needed, and nothing is typed in but the limits. A goal whose rows were not measured is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[tuple[str, str, str, str], Row]  # by topology, workload, optimizer, program

OURS = ("weights sharded", "weights replicated")  # sharded is the default on TPU

ORIGINAL = "original"  # the closed original's program
OF_ITS_PEAK = 1 / 4


@dataclass(frozen=True)
class Verdict:
    goal: str
    topology: str
    workload: str
    optimizer: str
    program: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def indexed(rows: Iterable[Row]) -> Rows:
    return {(r["topology"], r["workload"], r["optimizer"], r["variant"]): r for r in rows}


def total(row: Row) -> float:
    return row["cycles_update"] + row["cycles_copies"] + row["cycles_rest"]


def update_share(row: Row) -> float:
    """Percent of the step's estimated cycles."""
    return 100 * row["cycles_update"] / total(row)


def verdicts(rows: Rows) -> list[Verdict]:
    found = [v for key in rows if key[3] in OURS for v in _of_program(rows, *key)]
    found += [v for key in rows if key[2] == "adam" and key[3] in OURS for v in _adam_as_sgd(rows, *key)]
    return found


def _of_program(rows: Rows, topology: str, workload: str, optimizer: str, program: str) -> Iterator[Verdict]:
    what = (topology, workload, optimizer)
    ours = rows[*what, program]

    def verdict(goal: str, value: float, limit: float) -> Verdict:
        return Verdict(goal, *what, program, value, limit)

    yield verdict("no weight-sized all-reduce", ours["large_all_reduces"], 0)
    if replicated := rows.get((*what, "replicated")):
        yield verdict("wire (MB): not above replicated (+ 1 %)", ours["wire_mb"], 1.01 * replicated["wire_mb"])
        limit = 1.2 / ours["replicas"] * replicated["cycles_update"]
        yield verdict("update (thousand cycles): 1.2/N of replicated", ours["cycles_update"], limit)
    if by_hand := rows.get((*what, "zero1")):
        yield verdict("total (thousand cycles): below ZeRO-1 by hand", total(ours), total(by_hand))
    if (original := rows.get((*what, ORIGINAL))) and program == OURS[0]:
        yield verdict("total (thousand cycles): the closed original's", total(ours), total(original))
        limit = OF_ITS_PEAK * original["peak_mb"]
        yield verdict("peak (MB): a quarter of the closed original's", ours["peak_mb"], limit)


def _adam_as_sgd(rows: Rows, topology: str, workload: str, _: str, program: str) -> Iterator[Verdict]:
    """The paper's claim: sharded, Adam takes no more than SGD."""
    adam = rows[topology, workload, "adam", program]
    if (momentum := rows.get((topology, workload, "momentum", "replicated"))) and program == OURS[0]:
        limit = 1.05 * momentum["peak_mb"]
        goal = "peak (MB): 5 % above replicated momentum's at most"
        yield Verdict(goal, topology, workload, "adam", program, adam["peak_mb"], limit)
    for optimizer in ("momentum", "sgd"):
        if other := rows.get((topology, workload, optimizer, program)):
            goal = f"update share (%): within 2 points of {optimizer}'s"
            apart = abs(update_share(adam) - update_share(other))
            yield Verdict(goal, topology, workload, "adam", program, apart, 2)


WANTED = {
    "topology": ("v3:4x4", "v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:4x4"),
    "workload": ("matrices", "transformer", "resnet50"),
    "optimizer": ("adam", "momentum"),
    "program": ("replicated", "zero1", *OURS),
}


def missing(rows: Rows) -> list[str]:
    """What the issue asks for and nobody has compiled yet, a line for each topology and workload."""
    gone: dict[tuple[str, str], list[str]] = {}
    for topology, workload, optimizer, program in itertools.product(*WANTED.values()):
        if (topology, workload, optimizer, program) not in rows:
            gone.setdefault((workload, topology), []).append(f"{optimizer} {program}")
    everything = len(WANTED["optimizer"]) * len(WANTED["program"])
    return [
        f"{workload} on {topology}: {', '.join(cells) if len(cells) < everything else 'all'}"
        for (workload, topology), cells in gone.items()
    ]


def summary(rows: Rows) -> str:
    """As text: one line for each goal, workload and program, with the topologies that miss it."""
    lines = [f"not compiled: {cells}" for cells in missing(rows)]
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in verdicts(rows):
        groups.setdefault((v.goal, v.workload, v.program), []).append(v)
    for (goal, workload, program), members in sorted(groups.items()):
        missed = [v for v in members if not v.met]
        lines.append(f"{len(members) - len(missed)} of {len(members)} met: {goal} [{workload}, {program}]")
        lines += [f"    missed on {v.topology}, {v.optimizer}: {v.value:.1f} (limit {v.limit:.1f})" for v in missed]
    return "\n".join(lines)
