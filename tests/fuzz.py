"""`make fuzz`: random whole steps and random equations, with fresh seeds, for so many seconds; counts what it tried.

    python tests/fuzz.py --seconds 600 [--seed S] [--only steps|equations] [--processes N] [--log FILE]
    python tests/fuzz.py --replay step:training:123456     # one program again, made as small as it gets
    python tests/fuzz.py --visiting                        # its weights are small: examples go to them all the same

It works in rounds, each in a process of its own, so that compiled programs do not pile up in memory. A round prints one
line that starts with `FUZZ ` and is JSON; the last line, `FUZZ TOTAL `, adds them up. The exit status says whether a
number was wrong or something crashed that is no clear refusal.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads that spin while they wait

import jaxlib.version

# Compiling a program well takes longer than running it badly. (Newer XLA no longer knows the flags, and dies of them.)
if jaxlib.version.__version_info__ < (0, 11):
    quickly = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", quickly)

import argparse
import collections
import concurrent.futures
import itertools
import json
import subprocess
import sys
import time
import traceback

import equations
import jax
import whole_steps
from choices import Dice, simplified

import shardstep
from shardstep._src.planning import visits

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

KINDS = ("both", "steps", "equations")
STEPS_PER_ROUND, PROGRAMS_PER_ROUND = 200, 40  # compiled whole; taken apart into equations


def try_step(choices: Dice, kind: str) -> tuple[str, str]:
    """What became of a program: "right", "refused" (clearly), "unwritable", "wrong" or "crashed"; and why."""
    program = None
    try:
        program = whole_steps.write(choices, kind)
        wrong = whole_steps.disagreements(program)
        return ("wrong", f"{wrong}\n{program!r}") if wrong else ("right", "")
    except whole_steps.Unwritable as error:
        return "unwritable", str(error)
    except shardstep.ShardstepError as error:
        return ("crashed" if "internal error" in str(error) else "refused"), f"{error}\n{program!r}"
    except Exception:
        return ("crashed" if program is not None else "unwritable"), f"{traceback.format_exc()}\n{program!r}"


def round_of(seed: int, until: float, only: str = "both") -> dict:
    """One process's worth: whole steps, and equations played by hand."""
    counts: collections.Counter = collections.Counter()
    failures, refusals = [], collections.Counter()
    for i in range(STEPS_PER_ROUND if only != "equations" else 0):
        if time.time() > until:
            break
        kind = whole_steps.KINDS[i % len(whole_steps.KINDS)]
        print(f"next step:{kind}:{seed + i}", file=sys.stderr, flush=True)  # the last one, if the compiler dies
        outcome, why = try_step(Dice(seed + i), kind)
        counts[outcome] += 1
        if outcome in ("wrong", "crashed"):
            failures.append(f"step:{kind}:{seed + i}")
            print(f"-- {outcome}: --replay {failures[-1]}\n{why}", flush=True)
        if outcome in ("refused", "unwritable"):
            refusals[f"{kind}:{seed + i} {outcome}: {why.strip().splitlines()[0][:200]}"] += 1
    played = equations.Played()
    for i in range(PROGRAMS_PER_ROUND if only != "steps" else 0):
        if time.time() > until:
            break
        try:
            equations.play(Dice(seed + i), played)
        except Exception:
            failures.append(f"equations::{seed + i}")
            print(f"-- an equation: --replay {failures[-1]}\n{traceback.format_exc()}", flush=True)
    return {
        "seed": seed,
        "steps": counts["right"] + counts["wrong"] + counts["crashed"],
        **{outcome: counts[outcome] for outcome in ("right", "refused", "unwritable", "wrong", "crashed")},
        "equations": played.equations,
        "plays": played.plays,
        "on_two_axes": played.on_two_axes,
        "padded": played.padded,
        "rules": sorted(played.rules),
        "failures": failures,
        "refusals": list(refusals),
    }


def replay(what: str) -> None:
    kind, how, seed = what.split(":")
    if kind == "equations":
        equations.play(Dice(int(seed)), equations.Played())
        return
    dice = Dice(int(seed))
    outcome, why = try_step(dice, how)
    print(outcome, why)
    if outcome in ("wrong", "crashed"):
        print("simplifying ...", flush=True)
        made = simplified(dice.made, lambda made: try_step(Dice(made=made), how)[0] == outcome)
        print(*try_step(Dice(made=made), how))


def visit_always() -> None:
    """Whatever it costs."""
    visits.may_pay = visits.may_pay_in_loops = lambda schedule: True
    visits.worth = visits.worth_in_loops = lambda visited, otherwise: True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=KINDS, default="both")
    parser.add_argument("--processes", type=int, default=1, help="rounds at once")
    parser.add_argument("--log")
    parser.add_argument("--replay")
    parser.add_argument("--visiting", action="store_true", help="examples go to weights wherever they can")
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.visiting:
        visit_always()
    if told.replay:
        replay(told.replay)
        return 0
    if told.round is not None:
        print("FUZZ", json.dumps(round_of(told.round, told.until, told.only)), flush=True)
        return 0
    return rounds(told)


def rounds(told: argparse.Namespace) -> int:
    until = time.time() + told.seconds
    first = time.time_ns() // 1000 % 10**9 * 1000 if told.seed is None else told.seed
    total: collections.Counter = collections.Counter()
    rules: set[str] = set()
    failures: list[str] = []

    def one(seed: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, "--round", str(seed), "--until", str(until), "--only", told.only]
        command += ["--visiting"] * told.visiting
        return subprocess.run(command, capture_output=True, text=True)

    def note(seed: int, done: subprocess.CompletedProcess[str]) -> None:
        print(done.stdout, end="", flush=True)
        if told.log:
            with open(told.log, "a") as log:
                log.write(done.stdout)
        line = done.stdout.splitlines()[-1] if done.stdout else ""
        if line.startswith("FUZZ "):
            found = json.loads(line.removeprefix("FUZZ "))
            total.update({k: v for k, v in found.items() if isinstance(v, int) and k != "seed"})
            rules.update(found["rules"])
            failures.extend(found["failures"])
        else:  # the process itself died
            failures.append("".join([w for w in done.stderr.split() if w.startswith("step:")][-1:]) or f"round:{seed}")
            print(f"-- the process died: {failures[-1]}\n{done.stderr[-4000:]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(told.processes) as pool:
        seeds = itertools.count(first, 1000)
        running = {pool.submit(one, seed): seed for seed in itertools.islice(seeds, told.processes)}
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for finished in done:
                note(running.pop(finished), finished.result())
                if time.time() < until:
                    seed = next(seeds)
                    running[pool.submit(one, seed)] = seed
    summary = {"seed": first, **total, "rules": len(rules), "failures": failures}
    print("FUZZ TOTAL", json.dumps(summary), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
