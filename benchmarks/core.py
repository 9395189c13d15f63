"""Step time, memory, bytes on the wire and compile time: replicated, hand-annotated ZeRO-1, shardstep.

    python benchmarks/core.py                       # both workloads, 8 simulated CPU devices
    python benchmarks/core.py --workload mlp --steps 20 --json out.json

The variants take one step each in turn, so that whatever else the machine does falls on all of them; the figures are
medians with quartiles. Compile times are medians over cold lowerings and compilations, also in turn.

Beware of the allocator. On CPU, XLA takes its temporaries from malloc at each step, and glibc maps a block above
32 MiB afresh each time: a program with larger temporaries then pays for page faults, not for its update. At width 1024
the MLP's baselines lie 360 bytes above that line and shardstep lies below it. So by default freed memory is kept, which
favours the baselines; `--malloc default` shows what an untuned process sees, and the table shows the page faults either
way. The replicated MLP is also far slower at width 1024 than its size explains (why is not established), so the MLP is
measured at width 960 too.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hlo import Collective, collectives, counts, wire_bytes
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import shardstep

# --- workloads: a training step, its state, one global batch --------------------------------------------------------


class State(NamedTuple):
    params: Any
    optimizer: Any


@dataclass(frozen=True)
class Workload:
    name: str
    step: Callable[[State, Any], tuple[State, jax.Array]]
    init: Callable[[], State]
    batch: Any


def training(
    name: str, loss: Callable, create: Callable, optimizer: optax.GradientTransformation, batch: Any
) -> Workload:
    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments), value

    def init() -> State:
        params = create(jax.random.key(0))
        return State(params, optimizer.init(params))

    return Workload(name, step, init, batch)


def dense(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / math.sqrt(shape[0])


def mlp(replicas: int, width: int = 1024, layers: int = 4) -> Workload:
    """Four square weights and one example a replica: almost nothing but weight update."""

    def create(key: jax.Array) -> list[jax.Array]:
        return [dense(k, width, width) for k in jax.random.split(key, layers)]

    def loss(weights: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - target) ** 2)

    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((replicas, width), np.float32) for _ in range(2))
    return training(f"mlp of width {width}", loss, create, optax.adam(1e-3), batch)


def transformer(
    replicas: int, width: int = 1024, layers: int = 2, vocabulary: int = 8192, length: int = 16, heads: int = 16
) -> Workload:
    """42 million parameters, AdamW after clipping by the global norm, one short sequence a replica."""

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "norm_attention": jnp.ones(width),
            "qkv": dense(qkv, width, 3 * width),
            "out": dense(out, width, width),
            "norm_mlp": jnp.ones(width),
            "up": dense(up, width, 4 * width),
            "down": dense(down, 4 * width, width),
        }

    def create(key: jax.Array) -> dict[str, Any]:
        embedding, unembedding, *keys = jax.random.split(key, 2 + layers)
        return {
            "embedding": 0.02 * jax.random.normal(embedding, (vocabulary, width)),
            "layers": [layer(k) for k in keys],
            "norm": jnp.ones(width),
            "unembedding": dense(unembedding, width, vocabulary),
        }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]

    def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + attention(p, norm(x, p["norm_attention"]))
            x = x + jax.nn.gelu(norm(x, p["norm_mlp"]) @ p["up"]) @ p["down"]
        logits = norm(x, params["norm"]) @ params["unembedding"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch = np.random.default_rng(0).integers(0, vocabulary, (replicas, length + 1), np.int32)
    return training("transformer", loss, create, optimizer, batch)


def small_tensors(replicas: int, layers: int = 50, width: int = 48) -> Workload:
    """A hundred tensors of 9 KiB and less: what counts is how many messages are sent."""

    def create(key: jax.Array) -> list[dict[str, jax.Array]]:
        return [{"w": dense(k, width, width), "b": jnp.zeros(width)} for k in jax.random.split(key, layers)]

    def loss(params: list[dict[str, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean((x - target) ** 2)

    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((4 * replicas, width), np.float32) for _ in range(2))
    return training("a hundred small tensors", loss, create, optax.adam(1e-3), batch)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "transformer": transformer,
    "mlp": mlp,
    "mlp-960": functools.partial(mlp, width=960),
    "small-tensors": small_tensors,
    "smoke": functools.partial(transformer, width=64, vocabulary=512, heads=4),
}


# --- variants: what a user would do with the step -------------------------------------------------------------------

Step = Any  # callable with `.lower`, as `jax.jit` returns it


def replicated(workload: Workload, mesh: Mesh) -> Step:
    """Plain data parallelism: the batch is split, every replica updates every weight."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_example = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(
        workload.step, in_shardings=(everywhere, by_example), out_shardings=(everywhere, everywhere), donate_argnums=0
    )


