"""One replica of many on one GPU: what a replica's own work costs, replicated, ZeRO-1 by hand, shardstep.

    python benchmarks/gpu_replica.py --out results/gpu          # one GPU, about seven minutes
    python benchmarks/gpu_replica.py --workload scanned --replicas 8 --out results/gpu  # layers that are scanned
    python benchmarks/gpu_replica.py --workload offload --rounds 2 --steps 1 --out results/gpu  # 60 billion parameters
    python benchmarks/gpu_replica.py --part claim --out results/gpu  # SGD and momentum: does Adam cost what they cost?
    python benchmarks/gpu_replica.py --part large --out results/gpu  # microbatches, experts; Muon: see gpu_muon.py
    python benchmarks/gpu_replica.py --part matrices --rounds 3 --steps 1 --out results/gpu  # Shampoo
    python benchmarks/gpu_replica.py --smoke --out /tmp/smoke   # tiny sizes on simulated CPU devices

`jax_mock_gpu_topology` lets one GPU compile and run the program of one replica out of N. Its collectives are mocked:
they cost no time and bring no data. So the step time is the replica's own work, copies and all; what goes over
the wire is counted in the compiled program instead. The numbers that are computed mean nothing here (other tests see to
those).

Each workload and replica count runs in a process of its own, because the mocked topology is set before JAX starts. The
variants take turns in rounds of several steps; the figures are medians over the rounds. Results are written after each
process: `results.json`, and the optimized programs in `hlo.tar.gz`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from recorded import stamp

HERE = Path(__file__).resolve().parent
ADAM = [
    ("six", 8, "adam"),
    ("six", 64, "adam"),
    ("transformer", 8, "adam"),
    ("transformer", 64, "adam"),
    ("scanned", 8, "adamw"),
    ("scanned", 64, "adamw"),
]
CLAIM = [
    ("transformer", 64, "sgd"),
    ("scanned", 64, "sgd"),
    ("six", 8, "sgd"),
    ("six", 8, "momentum"),
    ("transformer", 8, "sgd"),
    ("transformer", 8, "momentum"),
]
LARGE = [("accumulating", 8, "adamw"), ("accumulating", 64, "adamw"), ("mixture", 8, "adamw"), ("mixture", 64, "adamw")]
MATRICES = [("shampoo", 8, "shampoo"), ("shampoo", 64, "shampoo")]
OFFLOAD = [("offload", 8, "adamw")]  # it fills the device
PARTS = {"adam": ADAM, "claim": CLAIM, "large": LARGE, "matrices": MATRICES, "offload": OFFLOAD}


# --- the parent: one process for each workload and replica count ----------------------------------------------------


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.group:
        workload, replicas, optimizer = args.group.split(":")
        child(workload, int(replicas), optimizer, args)
        return
    started, results = time.monotonic(), []
    groups = [
        group
        for group in PARTS["offload" if args.only == "offload" else args.part]
        if args.only in (None, group[0]) and args.replicas in (None, group[1]) and args.optimizer in (None, group[2])
    ]
    for i, (workload, replicas, optimizer) in enumerate(groups):
        left = args.deadline - (time.monotonic() - started)
        # what is left is shared out, but a transformer compiles longer than six matrices do
        limit = left if i == len(groups) - 1 else left * (0.3 if workload == "six" else 0.6)
        results.append(in_process(workload, replicas, optimizer, args, limit))
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(table(results[-1]), flush=True)
    pack(args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=460, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps of a variant in each round")
    parser.add_argument("--workload", "--only", dest="only", choices=sorted(WORKLOADS))
    parser.add_argument("--replicas", type=int, help="one replica of this many only")
    parser.add_argument("--part", choices=PARTS, default="adam", help="which workloads (default: %(default)s)")
    parser.add_argument("--optimizer", help="the groups with this optimizer only")
    parser.add_argument("--variant", nargs="+", choices=sorted(VARIANTS), help="these only; another run has the rest")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(workload: str, replicas: int, optimizer: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])}
    # without this flag compilation waits for replicas that do not exist
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false".strip()
    if args.smoke:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    if workload == "offload":  # XLA pins 64 GB of the host's memory at most, unless told
        environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "80"}
    command = [sys.executable, __file__, *sys.argv[1:], "--group", f"{workload}:{replicas}:{optimizer}"]
    found = args.out / f"{workload}-{replicas}-{optimizer}.json"
    failure, started = "", time.monotonic()
    try:
        done = subprocess.run(command, env=environment, timeout=max(limit, 20), stderr=subprocess.PIPE, text=True)
        failure = "" if done.returncode == 0 else done.stderr[-4000:]
    except subprocess.TimeoutExpired as error:
        text = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        failure = f"stopped after {limit:.0f} s; {text[-2000:]}"
    what = {"workload": workload, "replicas": replicas, "optimizer": optimizer}
    result = json.loads(found.read_text()) if found.exists() else what
    found.unlink(missing_ok=True)
    return {**result, "failure": failure, "seconds": round(time.monotonic() - started, 1)}


def pack(out: Path) -> None:
    """The programs are large, and there are many of them."""
    with tarfile.open(out / "hlo.tar.gz", "w:gz") as archive:
        for path in sorted(out.glob("*.hlo")):
            archive.add(path, path.name)
            path.unlink()


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['workload']}, {result['optimizer']}, one replica of {result['replicas']} ({result['seconds']} s)"
    ]
    for name, m in result.get("variants", {}).items():
        if "argument_bytes" not in m:
            lines.append(f"  {name:22s} {m['failure'][:200]}")
            continue
        lines.append(
            f"  {name:22s} {m.get('step_ms', float('nan')):8.2f} ms  arguments {m['argument_bytes'] / 1e9:6.2f} GB"
            f"  temporaries {m['temporary_bytes'] / 1e9:6.2f} GB  wire {m['wire_bytes'] / 1e9:6.2f} GB"
            f"  host {m.get('host_bytes', 0) / 1e9:6.2f} GB  compile {m['compile_s']:5.1f} s  {m['collectives']}"
            f"  {m.get('failure', '')[:120]}"
        )
    if result["failure"]:
        lines.append(f"  FAILED: {result['failure']}")
    return "\n".join(lines)


# --- a process: one workload on one replica of N --------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    step: Callable[..., Any]  # (params, moments), batch -> (params, moments), loss
    params: Any  # shapes
    moments: Any  # shapes
    batch: Any  # shapes, of the whole batch
    optimizer: Any  # Optax's
    # (params, batch, gathered) -> loss, where it can be written by hand (`expert`)
    loss: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None  # (params, batch) -> loss, gradient
    variants: tuple[str, ...] = ()  # those worth trying; all of them if none is named


def child(name: str, replicas: int, optimizer: str, args: argparse.Namespace) -> None:
    import jax

    found = args.out / f"{name}-{replicas}-{optimizer}.json"
    if args.smoke:
        replicas = min(replicas, 8)
        jax.config.update("jax_num_cpu_devices", replicas)
    else:
        jax.config.update("jax_mock_gpu_topology", f"1x{replicas}x1")
    import numpy as np

    assert len(jax.devices()) == replicas, jax.devices()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    workload = WORKLOADS[name](replicas, optimizer, args.smoke)
    result: dict[str, Any] = {
        "workload": name,
        "replicas": replicas,
        "optimizer": optimizer,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **stamp("gpu_replica"),
        "parameters": sum(x.size for x in jax.tree.leaves(workload.params)),
        "variants": {},
    }
    running: dict[str, Run] = {}

    def save() -> None:
        found.write_text(json.dumps(result, indent=1))

    for variant, build in VARIANTS.items():
        wanted = args.variant or workload.variants or USUAL
        if variant not in wanted or (variant == "expert" and workload.loss is None):
            continue
        try:
            started = time.monotonic()
            step, shardings, batch = build(workload, mesh)
            compiled, measured = inspect(step, workload, shardings, batch)
            measured["compile_s"] = round(time.monotonic() - started, 1)
            (args.out / f"{name}-{replicas}-{optimizer}-{variant}.hlo").write_text(compiled.as_text())
            result["variants"][variant] = measured
            save()
            running[variant] = Run.start(called(compiled, variant), workload, shardings, batch)
        except Exception as error:  # out of memory, say: the other variants still count
            result["variants"].setdefault(variant, {})["failure"] = f"{type(error).__name__}: {error}"[:1000]
        save()
    take_turns(running, args.rounds, args.steps, result["variants"])
    save()


def called(compiled: Any, variant: str) -> Callable[..., Any]:
    """The compiled program as a step. (`shardstep`'s own call asks the other processes whether they agree.)"""
    import jax

    if not variant.startswith("shardstep"):
        return compiled

    def step(state: Any, batch: Any) -> Any:
        results = compiled._inner(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(jax.tree.structure((state, 0)), results)

    return step


def inspect(step: Any, workload: Workload, shardings: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    from shardstep._src.tools.hlo import collectives, counts, overlap, wire_bytes

    compiled = step.lower(
        shaped((workload.params, workload.moments), shardings), shaped(workload.batch, batch)
    ).compile()
    memory = compiled.memory_analysis()
    found = collectives(compiled.as_text())
    return compiled, {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes,
        "wire_bytes": wire_bytes(found),
        "collectives": counts(found),
        # by kind: bytes sent between whose start and end other work is scheduled, and all bytes
        "overlap_bytes": {kind: [round(part) for part in parts] for kind, parts in overlap(found).items()},
        "wire_dtypes": sorted({f"{c.kind} {c.dtype}" for c in found}),
    }


@dataclass
class Run:
    """A variant with its state on the device."""

    step: Any
    state: Any
    batch: Any

    @classmethod
    def start(cls, step: Any, workload: Workload, shardings: Any, batch: Any) -> Run:
        import jax

        run = cls(step, fill((workload.params, workload.moments), shardings), examples(workload.batch, batch))
        for _ in range(3):
            run.state, _ = run.step(run.state, run.batch)
        jax.block_until_ready(run.state)
        return run

    def seconds(self, steps: int) -> float:
        import jax

        started = time.perf_counter()
        for _ in range(steps):
            self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - started) / steps


def take_turns(running: dict[str, Run], rounds: int, steps: int, into: dict[str, Any]) -> None:
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, run in running.items():
            times[name].append(1e3 * run.seconds(steps))
    for name, ms in times.items():
        low, median, high = statistics.quantiles(ms * 2 if len(ms) == 1 else ms, n=4, method="inclusive")
        into[name] |= {"step_ms": round(median, 3), "quartiles_ms": [round(low, 3), round(high, 3)]}


def fill(shapes: Any, shardings: Any) -> Any:
    """Arrays born in their sharding: no replica exists that could be sent a copy."""
    import jax
    import jax.numpy as jnp

    def values(i: int, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.zeros(x.shape, x.dtype)
        ramp = jax.lax.broadcasted_iota(jnp.float32, x.shape, x.ndim - 1) if x.ndim else jnp.float32(1)
        return (0.02 * jnp.abs(jnp.sin(ramp * (i + 1)))).astype(x.dtype)

    leaves, treedef = jax.tree.flatten(shapes)
    where = jax.tree.leaves(shardings)
    hosted = [i for i, sharding in enumerate(where) if sharding.memory_kind == "pinned_host"]
    others = [i for i in range(len(leaves)) if i not in hosted]
    made: dict[int, Any] = {}
    for part in (hosted, others):  # what goes on to the host is made while the device is empty
        # In one program: of a program that makes a single leaf, XLA may say that all replicas make all of it.
        create = jax.jit(lambda part=part: [values(i, leaves[i]) for i in part], out_shardings=[where[i] for i in part])
        made |= dict(zip(part, jax.block_until_ready(create()), strict=True))
    return jax.tree.unflatten(treedef, [made[i] for i in range(len(leaves))])


def examples(shapes: Any, shardings: Any) -> Any:
    """This replica's share of the batch."""
    import jax
    import numpy as np

    def leaf(shape: Any, sharding: Any) -> Any:
        def share(index: Any) -> Any:
            size = tuple(len(range(*i.indices(n))) for i, n in zip(index, shape.shape, strict=True))
            return np.random.default_rng(0).integers(0, 100, size).astype(shape.dtype)

        return jax.make_array_from_callback(shape.shape, sharding, share)

    return jax.tree.map(leaf, shapes, alike(shapes, shardings))


def shaped(shapes: Any, shardings: Any) -> Any:
    import jax

    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, alike(shapes, shardings)
    )


def alike(shapes: Any, shardings: Any) -> Any:
    """A sharding for each leaf, where one may stand for all."""
    import jax

    return jax.tree.map(lambda _: shardings, shapes) if isinstance(shardings, jax.sharding.Sharding) else shardings


# --- workloads ------------------------------------------------------------------------------------------------------


def training(loss: Callable[..., Any], params: Any, name: str, batch: Any, microbatches: int = 1) -> Workload:
    import jax
    import optax
    import optimization
    import workloads

    optimizers = {
        "adam": optax.adam(1e-4),
        "adamw": optax.adamw(1e-4),
        "sgd": optax.sgd(1e-4),
        "momentum": optax.sgd(1e-4, momentum=0.9),
        "shampoo": optimization.OPTIMIZERS["shampoo"].plain(),
    }
    optimizer = optimizers[name]

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = gradient(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def gradient(params: Any, batch: Any) -> tuple[Any, Any]:
        if microbatches == 1:
            return jax.value_and_grad(loss)(params, batch)
        part = lambda p, batch: (loss(p, batch) / microbatches, None)  # noqa: E731
        return workloads.accumulated(part, params, batch, microbatches)

    return Workload(step, params, jax.eval_shape(optimizer.init, params), batch, optimizer, gradient=gradient)


def six(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """Six 8192x8192 weights, bf16 products, 16 examples per replica: almost nothing but weight update."""
    import jax
    import jax.numpy as jnp

    width = 256 if smoke else 8192

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 6
    return training(loss, params, optimizer, jax.ShapeDtypeStruct((16 * replicas, width), jnp.float32))


def transformer(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """A Flax transformer of 1.3 billion parameters, f32 weights, bf16 compute; two sequences of 1024 per replica."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    width, layers, heads, vocabulary, length = (64, 2, 4, 512, 32) if smoke else (2048, 24, 16, 50304, 1024)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            x = x + nn.MultiHeadDotProductAttention(heads, dtype=jnp.bfloat16)(y, mask=mask)
            y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
            return x + nn.Dense(width, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(4 * width, dtype=jnp.bfloat16)(y)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(vocabulary, width, dtype=jnp.bfloat16)
            positions = self.param("positions", nn.initializers.normal(0.02), (length, width))
            x = embed(tokens) + positions.astype(jnp.bfloat16)
            mask = nn.make_causal_mask(tokens, dtype=jnp.bool_)
            for _ in range(layers):
                x = Block()(x, mask)
            return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x))

    model = Model()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    tokens = jax.ShapeDtypeStruct((2 * replicas, length + 1), jnp.int32)
    one = jax.ShapeDtypeStruct((1, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), one)["params"]
    return training(loss, params, optimizer, tokens)


class Sizes(NamedTuple):
    width: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    examples: int  # per replica


def scanned(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """1.3 billion parameters in 24 layers that are stacked and scanned, each under `jax.checkpoint`; f32 weights, bf16
    products; four sequences of 1024 per replica."""
    return decoder(replicas, optimizer, Sizes(64, 4, 4, 512, 32, 4) if smoke else Sizes(2048, 24, 16, 32000, 1024, 4))


def offload(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """The same model with 60 billion parameters: a share of one in eight has 30 GB of weights, as much of gradients and
    twice as much of moments, which is more than JAX takes of the device (three quarters)."""
    sizes = Sizes(64, 4, 4, 512, 32, 1) if smoke else Sizes(8192, 74, 64, 32000, 1024, 1)
    variants = ("shardstep-offload", "fsdp", "shardstep-sharded")
    return replace(decoder(replicas, optimizer, sizes), variants=variants)


def decoder(replicas: int, optimizer: str, sizes: Sizes) -> Workload:
    """A decoder-only transformer."""
    import jax
    import jax.numpy as jnp
    import optax

    width, layers, heads, vocabulary, length, count = sizes

    def read(w: jax.Array) -> jax.Array:
        return w.astype(jnp.bfloat16)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)

    def layer(x: jax.Array, w: dict[str, jax.Array], read: Callable[..., Any]) -> tuple[jax.Array, None]:
        qkv = (norm(x, w["attention_norm"]) @ read(w["qkv"])).reshape(*x.shape[:2], 3, heads, width // heads)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + mixed.reshape(x.shape) @ read(w["out"])
        return x + jax.nn.gelu(norm(x, w["mlp_norm"]) @ read(w["up"])) @ read(w["down"]), None

    def loss(params: Any, tokens: jax.Array, read: Callable[..., Any] = read) -> jax.Array:
        """`read` makes of a weight what a product takes: bfloat16, and gathered where that is done by hand."""
        embed = read(params["embed"])
        x = embed[tokens[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: layer(x, w, read)), x, params["layers"])
        logits = (norm(x, params["norm"]) @ embed.T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    stack = {
        "qkv": weight(layers, width, 3 * width),
        "out": weight(layers, width, width),
        "up": weight(layers, width, 4 * width),
        "down": weight(layers, 4 * width, width),
        "attention_norm": weight(layers, width),
        "mlp_norm": weight(layers, width),
    }
    params = {"embed": weight(vocabulary, width), "norm": weight(width), "layers": stack}
    tokens = jax.ShapeDtypeStruct((count * replicas, length + 1), jnp.int32)
    return replace(training(loss, params, optimizer, tokens), loss=loss)


def accumulating(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """The scanned layers, eight microbatches of one sequence per replica, weights and gradients in bfloat16."""
    import jax
    import jax.numpy as jnp

    made = scanned(replicas, optimizer, smoke)
    assert made.loss is not None
    tokens = jax.ShapeDtypeStruct((8 * replicas, made.batch.shape[1]), jnp.int32)
    variants = tuple(name for name in VARIANTS if name not in ("expert", "shardstep-offload"))
    return replace(training(made.loss, made.params, optimizer, tokens, microbatches=8), variants=variants)


def mixture(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """1.1 billion parameters: four layers of eight experts, to which 1024 tokens per replica are dispatched."""
    import jax
    import jax.numpy as jnp
    import workloads

    sizes = dict(width=64, layers=2, tokens=64) if smoke else dict(width=2048, layers=4, tokens=1024)
    made = workloads.mixture(1, "sgd", **sizes, dtype=jnp.bfloat16)
    loss = lambda params, batch: made.loss(params, (), batch, None)[0]  # noqa: E731
    params = jax.eval_shape(lambda: made.create(jax.random.key(0))[0])
    batch = tuple(jax.ShapeDtypeStruct((replicas, *x.shape[1:]), x.dtype) for x in made.batch)
    return training(loss, params, optimizer, batch)


def shampoo(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """Six layers of width 512 in a Python loop, 27 million parameters, four sequences of 256 per replica; Shampoo
    factorizes both sides of every matrix of the layers in every step, AdamW has the rest."""
    import jax
    import jax.numpy as jnp
    import workloads

    sizes = dict(width=64, layers=2, vocabulary=512, length=16, heads=4) if smoke else {}
    sizes = sizes or dict(width=512, layers=6, vocabulary=8192, length=256, heads=8)
    made = workloads.transformer(1, "sgd", **sizes)
    loss = lambda params, batch: made.loss(params, (), batch, None)[0]  # noqa: E731
    params = jax.eval_shape(lambda: made.create(jax.random.key(0))[0])
    tokens = jax.ShapeDtypeStruct((4 * replicas, sizes["length"] + 1), jnp.int32)
    variants = ("replicated", "zero1", "shardstep", "shardstep-sharded")  # others repeat what ZeRO-1 repeats
    return replace(training(loss, params, optimizer, tokens), variants=variants)


WORKLOADS = {
    "six": six,
    "transformer": transformer,
    "scanned": scanned,
    "accumulating": accumulating,
    "mixture": mixture,
    "shampoo": shampoo,
    "offload": offload,
}


# --- variants: the step, how its state rests, how its batch lies ----------------------------------------------------


def replicated(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
    import jax

    everywhere, by_example = named(mesh), named(mesh, "data")
    state = jax.tree.map(lambda _: everywhere, (workload.params, workload.moments))
    step = jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step, state, by_example


def zero1(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
    """A NamedSharding on each moment, along its first dimension that the replicas divide."""
    import jax

    def rest(x: Any) -> Any:
        found = next((d for d, size in enumerate(x.shape) if size and size % mesh.size == 0), None)
        return named(mesh) if found is None else named(mesh, *[None] * found, "data")

    everywhere, by_example = named(mesh), named(mesh, "data")
    state = (jax.tree.map(lambda _: everywhere, workload.params), jax.tree.map(rest, workload.moments))
    step = jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step, state, by_example


def fsdp(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
    """A NamedSharding on each weight and moment, along a dimension that is not the layers'."""
    import jax

    def rest(x: Any) -> Any:
        dims = [*range(1, len(x.shape)), 0]
        found = next((d for d in dims if d < len(x.shape) and x.shape[d] and x.shape[d] % mesh.size == 0), None)
        return named(mesh) if found is None else named(mesh, *[None] * found, "data")

    everywhere, by_example = named(mesh), named(mesh, "data")
    state = jax.tree.map(rest, (workload.params, workload.moments))
    step = jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step, state, by_example


def over_data(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
    """As MaxText's `shard_optimizer_over_data`: weights and moments rest split alike; the step begins by constraining
    the weights to be whole, and the gradients to lie as the weights rest.
    """
    import jax
    import optax

    _, state, by_example = fsdp(workload, mesh)
    everywhere, gradient = named(mesh), workload.gradient
    assert gradient is not None

    def step(state_now: Any, batch: Any) -> Any:
        params, moments = state_now
        whole = jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, everywhere), params)
        value, grads = gradient(whole, batch)
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, state[0])
        updates, moments = workload.optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    step = jax.jit(step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step, state, by_example


def expert(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
    """What somebody who knows the model writes with `shard_map`: each layer is gathered in bfloat16 inside the loop,
    again in the backward pass, where its gradient is scattered (the transpose of a gather). Norms are replicated.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def spec(path: Any, x: Any) -> Any:
        """Matrices by rows; a stack of them beside its layers."""
        if len(x.shape) < 2 or "norm" in jax.tree_util.keystr(path):
            return named(mesh).spec
        return named(mesh, *[None] * (len(x.shape) - 2), "data").spec

    def read(w: Any) -> Any:
        """A block of rows in, the whole matrix out."""
        return jax.lax.all_gather(w.astype(jnp.bfloat16), "data", axis=0, tiled=True)

    assert workload.loss is not None
    loss, state = workload.loss, (workload.params, workload.moments)
    specs = jax.tree_util.tree_map_with_path(spec, state)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        mean = lambda p: jax.lax.pmean(loss(p, batch, read), "data")  # noqa: E731
        value, grads = jax.value_and_grad(mean)(params)
        updates, moments = workload.optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, named(mesh, "data").spec), out_specs=(specs, named(mesh).spec)
    )
    shardings = jax.tree.map(lambda s: named(mesh, *s), specs)
    return jax.jit(spread, donate_argnums=0), shardings, named(mesh, "data")


def sharded(weights: str, **options: Any) -> Callable[..., Any]:
    def build(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
        import shardstep

        chosen = shardstep.Options(**options)
        step = shardstep.shard(workload.step, mesh, weights=weights, batch_argnums=1, options=chosen)
        plan = step.plan((workload.params, workload.moments), workload.batch)
        (state, batch), _ = plan.shardings
        return step, state, batch

    return build


def within_fsdp(room: float) -> Callable[..., Any]:
    """`weights="auto"` in the memory that FSDP by hand needs, as it is compiled here, times `room`."""

    def build(workload: Workload, mesh: Any) -> tuple[Any, Any, Any]:
        step, state, batch = fsdp(workload, mesh)
        arguments = shaped((workload.params, workload.moments), state), shaped(workload.batch, batch)
        needed = step.lower(*arguments).compile().memory_analysis()
        memory = int(room * (needed.argument_size_in_bytes + needed.temp_size_in_bytes))
        return sharded("auto", memory=memory)(workload, mesh)

    return build


def named(mesh: Any, *spec: Any) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*spec))


VARIANTS = {
    "replicated": replicated,
    "zero1": zero1,
    "fsdp": fsdp,
    "over-data": over_data,
    "expert": expert,
    "shardstep": sharded("replicated"),
    "shardstep-sharded": sharded("sharded"),
    "shardstep-auto": sharded("auto"),
    "shardstep-offload": sharded("sharded", offload=True),  # where the optimizer's state does not fit
    "shardstep-fits": within_fsdp(1.0),
    "shardstep-fits-1.5": within_fsdp(1.5),
}
USUAL = tuple(name for name in VARIANTS if not name.startswith(("shardstep-offload", "shardstep-fits")))


if __name__ == "__main__":
    main()
