"""PyTorch and shardstep on the same transformer, in as many processes, one thread each.

    python benchmarks/against_torch.py                              # 2 and 4 processes
    python benchmarks/against_torch.py --processes 2 --rounds 20
    python benchmarks/against_torch.py --variant shardstep ddp-fused

The work is the transformer of `workloads.py`: 42 million parameters, AdamW after clipping by the global norm, one short
sequence a process, float32. Weights and tokens are the same, and the losses of the first steps must agree, or there is
no result.

Each variant is a group of processes joined by gloo over 127.0.0.1. The groups take turns, a few steps each, and wait on
a pipe meanwhile. They do not all fit into memory, so there are two sittings: one with the fused AdamW, one with the
default one (a Python loop on the CPU); the JAX variants take part in both. Each process keeps to one core, and glibc
keeps freed memory (see `cell.py`), for both frameworks. PyTorch gets an environment of its own, `.venv-torch`, made on
the first run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cell import KEEP_MEMORY
from recorded import revision
from rich.console import Console
from rich.table import Table
from turns import Group, GroupError, Turn, be_alone_on_loopback, free_port, groups

ROOT = Path(__file__).parent.parent
HERE = ROOT / "benchmarks"
TORCH = "torch==2.13.0"  # by the exact version pip finds a CPU build where one is laid out for it
ENVIRONMENT = ROOT / ".venv-torch"
# The first losses of every variant against those of the first one. They fall from 9 to 0.005 in three steps, for the
# tokens are always the same: hence an absolute tolerance too, a ten-thousandth of the first.
AGREE = {"rel_tol": 1e-4, "abs_tol": 1e-3}


# --- variants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    name: str
    worker: str  # its variant, in the worker's own words
    framework: str
    adamw: str = ""  # PyTorch's: default or fused
    simulated: bool = False  # one process that simulates the devices: not what is compared, but good to know


VARIANTS = [
    Variant("shardstep", "shardstep", "jax"),
    Variant("shardstep-sharded", "shardstep-sharded", "jax"),
    *(Variant(name, name, "jax") for name in ("replicated", "zero1", "fsdp")),
    *(
        Variant(f"{way}{suffix}", f"{way}{suffix}", "torch", adamw)
        for adamw, suffix in (("fused", "-fused"), ("default", ""))
        for way in ("ddp", "ddp-zero", "fsdp2")
    ),
    Variant("shardstep-one-process", "shardstep", "jax", simulated=True),
    Variant("shardstep-sharded-one-process", "shardstep-sharded", "jax", simulated=True),
]


def sittings(chosen: Sequence[Variant]) -> Iterator[list[Variant]]:
    """Which variants are alive at once."""
    jax = [v for v in chosen if v.framework == "jax" and not v.simulated]
    for adamw in ("fused", "default"):
        torch = [v for v in chosen if v.adamw == adamw]
        if torch or (jax and adamw == "fused"):
            yield jax + torch
    if simulated := [v for v in chosen if v.simulated]:
        yield simulated


# --- starting a group -----------------------------------------------------------------------------------------------

# One thread: for JAX's own pools, for XLA's, for OpenMP's and MKL's.
ONE_THREAD = {
    "NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def start(variant: Variant, processes: int, args: argparse.Namespace, scratch: Path) -> Group:
    here = 1 if variant.simulated else processes
    port = free_port()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    commands = []
    for i in range(here):
        command = [*worker(variant, processes, args, scratch), "--process", i, "--processes", here, "--port", port]
        if args.pin and cores and not variant.simulated:
            command += ["--core", cores[i % len(cores)]]
        commands.append([str(part) for part in command])
    return Group(commands, environment(variant, args), scratch / f"{variant.name}-{processes}.log")


def worker(variant: Variant, processes: int, args: argparse.Namespace, scratch: Path) -> list[Any]:
    if variant.framework == "torch":
        command = [torch_python(), HERE / "torch_worker.py", "--start", scratch / f"start-{processes}.npz"]
    else:
        command = [sys.executable, HERE / "jax_worker.py", "--size", args.size]
        command += ["--devices", processes if variant.simulated else 1]
    return [*command, "--variant", variant.worker]


def environment(variant: Variant | None, args: argparse.Namespace) -> Mapping[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "OMP_", "MKL_", "MALLOC_"))}
    paths = os.pathsep.join(map(str, [ROOT / "src", HERE]))
    threads = {} if variant and variant.simulated else ONE_THREAD
    memory = KEEP_MEMORY if args.malloc == "keep" else {}
    return {**kept, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **threads, **memory}


def torch_python() -> Path:
    return ENVIRONMENT / "bin" / "python"


def make_torch_environment() -> None:
    """With Python 3.11 where there is one: that is the version a CPU build of PyTorch is most likely laid out for."""
    stamp = ENVIRONMENT / f".installed-{TORCH}"
    if stamp.exists():
        return
    python = shutil.which("python3.11") or sys.executable
    subprocess.run([python, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    subprocess.run([torch_python(), "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True)
    stamp.touch()


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One variant with so many processes."""

    variant: Variant
    processes: int
    turns: list[Turn] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def loopback(self) -> float | None:
        """Bytes that a process sent in a step, by the kernel's count; the median."""
        found = [t.loopback_bytes / len(t.seconds) / self.processes for t in self.turns if t.loopback_bytes is not None]
        return statistics.median(found) if found else None

    @property
    def milliseconds(self) -> list[float]:
        return [1e3 * s for turn in self.turns for s in turn.seconds]

    def part(self, name: str) -> float | None:
        """Milliseconds, the median."""
        found = [parts[name] for turn in self.turns for parts in turn.parts if name in parts]
        return 1e3 * statistics.median(found) if found else None


