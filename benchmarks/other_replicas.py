"""What differs between the same run on other numbers of replicas, and what it costs to avoid that.

python benchmarks/other_replicas.py [--steps 50] [--json results/other_replicas.json]

A transformer's worth of matrices is trained from the same start on 1, 2, 4 and 8 simulated replicas, with the options
of docs/communication.md. Printed are the largest distance of a weight from the run on one replica with the same
options (as a share of the leaf's norm), that of the loss, the bytes on the wire, and the seconds of a step. One machine
plays all replicas: seconds compare options, not numbers of replicas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardstep
from shardstep import Options

WIDTH, LAYERS, EXAMPLES = 256, 4, 256
OPTIMIZER = optax.adamw(1e-3)
RUNS = {
    "float32": (jnp.float32, {}),
    "float32, deterministic": (jnp.float32, {"deterministic": True}),
    "float32, int8 wire": (jnp.float32, {"wire": "int8"}),
    "bfloat16": (jnp.bfloat16, {}),
    'bfloat16, reduce="float32"': (jnp.bfloat16, {"reduce": "float32"}),
    "bfloat16, deterministic": (jnp.bfloat16, {"deterministic": True}),
}


def create(dtype):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5).astype(dtype) for key in keys]
    return params, OPTIMIZER.init(params)


def train_step(state, batch):
    params, moments = state

    def loss_of(params):
        h = batch["x"].astype(params[0].dtype)
        for w in params:
            h = h + jnp.tanh(h @ w)
        return jnp.mean((h.astype(jnp.float32) - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    changes, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, changes), moments), loss


def batch_of(i):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (EXAMPLES, WIDTH))
    return {"x": x, "y": jnp.sin(x)}


def trained(n, dtype, options, steps):
    """The weights, the last loss, bytes on the wire, and the median seconds of a step."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:n]), ("data",))
    step = shardstep.shard(train_step, mesh, batch_argnums=1, options=Options(**options))
    state, seconds = create(dtype), []
    sent = step.plan(state, batch_of(0)).wire_bytes.sharded
    for i in range(steps):
        batch = jax.block_until_ready(batch_of(i))
        start = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
    weights = [np.asarray(w, np.float64) for w in shardstep.logical(state[0])]
    return weights, float(loss), sent, statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.replicas))
    rows = []
    for name, (dtype, how) in RUNS.items():
        first = None
        for n in options.replicas:
            weights, loss, sent, seconds = trained(n, dtype, how, options.steps)
            first = first or (weights, loss)
            apart = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(weights, first[0], strict=True))
            row = {
                "run": name,
                "replicas": n,
                "weights": float(apart),
                "loss": abs(loss / first[1] - 1),
                "wire": sent,
                "seconds": seconds,
            }
            rows.append(row)
            print(
                f"{name:28s} {n} replicas: weights {apart:8.1e}, loss {row['loss']:8.1e},"
                f" {sent / 2**20:6.2f} MiB, {seconds * 1e3:6.1f} ms",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "steps": options.steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
