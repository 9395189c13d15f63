"""What a checkpoint costs beside plain Orbax: the same state, saved and restored both ways in turns, medians.

python benchmarks/checkpoints.py [--megabytes 600] [--rounds 3]
python benchmarks/checkpoints.py --beside-training [--examples 512]: what one save in 20 steps costs those steps

With `--keep` the rows go to benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from recorded import keep, read, stamp

import shardstep

OPTIMIZER = optax.adam(1e-3)


def train_step(state, x):
    params, moments = state
    gradients = jax.grad(lambda p: sum(jnp.mean((x @ w) ** 2) for w in p))(params)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, changes), moments


def create(megabytes):
    """Four weights and two moments of each, all of them random: zeros would not even be written."""
    width = max(int((megabytes * 2**20 / 4 / 12) ** 0.5) // 24, 1) * 24  # 6 and 8 replicas divide it
    params = [jax.random.normal(key, (width, width)) for key in jax.random.split(jax.random.key(0), 4)]
    moments = jax.tree.map(lambda m: jnp.abs(params[0]) * 1e-3 if m.ndim else m, OPTIMIZER.init(params))
    return (params, moments), jax.random.normal(jax.random.key(1), (24, width))


def mesh_of(n):
    return jax.sharding.Mesh(np.asarray(jax.devices()[:n]), ("data",))


def timed(action):
    start = time.perf_counter()
    result = jax.block_until_ready(action())
    return time.perf_counter() - start, result


def round_of(state, plans, directory):
    seconds = {}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with ocp.StandardCheckpointer() as plain:
        seconds["save, plain Orbax"], _ = timed(
            lambda: (plain.save(directory / "plain", state), plain.wait_until_finished())[0]
        )
        seconds["restore, plain Orbax"], _ = timed(lambda: plain.restore(directory / "plain", abstract))
    seconds["save"], _ = timed(lambda: shardstep.save(directory / "ours", state) and None)
    seconds["restore"], _ = timed(lambda: shardstep.restore(directory / "ours", plans[8]))
    seconds["restore on 6 replicas"], _ = timed(lambda: shardstep.restore(directory / "ours", plans[6]))
    seconds["save, until training goes on"], _ = timed(
        lambda: shardstep.save(directory / "background", state, wait=False) and None
    )
    shardstep.finish()
    return seconds


def beside_training(step, state, x, rounds):
    """Twenty steps, with and without a save in the background that begins with the first; in turns.

    CPU time is of all threads, up to the end of the save; it says the same on a machine that is busy.
    """
    seconds = {name: [] for name in ("20 steps", "20 steps beside one save")}
    seconds |= {f"{name}, CPU time": [] for name in seconds}
    state = jax.block_until_ready(step(state, x))
    directory = Path(tempfile.mkdtemp(prefix="shardstep-bench-"))
    try:
        for n in range(rounds):
            for what in ("20 steps", "20 steps beside one save"):
                start, cpu = time.perf_counter(), time.process_time()
                if "save" in what:
                    shardstep.save(directory, state, step=n, wait=False, keep=1)
                for _ in range(20):
                    state = step(state, x)
                jax.block_until_ready(state)
                seconds[what].append(time.perf_counter() - start)
                shardstep.finish()
                seconds[f"{what}, CPU time"].append(time.process_time() - cpu)
    finally:
        shutil.rmtree(directory)
    return seconds


def in_pairs(plain, beside):
    """The median of the ratios: the two of a round have seen the same load, more or less."""
    return statistics.median(b / a for a, b in zip(plain, beside, strict=True))


def in_turns(rounds, state, plans):
    for _ in range(rounds):
        directory = Path(tempfile.mkdtemp(prefix="shardstep-bench-"))
        try:
            yield round_of(state, plans, directory)
        finally:
            shutil.rmtree(directory)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside-training", action="store_true")
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    state, x = create(options.megabytes)
    if options.beside_training:
        x = jax.random.normal(jax.random.key(1), (options.examples, x.shape[1]))
    steps = {n: shardstep.shard(train_step, mesh_of(n)) for n in (8, 6)}
    plans = {n: step.plan(state, x) for n, step in steps.items()}
    state, x = steps[8].place(state, x)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    if options.beside_training:
        what = "beside training"
        taken = beside_training(steps[8], state, x, options.rounds)
        seconds = {name: statistics.median(each) for name, each in taken.items()}
        plain, beside, plain_cpu, beside_cpu = taken.values()
        ratios = {"ratio": in_pairs(plain, beside), "ratio, CPU time": in_pairs(plain_cpu, beside_cpu)}
        load = {"load": os.getloadavg()[0]}  # of this machine's cores: what others had it do
        found = [{"rounds": options.rounds, "examples": options.examples, **load, **ratios, **seconds}]
        more = {name.replace("ratio", "time"): f"{100 * (ratio - 1):+.1f} %" for name, ratio in ratios.items()}
        print("beside a save:", more)
    else:
        what = "beside plain Orbax"
        found = list(in_turns(options.rounds, state, plans))
        seconds = {name: statistics.median(r[name] for r in found) for name in found[0]}
    print(f"{nbytes / 2**20:.0f} MiB, 8 simulated devices, JAX {jax.__version__}, medians of {options.rounds}")
    for name, each in seconds.items():
        print(f"  {name:30s} {each:6.2f} s")
    if options.keep:
        about = {"what": what, "bytes": nbytes, **stamp("checkpoints")}
        new = [{**about, **row} for row in found]
        keep("checkpoints", [r for r in read("checkpoints") if kind(r) != kind(new[0])] + new)


def kind(row):
    return row.get("what"), row.get("examples")


if __name__ == "__main__":
    main()
