"""What shardstep set out to reach, judged from what was measured: `python benchmarks/goals.py` prints it.

"shardstep" is what a user gets who asks for nothing: weights at rest as `weights="auto"` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from growth import slopes
from recorded import FACTOR, RESULTS, Key, Row, cells, read, update_bound
from scaling import fit, sizes

OTHERS = ("replicated", "shard_map", "zero1", "fsdp")
OVER_ZERO1 = 1.5
BEHIND_REPLICATED = 1.03
BEHIND_FSDP = 1.03
MORE_MEMORY = 1.05
BEHIND_EXPERT = 1.05
CALL = 1.3
PLANNING_S = 20.0
OVER_SGD = {"adam": 1.05, "muon": 1.15}
APART = 0.05
RESIDUAL = 0.15


@dataclass(frozen=True)
class Goal:
    """`found` says what was measured where, and whether that is enough."""

    name: str
    found: tuple[tuple[str, bool], ...]

    @property
    def verdict(self) -> str:
        if not self.found:
            return "not measured"
        met = sum(ok for _, ok in self.found)
        return "met" if met == len(self.found) else f"missed ({met} of {len(self.found)} met)"

    @property
    def missed(self) -> list[str]:
        return [text for text, ok in self.found if not ok]

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict:>24s}  {self.name}", *(f"{'':26s}- {text}" for text in self.missed)])


Measured = dict[Key, dict[str, Row]]


def judge(folder: Path = RESULTS) -> list[Goal]:
    found = {key: cell for key, cell in cells(read("latest", folder)).items() if key.devices > 1}
    bound = {key: cell for key, cell in found.items() if update_bound(cell)}
    rest = {key: cell for key, cell in found.items() if key not in bound}
    eight = {key: cell for key, cell in bound.items() if key.devices == 8}
    return [
        goal("update-bound: ahead of every variant but the expert's", ahead(bound)),
        goal(f"update-bound, 8 devices: {FACTOR:g} times as fast as replicated", faster(eight, "replicated", FACTOR)),
        goal(f"update-bound: {OVER_ZERO1:g} times as fast as ZeRO-1 by hand", faster(bound, "zero1", OVER_ZERO1)),
        goal("compute-bound: at most 3 % behind replicated", behind(rest, None, "replicated", BEHIND_REPLICATED)),
        goal("at most 3 % behind FSDP by hand", behind(found, None, "fsdp", BEHIND_FSDP)),
        goal("no more memory than by hand (5 %): ZeRO-1 if weights are whole, FSDP if sharded", no_more_memory(found)),
        goal("at most 5 % behind the expert", behind(found, "shardstep", "expert", BEHIND_EXPERT)),
        goal(
            "weights sharded: at most 5 % behind the expert",
            behind(found, "shardstep-sharded", "expert-sharded", BEHIND_EXPERT),
        ),
        goal(f"time grows with weights/N: at most {RESIDUAL:.0%} off a straight line", linear(read("latest", folder))),
        goal("never more bytes on the wire than replicated", no_more_bytes(found)),
        goal("ahead of every PyTorch variant on the transformer", torch(read("torch", folder))),
        goal(
            f"weights sharded, one replica of 64 on a GPU: Adam at most {OVER_SGD['adam']:g} times SGD",
            over_sgd(read("gpu_replica", folder), "adam"),
        ),
        goal(
            f"weights sharded, one replica of 64 on a GPU: Muon at most {OVER_SGD['muon']:g} times SGD",
            over_sgd(read("gpu_muon", folder), "muon"),
        ),
        goal(f"the kernel counts what the plan says: at most {APART:.0%} apart", counted(read("wire", folder))),
        goal("cost grows no faster than theory says", growing(read("growth", folder))),
        goal(f"a call on 1,000 leaves: at most {CALL:g} times jit's", calls(read("calls", folder))),
        goal(f"planning 10,000 leaves: under {PLANNING_S:g} s", planning(read("planning", folder))),
    ]


Found = Iterator[tuple[str, bool]]


def goal(name: str, found: Found) -> Goal:
    return Goal(name, tuple(found))


def default(cell: dict[str, Row]) -> Row:
    return next((row for row in cell.values() if row.get("default")), cell["shardstep"])


def ahead(measured: Measured) -> Found:
    for key, cell in measured.items():
        best = min((name for name in OTHERS if name in cell), key=lambda name: cell[name]["step_ms"])
        factor = cell[best]["step_ms"] / default(cell)["step_ms"]
        yield f"{key}: {factor:.2f}x {best}, the fastest of them", factor > 1


def faster(measured: Measured, than: str, factor: float) -> Found:
    for key, cell in measured.items():
        got = cell[than]["step_ms"] / default(cell)["step_ms"]
        yield f"{key}: {got:.2f}x", got >= factor


def behind(measured: Measured, variant: str | None, other: str, limit: float) -> Found:
    """Of the variant, or of the default one."""
    for key, cell in measured.items():
        if other in cell:
            ours, theirs = (cell[variant] if variant else default(cell))["step_ms"], cell[other]["step_ms"]
            yield f"{key}: {ours:.1f} ms against {theirs:.1f} ({ours / theirs - 1:+.1%})", ours / theirs <= limit


def linear(rows: list[Row]) -> Found:
    measured = sizes(rows)
    for variant in ("shardstep", "shardstep-sharded"):
        line = fit([cell[variant] for cell in measured])
        if line is not None:
            yield f"{variant}: {line.residual:.0%} off at one of {line.points} sizes", line.residual <= RESIDUAL


def no_more_bytes(measured: Measured) -> Found:
    """Than the replicated step that shares its examples (`jit` has everyone compute all microbatches)."""
    for key, cell in measured.items():
        replicated = max(cell[name]["wire_bytes"] for name in ("replicated", "shard_map") if name in cell)
        for variant in ("shardstep", "shardstep-sharded"):
            ratio = cell[variant]["wire_bytes"] / replicated
            yield f"{key}, {variant}: {ratio:.4f} of replicated", ratio <= 1.0 + 1e-3  # norms are sums of their own


def no_more_memory(measured: Measured) -> Found:
    """Arguments and temporaries of each device."""
    for key, cell in measured.items():
        ours = default(cell)
        by_hand = cell.get("fsdp" if ours["variant"] == "shardstep-sharded" else "zero1")
        if by_hand:
            needed, theirs = (row["arg_bytes"] + row["temp_bytes"] for row in (ours, by_hand))
            text = f"{key}, {ours['variant']}: {needed / 1e6:.1f} MB against {theirs / 1e6:.1f}"
            yield text, needed <= MORE_MEMORY * theirs


def torch(found: list[Row]) -> Found:
    rows = [row for row in found if row["step_ms"] is not None]
    for devices in sorted({row["devices"] for row in rows}):
        here = [row for row in rows if row["devices"] == devices]
        ours = next((row for row in here if row["variant"] == "shardstep"), None)
        best = min((row for row in here if row["framework"] == "torch"), key=lambda row: row["step_ms"], default=None)
        if ours and best:
            text = f"{devices} processes: {ours['step_ms']:.0f} ms against {best['step_ms']:.0f} of {best['variant']}"
            yield text, ours["step_ms"] < best["step_ms"]


def over_sgd(rows: list[Row], optimizer: str) -> Found:
    """An expensive optimizer's step over plain SGD's on the same model; AdamW counts as Adam."""
    times = {
        (row["workload"], row["optimizer"].removesuffix("w")): row["variants"]["shardstep-sharded"]["step_ms"]
        for row in rows
        if row["replicas"] == 64 and "step_ms" in row.get("variants", {}).get("shardstep-sharded", {})
    }
    for (workload, name), ms in times.items():
        if name == optimizer and (workload, "sgd") in times:
            ratio = ms / times[workload, "sgd"]
            yield (
                f"{workload}: {ms:.1f} ms against {times[workload, 'sgd']:.1f} ({ratio:.2f}x)",
                ratio <= OVER_SGD[name],
            )


def counted(rows: list[Row]) -> Found:
    for row in rows:
        if row["planned_wire_bytes"] and row["loopback_bytes"]:
            apart = row["loopback_bytes"] / row["planned_wire_bytes"] - 1
            yield f"{row['workload']}, {row['devices']} processes, {row['variant']}: {apart:+.1%}", abs(apart) <= APART


def growing(rows: list[Row]) -> Found:
    for slope in slopes(rows):
        text = f"{slope.what} with {slope.axis}: exponent {slope.exponent:.2f}, expected {slope.expected:g}"
        yield f"{text}, {slope.points} points", slope.as_expected


def calls(rows: list[Row]) -> Found:
    for row in rows:
        if row["leaves"] == 1000:
            text = f"{row['shardstep_us']:.0f} us against {row['jit_us']:.0f} on {row['devices']} devices"
            yield f"{text}: {row['ratio']:.2f}x", row["ratio"] <= CALL


def planning(rows: list[Row]) -> Found:
    for row in rows:
        if row["leaves"] == 10_000:
            yield f"{row['plan_s']:.1f} s, {row['trace_s']:.1f} s of it tracing", row["plan_s"] < PLANNING_S


if __name__ == "__main__":
    for found in judge():
        print(found)
