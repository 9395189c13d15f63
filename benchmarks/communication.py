"""The speed goals on CPU: the transformer on 2, 4 and 8 devices, and a model of a hundred small tensors.

    python benchmarks/communication.py --json results/communication.json      # about ten minutes on two idle cores
    python benchmarks/communication.py --smoke                                # a tiny transformer instead

Each device count runs `benchmarks/core.py` in a process of its own; see there for how it is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CORE = Path(__file__).resolve().parent / "core.py"
VARIANTS = ("replicated", "zero1", "shardstep", "shardstep-sharded")


def measure(workload: str, devices: int, steps: int) -> dict[str, Any]:
    """The report of `core.py` for one workload and device count."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, str(CORE), "--devices", str(devices), "--workload", workload, "--json", str(found)]
        command += ["--variant", *VARIANTS, "--steps", str(steps), "--compilations", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(found.read_text())


def line(report: dict[str, Any], workload: str, devices: int) -> tuple[str, dict[str, float]]:
    median = {m["variant"]: m["step"]["median"] for m in report["workloads"][workload]}
    ours = median["shardstep"]  # what a user gets who asks for nothing
    figures = {**median, "over_zero1": median["zero1"] / ours, "over_replicated": median["replicated"] / ours}
    times = "  ".join(f"{name} {median[name]:8.1f} ms" for name in VARIANTS)
    text = f"{workload:14s} {devices} devices  {times}  {figures['over_zero1']:.2f}x ZeRO-1"
    return f"{text}  {figures['over_replicated']:.2f}x replicated", figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    transformer = "smoke" if args.smoke else "transformer"
    runs = [(transformer, n) for n in args.devices] + [("small-tensors", max(args.devices))]
    results, missed = [], []
    for workload, devices in runs:
        report = measure(workload, devices, args.steps)
        text, figures = line(report, workload, devices)
        print(text, flush=True)
        results.append({"workload": workload, "devices": devices, **figures, "report": report})
        goal = figures["over_replicated"] >= 1.0 if workload == "small-tensors" else figures["over_zero1"] >= 1.5
        missed += [] if goal else [f"{workload} on {devices} devices"]
    print("goals missed: " + (", ".join(missed) or "none"))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