def measure(processes: int, args: argparse.Namespace, scratch: Path, say: Console) -> list[Measured]:
    if args.size == "scanned" and any(v.framework == "torch" and v.name in args.variant for v in VARIANTS):
        raise SystemExit("the scanned model has no twin in PyTorch: choose JAX's variants")
    export = [sys.executable, HERE / "jax_worker.py", "--size", args.size, "--processes", processes]
    export += ["--export", scratch / f"start-{processes}.npz"]
    if any(v.framework == "torch" for v in VARIANTS if v.name in args.variant):
        subprocess.run([str(part) for part in export], env=environment(None, args), check=True)
    chosen = [v for v in VARIANTS if v.name in args.variant]
    found = {v.name: Measured(v, processes) for v in chosen}
    for together in sittings(chosen):
        sit(together, found, processes, args, scratch, say)
    return list(found.values())


def sit(
    together: Sequence[Variant],
    found: dict[str, Measured],
    processes: int,
    args: argparse.Namespace,
    scratch: Path,
    say: Console,
) -> None:
    with groups() as alive:
        for variant in together:
            measured = found[variant.name]
            try:
                group = alive[variant.name] = start(variant, processes, args, scratch)
                measured.first_losses = group.train(args.warm_up).losses
                measured.facts = group.facts()
                check(measured, found)
            except GroupError as error:
                measured.error = str(error)
                if ended := alive.pop(variant.name, None):
                    ended.end()
            say.print(f"[dim]{processes} processes: {variant.name} {measured.error or 'is ready'}[/]")
        for _ in range(args.rounds):
            for name, group in alive.items():
                found[name].turns.append(group.train(args.steps))


def check(m: Measured, found: Mapping[str, Measured]) -> None:
    """This variant does the same work as the first one that ran."""
    first = next(other for other in found.values() if other.first_losses)
    for i, (ours, theirs) in enumerate(zip(m.first_losses, first.first_losses, strict=True)):
        if not math.isclose(ours, theirs, **AGREE):
            raise SystemExit(
                f"{m.variant.name} does other work than {first.variant.name}: after {i} steps its loss is {ours}, not"
                f" {theirs}"
            )


# --- reporting ------------------------------------------------------------------------------------------------------

FACTS = (
    "arg_bytes",
    "temp_bytes",
    "wire_bytes",
    "planned_wire_bytes",
    "compile_s",
    "optimizer_bytes",
    "weight_bytes",
    "collectives",
)


