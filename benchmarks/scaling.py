"""What grows with the number of leaves, and how step time grows with the model.

    python benchmarks/scaling.py calls --json out.json       # Python time of a call, jit and shardstep, in turn
    python benchmarks/scaling.py planning --json out.json    # a plan from shapes alone

`fit` holds the step times of models of several sizes against a straight line in weights/N, of which what is sent is a
fixed multiple.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from recorded import Row, cells

LEAVES = (10, 100, 1_000, 10_000)


# --- programs of many leaves ----------------------------------------------------------------------------------------


def momentum(shapes: Sequence[tuple[int, ...]]) -> tuple[Callable[..., Any], Any]:
    """A step of momentum on weights of these shapes, and its state, as shapes. A leaf's work is next to nothing."""
    import jax
    import jax.numpy as jnp

    def loss(params: Sequence[Any], x: Any) -> Any:
        return jnp.mean(sum(jnp.sum(w) for w in params) * x)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        moments = [0.9 * m + g for m, g in zip(state["moments"], grads, strict=True)]
        params = [p - 1e-3 * m for p, m in zip(state["params"], moments, strict=True)]
        return {"params": params, "moments": moments}, value

    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return step, {"params": structs, "moments": structs}


def deep(weights: int) -> tuple[Callable[..., Any], Any]:
    """Adam on a deep network, matrices and biases in turn: three leaves of state for each weight, and a counter."""
    import jax
    import jax.numpy as jnp

    def loss(params: Sequence[Any], x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w) if w.ndim == 2 else x + w
        return jnp.mean(x**2)

    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        count = state["count"] + 1
        mean = [0.9 * m + 0.1 * g for m, g in zip(state["mean"], grads, strict=True)]
        square = [0.99 * v + 0.01 * g * g for v, g in zip(state["square"], grads, strict=True)]

        def update(p: Any, m: Any, v: Any) -> Any:
            return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)

        params = list(map(update, state["params"], mean, square))
        return {"params": params, "mean": mean, "square": square, "count": count}, value

    params = [jax.ShapeDtypeStruct((64, 64) if i % 2 else (64,), jnp.float32) for i in range(weights)]
    return step, {"params": params, "mean": params, "square": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}


# --- a call ---------------------------------------------------------------------------------------------------------


def calls(mesh: Any, leaves: Sequence[int], times: int = 200) -> list[Row]:
    return [call(mesh, n, times) for n in leaves]


def call(mesh: Any, leaves: int, times: int) -> Row:
    """How long a call takes to return, which it does before the work is done; `jit` and shardstep in turn.

    Half of the leaves are weights and half are moments, all too small to be sharded: both run the same work, and `jit`
    is given the same shardings.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import shardstep
    from shardstep._src.tools.measuring import circumstances

    step, shapes = momentum([(8,)] * (leaves // 2))
    batch = jax.device_put(np.ones((mesh.size, 1), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    ours = shardstep.shard(step, mesh)
    layout = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes)
    plain = jax.jit(step, in_shardings=(layout, batch.sharding), out_shardings=(layout, None), donate_argnums=0)
    runs: dict[str, Callable[..., Any]] = {"jit": plain, "shardstep": ours}

    def create() -> Any:
        return jax.device_put(jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes), layout)

    states = {name: create() for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times + 5):
        for name, run in runs.items():
            started = time.perf_counter()
            out = run(states[name], batch)
            seconds[name].append(time.perf_counter() - started)
            states[name], _loss = jax.block_until_ready(out)
    jit, sharded = (1e6 * statistics.median(seconds[name][5:]) for name in runs)
    ratio = statistics.median(b / a for a, b in zip(seconds["jit"][5:], seconds["shardstep"][5:], strict=True))
    measured = {"jit_us": round(jit, 1), "shardstep_us": round(sharded, 1), "ratio": round(ratio, 3)}
    return {"leaves": leaves, "devices": mesh.size, **measured, **circumstances()}


# --- a plan ---------------------------------------------------------------------------------------------------------


def planning(mesh: Any, leaves: Sequence[int]) -> list[Row]:
    return [plan(mesh, n) for n in leaves]


def plan(mesh: Any, leaves: int) -> Row:
    """From shapes to a plan, tracing included; what tracing alone takes is measured beside it."""
    import jax
    import jax.numpy as jnp

    import shardstep
    from shardstep._src.core.gc_pause import undisturbed
    from shardstep._src.tools.measuring import circumstances, timed

    step, state = deep(leaves // 3)
    batch = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with undisturbed():
        _, tracing = timed(lambda: jax.make_jaxpr(step)(state, batch))
        _, planning = timed(lambda: shardstep.shard(step, mesh).plan(state, batch))
    measured = {"plan_s": round(planning.wall, 3), "trace_s": round(tracing.wall, 3)}
    return {"leaves": leaves, "devices": mesh.size, **measured, **circumstances()}


# --- the size of the model ------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """step_ms = fixed + slope * (millions of weights) / N, by least squares."""

    fixed: float
    slope: float
    residual: float  # the largest, as a share of its step time
    points: int


def sizes(rows: Sequence[Row], optimizer: str = "adamw+clip") -> list[dict[str, Row]]:
    """The cells of the transformer on 8 devices, from the smallest to the largest."""
    found = [
        cell
        for key, cell in cells(rows).items()
        if key.workload.startswith("transformer-")
        and key.workload != "transformer-compute"
        and (key.optimizer, key.devices) == (optimizer, 8)
    ]
    return sorted(found, key=lambda cell: cell["shardstep"]["parameters"])


def fit(rows: Sequence[Row]) -> Fit | None:
    """Through rows of one variant. Weights/N and bytes grow together, so the line is through one of them: weights/N.

    (A replica sends 2 (N - 1)/N of the weights, whatever their number: the two columns are proportional, and how the
    slope divides between them cannot be told from models of different sizes alone.)
    """
    if len(rows) < 3:
        return None
    weights = np.array([row["parameters"] / row["devices"] / 1e6 for row in rows])
    times = np.array([row["step_ms"] for row in rows])
    columns = np.stack([np.ones_like(weights), weights], axis=1)
    # relative residuals: a small model counts as much as a large one
    (fixed, slope), *_ = np.linalg.lstsq(columns / times[:, None], np.ones_like(times), rcond=None)
    residual = float(np.max(np.abs((columns @ [fixed, slope]) / times - 1)))
    return Fit(float(fixed), float(slope), residual, len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("calls", "planning"))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="not the largest number of leaves")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from cell import simulate

    mesh = simulate(args.devices)
    if args.part == "calls":
        found = calls(mesh, LEAVES[:3])
    else:
        found = planning(mesh, LEAVES[:3] if args.quick else LEAVES)
    for row in found:
        print({k: v for k, v in row.items() if k not in ("machine", "versions", "date")}, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
