"""Kill a run at random moments, start it again, and see what was lost: the fault table of docs/checkpoints.md.

python benchmarks/faults.py [--kills 50] [--processes 2 4] [--runs steady waited short] [--keep]

Each round starts examples/distributed.py on N processes, kills one of them (SIGKILL) at a random moment after its first
step, every second time while a checkpoint is being written, and starts it again. A round counts as resumed if the
restart goes on from a whole checkpoint and its losses are those shown before. Lost are the steps between the last one
shown and that checkpoint. With `--keep` the rows go to benchmarks/results/faults.json.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from launch import EXAMPLE, by_hand, started

PATIENCE = 900  # seconds for the first step: processes start slowly on a machine that is busy
STEP = re.compile(r"^step (\d+) loss ([\d.]+)", re.MULTILINE)
NEAR = 0.4  # seconds: a save of this example takes less on an idle machine


class Run(NamedTuple):
    """How a run saves, and what its steps are like."""

    save_every: int
    background: bool
    seconds: float  # that a host waits for its devices in each step, besides what the step takes here
    until_kill: float  # seconds from the first step, at most


RUNS = {
    "steady": Run(2, True, 2.0, 8.0),  # steps take longer than the writing of a checkpoint
    "waited": Run(5, False, 0.0, 2.0),  # for every save
    "short": Run(5, True, 0.0, 2.0),  # many steps in the time that a checkpoint takes
}


def losses(text):
    return {int(step): float(loss) for step, loss in STEP.findall(text)}


def commands(run, directory, count):
    shared = ["--checkpoints", directory / "run", "--save-every", run.save_every, "--heartbeat", 10, "--devices", 1]
    shared += ["--steps", 10**6] + ["--wait-for-saves"] * (not run.background)
    script = [Path(__file__).resolve(), "slowly", run.seconds] if run.seconds else [EXAMPLE]
    return [[*script, *shared, *hand] for hand in by_hand(count)]


def slowly(seconds, arguments):
    """The example, with steps that take so long."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import distributed

    quick = distributed.own_part
    distributed.own_part = lambda i: (time.sleep(seconds), quick(i))[1]
    sys.argv = ["distributed.py", *arguments]
    distributed.main()


def unfinished(directory):
    """What is being written, or was when somebody died."""
    return set((directory / "run").glob("*.shardstep-*"))


def one_round(run, directory, count, k, chance):
    """Run, kill; what was shown up to then, from where the run went on, and whether a save was cut off."""
    quickly = {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    before = unfinished(directory)
    with started(commands(run, directory, count), directory / f"logs-{count}-{k}", [quickly] * count) as processes:
        start = time.monotonic()
        while not STEP.search(processes.output()):
            ended = [p.poll() for p in processes.running]
            if any(code is not None for code in ended) or time.monotonic() > start + PATIENCE:
                print(f"no step was made; exit codes {ended}:\n{processes.output()[-3000:]}", flush=True)
                break
            time.sleep(0.02)
        time.sleep(chance.uniform(0.0, run.until_kill))
        if k % 2:
            until = time.monotonic() + PATIENCE
            while not unfinished(directory) - before and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, NEAR))
        victim = chance.randrange(count)
        processes.running[victim].send_signal(signal.SIGKILL)
        for other in processes.running:  # the scheduler takes the rest away
            other.kill()
            other.wait()
        text = processes.output()
    resumed = re.search(r"resumed at step (\d+)", text)
    return losses(text), int(resumed[1]) if resumed else None, bool(unfinished(directory) - before)


def rounds(run, count, kills, done):
    """One kill after the other, the first of which comes after `done` others: what each cost."""
    chance = random.Random(100 * done + count)
    directory = Path(tempfile.mkdtemp(prefix="shardstep-faults-"))
    last, known, cut_off = -1, {}, False
    try:
        for k in range(kills + 1):
            shown, at, writing = one_round(run, directory, count, k, chance)
            if k:
                same = all(abs(known[i] - shown[i]) <= 1e-4 * abs(known[i]) for i in shown if i in known)
                yield {
                    "killed after step": last,
                    "in a save": cut_off,
                    "went on at": at or 0,
                    "lost": last + 1 - (at or 0),
                    "resumed": same and min(shown, default=None) == (at or 0),
                }
            known |= shown
            last, cut_off = max(shown, default=last), writing
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def with_one_more(row, kill):
    lost = [*row["lost"], kill["lost"]]
    return {
        **row,
        "kills": len(lost),
        "in a save": row["in a save"] + kill["in a save"],
        "resumed": row["resumed"] + kill["resumed"],
        "lost": lost,
        "lost, average": sum(lost) / len(lost),
        "lost, at most": max(lost),
    }


def begun(name, count, mark):
    """The row that is there of this very code, or one without kills."""
    from recorded import read

    for row in read("faults"):
        if (row["run"], row["processes"], row["code"]) == (name, count, mark["code"]):
            return row
    run = {"run": name, "processes": count, **RUNS[name]._asdict(), "bound": RUNS[name].save_every}
    return {**run, "kills": 0, "in a save": 0, "resumed": 0, "lost": [], "lost, at most": 0, "lost, average": 0, **mark}


def replace(row):
    from recorded import keep, read

    others = [r for r in read("faults") if (r["run"], r["processes"]) != (row["run"], row["processes"])]
    keep("faults", [*others, row])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    from recorded import stamp

    missed, mark = False, stamp("faults")
    for name in options.runs:
        for count in options.processes:
            row = begun(name, count, mark)
            for kill in rounds(RUNS[name], count, options.kills - row["kills"], row["kills"]):
                print(name, count, kill, flush=True)
                row = with_one_more(row, kill)
                if options.keep:
                    replace(row)
            print(f"{name}, {count} processes: {row['resumed']} of {row['kills']} resumed; steps lost:")
            print(f"  {row['lost, average']:.1f} on average, {row['lost, at most']} at most, of {row['bound']} allowed")
            missed |= row["resumed"] < row["kills"] or row["lost, at most"] > row["bound"]
    return missed


if __name__ == "__main__":
    if sys.argv[1:2] == ["slowly"]:
        slowly(float(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
