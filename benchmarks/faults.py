"""Kill a run at random moments, start it again, and see what was lost: the fault table of docs/checkpoints.md.

python benchmarks/faults.py [--kills 50] [--processes 2 4] [--json results/faults.json]

Each round starts examples/distributed.py on N processes, kills one of them (SIGKILL) at a random moment after its first
step, in training or in a save, and starts it again. A round counts as resumed if the restart goes on from a whole
checkpoint and its losses are those shown before. Lost are the steps between the last one shown and that checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from launch import EXAMPLE, by_hand, started

SAVE_EVERY = 5
PATIENCE = 900  # seconds for the first step: processes start slowly on a machine that is busy
STEP = re.compile(r"^step (\d+) loss ([\d.]+)", re.MULTILINE)


def losses(text):
    return {int(step): float(loss) for step, loss in STEP.findall(text)}


def commands(directory, count):
    shared = ["--checkpoints", directory / "run", "--save-every", SAVE_EVERY, "--heartbeat", 10, "--devices", 1]
    return [[EXAMPLE, *shared, "--steps", 10**6, *hand] for hand in by_hand(count)]


def one_round(directory, count, k, chance):
    """Run, kill; what was shown up to then, and from where the run went on."""
    quickly = {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with started(commands(directory, count), directory / f"logs-{count}-{k}", [quickly] * count) as processes:
        start = time.monotonic()
        while not STEP.search(processes.output()):
            ended = [p.poll() for p in processes.running]
            if any(code is not None for code in ended) or time.monotonic() > start + PATIENCE:
                print(f"no step was made; exit codes {ended}:\n{processes.output()[-3000:]}", flush=True)
                break
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, 2.0))
        victim = chance.randrange(count)
        processes.running[victim].send_signal(signal.SIGKILL)
        for other in processes.running:  # the scheduler takes the rest away
            other.kill()
            other.wait()
        text = processes.output()
    resumed = re.search(r"resumed at step (\d+)", text)
    return losses(text), int(resumed[1]) if resumed else None


def rounds(count, kills, seed=0):
    chance = random.Random(seed + count)
    directory = Path(tempfile.mkdtemp(prefix="shardstep-faults-"))
    table, last, known = [], -1, {}
    try:
        for k in range(kills + 1):
            shown, at = one_round(directory, count, k, chance)
            first = min(shown, default=None)
            if k:
                same = all(abs(known[i] - shown[i]) <= 1e-4 * abs(known[i]) for i in shown if i in known)
                table.append(
                    {
                        "killed after step": last,
                        "went on at": at or 0,
                        "lost": last + 1 - (at or 0),
                        "same losses": same,
                        "resumed": first is not None and first == (at or 0),
                    }
                )
                print(count, table[-1], flush=True)
            known |= shown
            last = max(shown, default=last)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return table


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables = {count: rounds(count, options.kills) for count in options.processes}
    for count, table in tables.items():
        resumed = sum(row["resumed"] and row["same losses"] for row in table)
        lost = [row["lost"] for row in table]
        print(f"{count} processes: {resumed} of {len(table)} resumed")
        print(f"  steps lost: at most {max(lost)}, {sum(lost) / len(lost):.1f} on average; saved every {SAVE_EVERY}")
    if options.json:
        options.json.write_text(json.dumps({str(count): table for count, table in tables.items()}, indent=1))


if __name__ == "__main__":
    main()