def row(m: Measured, args: argparse.Namespace) -> dict[str, Any]:
    times = m.milliseconds
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [None] * 3
    peaks = [turn.peak_rss_bytes for turn in m.turns if turn.peak_rss_bytes]
    return {
        "workload": args.size,
        "optimizer": "AdamW + clip",
        "devices": m.processes,
        "variant": m.variant.name,
        "step_ms": median,
        "spread": [low, high],
        **{name: m.facts.get(name) for name in FACTS},
        "loopback_bytes": m.loopback,
        "framework": m.variant.framework,
        "adamw": m.variant.adamw or None,
        "processes": 1 if m.variant.simulated else m.processes,
        "peak_rss_bytes": max(peaks, default=None),
        "forward_backward_ms": m.part("forward_backward"),
        "clip_and_update_ms": m.part("clip_and_update"),
        "steps": len(times),
        "loss": m.first_losses[-1] if m.first_losses else None,
        "error": m.error or None,
        "settings": {"malloc": args.malloc, "pinned": args.pin, "rounds": args.rounds, "steps": args.steps},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "processor": processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **m.facts.get("versions", {})},
        **revision("wire" if args.json and args.json.stem == "wire" else "torch"),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(title=f"{rows[0]['workload']}, {rows[0]['devices']} replicas; medians (quartiles)")
    for title in (
        "variant",
        "step, ms",
        "shardstep is",
        "forward + backward",
        "clip + AdamW",
        "optimizer, MB",
        "peak, MB",
    ):
        result.add_column(title, justify="left" if title == "variant" else "right")
    base = next((r["step_ms"] for r in rows if r["variant"] == "shardstep"), None)
    for r in rows:
        if r["step_ms"] is None:
            result.add_row(r["variant"], r["error"])
            continue
        low, high = r["spread"]
        result.add_row(
            r["variant"],
            f"{r['step_ms']:.0f} ({low:.0f}-{high:.0f})",
            f"{r['step_ms'] / base:.2f}x" if base else "",
            *("" if r[k] is None else f"{r[k]:.0f}" for k in ("forward_backward_ms", "clip_and_update_ms")),
            *("" if r[k] is None else f"{r[k] / 1e6:.0f}" for k in ("optimizer_bytes", "peak_rss_bytes")),
        )
    return result


def write(path: Path, found: Sequence[Measured], args: argparse.Namespace) -> None:
    """What was measured takes the place of what the file holds for the same variants and sizes; the rest stays."""
    new = [row(m, args) for m in found]
    old = json.loads(path.read_text()) if path.exists() else []
    measured = {(r["workload"], r["devices"], r["variant"]) for r in new}
    kept = [r for r in old if (r["workload"], r["devices"], r["variant"]) not in measured]
    order = [v.name for v in VARIANTS]
    result = sorted(kept + new, key=lambda r: (r["workload"], r["devices"], order.index(r["variant"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def processor() -> str:
    """The processor's name; Linux keeps it in a file, and `platform` does not look there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [v.name for v in VARIANTS]
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--variant", nargs="*", choices=names, default=names, metavar="VARIANT", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=10, help="turns of each group (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="in a turn (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before, whose losses must agree")
    parser.add_argument("--size", choices=("transformer", "scanned", "smoke"), default="transformer")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep", help="see cell.py")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="a process to a core")
    parser.add_argument("--scratch", type=Path, default=ENVIRONMENT / "run", help="for weights and logs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    say = Console()
    if any(v.framework == "torch" and v.name in args.variant for v in VARIANTS):
        make_torch_environment()
    args.scratch.mkdir(parents=True, exist_ok=True)
    for processes in args.processes:
        found = measure(processes, args, args.scratch, say)
        say.print(table([row(m, args) for m in found]))
        if args.json:
            write(args.json, found, args)


if __name__ == "__main__":
    if not be_alone_on_loopback():
        print("loopback is shared with other programs: what is sent there is not counted (only root can be alone)")
    main()