def zero1(workload: Workload, mesh: Mesh) -> Step:
    """ZeRO-1 by hand: a NamedSharding on each moment, along its first dimension that the replicas divide."""

    def along_first_divisible(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        found = next((d for d, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
        spec = PartitionSpec() if found is None else PartitionSpec(*[None] * found, "data")
        return NamedSharding(mesh, spec)

    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.eval_shape(workload.init)
    state = State(everywhere, jax.tree.map(along_first_divisible, shapes.optimizer))
    by_example = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)


def sharded(workload: Workload, mesh: Mesh, weights: str = "replicated") -> Step:
    return shardstep.shard(workload.step, mesh, weights=weights)


VARIANTS = {
    "replicated": replicated,
    "zero1": zero1,
    "shardstep": sharded,
    "shardstep-sharded": functools.partial(sharded, weights="sharded"),
}


# --- measuring ------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Milliseconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ms = [1e3 * s for s in seconds]
        if len(ms) < 2:
            return cls(ms[0], ms[0], ms[0])
        low, median, high = statistics.quantiles(ms, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass
class Measurement:
    """One variant of one workload."""

    variant: str
    step: Timing
    lower: Timing  # trace (and, for shardstep, analyse, plan, rewrite) down to StableHLO
    compile: Timing  # XLA
    argument_bytes: int  # a device
    temporary_bytes: int  # a device
    collectives: dict[str, int] = field(default_factory=dict)
    wire_bytes: float = 0.0  # a device, a step
    cpu: Timing | None = None  # user and system time of a step, all threads
    page_faults: float = math.nan  # median of a step; 4 KiB each: memory that was mapped afresh
    loss: float = math.nan  # after the last step: the variants must agree


def measure(
    workload: Workload, mesh: Mesh, variants: Sequence[str], steps: int, compilations: int
) -> list[Measurement]:
    compiled, lower, compile_ = compile_all(workload, mesh, variants, compilations)
    costs, losses = run_all(workload, mesh, variants, steps)
    return [
        describe(name, compiled[name], Timing.of(lower[name]), Timing.of(compile_[name]), costs[name], losses[name])
        for name in variants
    ]


def describe(
    name: str, compiled: Any, lower: Timing, compile_: Timing, costs: Sequence[Cost], loss: float
) -> Measurement:
    memory = compiled.memory_analysis()
    found: list[Collective] = collectives(compiled.as_text())
    return Measurement(
        variant=name,
        step=Timing.of([cost.wall for cost in costs]),
        lower=lower,
        compile=compile_,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        collectives=counts(found),
        wire_bytes=wire_bytes(found),
        cpu=Timing.of([cost.cpu for cost in costs]),
        page_faults=statistics.median(cost.page_faults for cost in costs),
        loss=loss,
    )


def compile_all(workload: Workload, mesh: Mesh, variants: Sequence[str], times: int) -> tuple[dict, dict, dict]:
    """Lower and compile each variant from cold, in turn, `times` times."""
    state = jax.eval_shape(workload.init)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), workload.batch)
    compiled: dict[str, Any] = {}
    lower: dict[str, list[float]] = {name: [] for name in variants}
    compile_: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(times):
        for name in variants:
            jax.clear_caches()
            step = VARIANTS[name](workload, mesh)
            lowered, cost = timed(lambda step=step: step.lower(state, batch))
            lower[name].append(cost.wall)
            compiled[name], cost = timed(lowered.compile)
            compile_[name].append(cost.wall)
    return compiled, lower, compile_


def run_all(
    workload: Workload, mesh: Mesh, variants: Sequence[str], steps: int, warm_up: int = 2
) -> tuple[dict[str, list[Cost]], dict[str, float]]:
    """Call each variant as a user would, one step each in turn."""
    step = {name: VARIANTS[name](workload, mesh) for name in variants}
    # The first call moves each state into its layout, so that only one full copy exists at a time.
    state = {}
    for name in variants:
        state[name], _ = jax.block_until_ready(step[name](workload.init(), workload.batch))
    costs: dict[str, list[Cost]] = {name: [] for name in variants}
    losses: dict[str, float] = {}
    for i in range(warm_up + steps):
        for name in variants:
            (state[name], loss), cost = timed(
                lambda name=name: jax.block_until_ready(step[name](state[name], workload.batch))
            )
            losses[name] = float(loss)
            if i >= warm_up:
                costs[name].append(cost)
    return costs, losses


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, over all threads
    page_faults: int


def timed(call: Callable[[], Any]) -> tuple[Any, Cost]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = call()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return result, Cost(wall, cpu, after.ru_minflt - before.ru_minflt)


# glibc: never map a block of its own for an allocation, never give freed memory back.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}


def restart_keeping_memory() -> None:
    """glibc reads its settings when a process starts, so start once more with them."""
    if any(os.environ.get(key) != value for key, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


# --- reporting ------------------------------------------------------------------------------------------------------


def table(workload: str, found: Sequence[Measurement], args: argparse.Namespace) -> Table:
    result = Table(title=f"{workload}, {args.devices} replicas, malloc: {args.malloc}; medians (quartiles)")
    for title in ("", *(m.variant for m in found)):
        result.add_column(title, justify="right" if title else "left")
    base = found[0]
    rows: dict[str, Callable[[Measurement], str]] = {
        "step, ms": lambda m: str(m.step),
        f"faster than {base.variant}": lambda m: f"{base.step.median / m.step.median:.2f}x",
        "CPU time, ms": lambda m: str(m.cpu),
        "page faults a step": lambda m: f"{m.page_faults:.0f}",
        "arguments a device, MB": lambda m: f"{m.argument_bytes / 1e6:.1f}",
        "temporaries a device, MB": lambda m: f"{m.temporary_bytes / 1e6:.1f}",
        "sent a device, MB": lambda m: f"{m.wire_bytes / 1e6:.1f}",
        "collectives": lambda m: "\n".join(f"{n} {kind}" for kind, n in sorted(m.collectives.items())),
        "trace + plan + lower, ms": lambda m: str(m.lower),
        "XLA compile, ms": lambda m: str(m.compile),
        f"added, share of {base.variant} compile": lambda m: f"{100 * planning_share(base, m):+.1f} %",
        "loss at the last step": lambda m: f"{m.loss:.6f}",
    }
    for title, cell in rows.items():
        result.add_row(title, *(cell(m) for m in found))
    return result


def planning_share(base: Measurement, m: Measurement) -> float:
    """What tracing and planning add before XLA starts, as a share of compiling the plain program."""
    return (m.lower.median - base.lower.median) / base.compile.median


def report(results: dict[str, list[Measurement]], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "load": os.getloadavg(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "devices": [str(jax.devices()[0].device_kind), jax.device_count()],
        },
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
        },
        "arguments": {key: value for key, value in vars(args).items() if key != "json"},
        "workloads": {name: [as_json(found[0], m) for m in found] for name, found in results.items()},
    }


def as_json(base: Measurement, m: Measurement) -> dict[str, Any]:
    times = {name: timing._asdict() for name, timing in vars(m).items() if isinstance(timing, Timing)}
    return {**vars(m), **times, "planning_share_of_plain_compile": planning_share(base, m)}


def processor() -> str:
    """The processor's name; Linux keeps it in a file, and `platform` does not look there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each variant (default: %(default)s)")
    parser.add_argument("--compilations", type=int, default=3, help="cold compilations of each (default: %(default)s)")
    parser.add_argument("--workload", nargs="*", choices=WORKLOADS, default=[w for w in WORKLOADS if w != "smoke"])
    parser.add_argument("--variant", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="keep", help="see above (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.malloc == "keep":
        restart_keeping_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    results: dict[str, list[Measurement]] = {}
    for name in args.workload:
        results[name] = measure(WORKLOADS[name](args.devices), mesh, args.variant, args.steps, args.compilations)
        Console().print(table(name, results[name], args))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(results, args), indent=2) + "\n")


if __name__ == "__main__":
    main()
