"""Muon on one replica of many on one GPU: replicated, ZeRO-1 by hand, an expert's owned Muon, shardstep; and plain SGD.

    python benchmarks/gpu_muon.py --out results/gpu_muon          # one GPU, about eight minutes
    python benchmarks/gpu_muon.py --smoke --out /tmp/smoke        # tiny sizes on simulated CPU devices

The same method as `gpu_replica.py`: collectives are mocked, so the step time is the replica's own work. The model is a
decoder-only transformer in a Python loop: d=2048, 12 layers under `jax.checkpoint`, 32000 tokens, 4 sequences of 1024
per replica, bf16 products, f32 weights. Muon (`optax.contrib`) for the matrices of the layers, AdamW for the rest.

The expert keeps the momentum of all matrices of one shape as one stack, split by matrices: gradients are scattered to
their owners, Newton-Schulz runs there, the updates are gathered. Both sides of that are in `owned`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_replica as one_replica
from recorded import stamp

HERE = Path(__file__).resolve().parent
GROUPS = [(8, "muon"), (64, "muon"), (8, "sgd"), (64, "sgd")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in each round")
    parser.add_argument("--replicas", type=int, help="one replica of this many only")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.group:
        replicas, optimizer = args.group.split(":")
        child(int(replicas), optimizer, args)
        return
    started, results = time.monotonic(), []
    groups = [g for g in GROUPS if args.replicas in (None, g[0])]
    for i, (replicas, optimizer) in enumerate(groups):
        left = args.deadline - (time.monotonic() - started)
        limit = left if i == len(groups) - 1 else left * 0.55
        results.append(in_process(replicas, optimizer, args, limit))
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(one_replica.table(results[-1]), flush=True)


def in_process(replicas: int, optimizer: str, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)])}
    # without this flag compilation waits for replicas that do not exist
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false".strip()
    if args.smoke:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, __file__, *sys.argv[1:], "--group", f"{replicas}:{optimizer}"]
    found, failure, started = args.out / f"layers-{replicas}-{optimizer}.json", "", time.monotonic()
    try:
        done = subprocess.run(command, env=environment, timeout=max(limit, 20), stderr=subprocess.PIPE, text=True)
        failure = "" if done.returncode == 0 else done.stderr[-4000:]
    except subprocess.TimeoutExpired:
        failure = f"stopped after {limit:.0f} s"
    what = {"workload": "layers", "replicas": replicas, "optimizer": optimizer}
    result = json.loads(found.read_text()) if found.exists() else what
    found.unlink(missing_ok=True)
    return {**result, "failure": failure, "seconds": round(time.monotonic() - started, 1)}


# --- a process: one optimizer on one replica of N -------------------------------------------------------------------


def child(replicas: int, optimizer: str, args: argparse.Namespace) -> None:
    import jax

    found = args.out / f"layers-{replicas}-{optimizer}.json"
    if args.smoke:
        replicas = min(replicas, 8)
        jax.config.update("jax_num_cpu_devices", replicas)
    else:
        jax.config.update("jax_mock_gpu_topology", f"1x{replicas}x1")
    import numpy as np

    assert len(jax.devices()) == replicas, jax.devices()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    workload = layers(replicas, optimizer, args.smoke)
    result: dict[str, Any] = {
        "workload": "layers",
        "replicas": replicas,
        "optimizer": optimizer,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **stamp("gpu_muon"),
        "parameters": sum(x.size for x in jax.tree.leaves(workload.params)),
        "variants": {},
    }
    running: dict[str, Any] = {}
    variants = VARIANTS if optimizer == "muon" else {k: VARIANTS[k] for k in ("replicated", "shardstep-sharded")}
    for variant, build in variants.items():
        try:
            started = time.monotonic()
            step, shardings, batch, given = build(workload, mesh)
            compiled, measured = one_replica.inspect(step, given, shardings, batch)
            measured["compile_s"] = round(time.monotonic() - started, 1)
            measured["flops"] = compiled.cost_analysis().get("flops")
            result["variants"][variant] = measured
            found.write_text(json.dumps(result, indent=1))
            running[variant] = one_replica.Run.start(called(compiled), given, shardings, batch)
        except Exception as error:  # out of memory, say: the other variants still count
            result["variants"].setdefault(variant, {})["failure"] = f"{type(error).__name__}: {error}"[:1000]
        found.write_text(json.dumps(result, indent=1))
    one_replica.take_turns(running, args.rounds, args.steps, result["variants"])
    found.write_text(json.dumps(result, indent=1))


def called(compiled: Any) -> Callable[..., Any]:
    """The compiled program as a step. (`shardstep`'s own call asks the other processes, which are not there.)"""
    import jax

    inner = getattr(compiled, "_inner", None)
    if inner is None:
        return compiled

    def step(state: Any, batch: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure((state, 0)), inner(*jax.tree.leaves((state, batch))))

    return step


@dataclass(frozen=True)
class Workload:
    """As `gpu_replica.Workload`, with the loss, which the expert differentiates per replica."""

    step: Callable[..., Any]  # (params, moments), batch -> (params, moments), loss
    params: Any  # shapes
    moments: Any  # shapes
    batch: Any  # shapes, of the whole batch
    loss: Callable[..., Any]


def layers(replicas: int, optimizer: str, smoke: bool) -> Workload:
    """12 layers in a Python loop, each under `jax.checkpoint`: four matrices and two norms."""
    import jax
    import jax.numpy as jnp
    import optax

    width, count, heads, vocabulary, length = (64, 3, 4, 512, 32) if smoke else (2048, 12, 16, 32000, 1024)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        qkv = product(norm(x, w["attention_norm"]), w["qkv"]).reshape(*x.shape[:2], 3, heads, width // heads)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + product(mixed.reshape(x.shape), w["out"])
        return x + product(jax.nn.gelu(product(norm(x, w["mlp_norm"]), w["up"])), w["down"])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
        for w in params["layers"]:
            x = layer(x, w)
        logits = product(norm(x, params["norm"]), params["embed"].T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def one() -> dict[str, jax.ShapeDtypeStruct]:
        matrices = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }
        norms = dict.fromkeys(("attention_norm", "mlp_norm"), (width,))
        return {name: weight(*shape) for name, shape in (matrices | norms).items()}

    params = {"embed": weight(vocabulary, width), "norm": weight(width), "layers": [one() for _ in range(count)]}
    chosen = (
        optax.sgd(1e-4)
        if optimizer == "sgd"
        else optax.multi_transform({"muon": optax.contrib.muon(1e-3), "adam": optax.adamw(1e-4)}, labels)
    )

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, moments = chosen.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    tokens = jax.ShapeDtypeStruct((4 * replicas, length + 1), jnp.int32)
    return Workload(step, params, jax.eval_shape(chosen.init, params), tokens, loss)


def labels(params: Any) -> Any:
    """Muon for the matrices of the layers."""
    import jax

    def label(path: Any, x: Any) -> str:
        return "muon" if "layers" in jax.tree_util.keystr(path) and x.ndim == 2 else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


# --- variants: the step, how its state rests, how its batch lies, and what is trained -------------------------------


def as_given(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda workload, mesh: (*build(workload, mesh), workload)


def owned(workload: Workload, mesh: Any) -> tuple[Any, Any, Any, Any]:
    """What somebody who knows the optimizer writes with `shard_map`."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec

    n = mesh.size
    leaves, tree = jax.tree.flatten(workload.params)
    names = jax.tree.leaves(labels(workload.params))
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i, (x, name) in enumerate(zip(leaves, names, strict=True)):
        if name == "muon":
            shapes.setdefault(x.shape, []).append(i)
    rest = [i for i, name in enumerate(names) if name == "adam"]
    muon, adam = optax.contrib.muon(1e-3), optax.adamw(1e-4)
    momentum = {s: jax.ShapeDtypeStruct((-(-len(k) // n) * n, *s), jnp.float32) for s, k in shapes.items()}
    small = jax.eval_shape(adam.init, [leaves[i] for i in rest])

    def orthogonal(m: Any) -> Any:
        """Optax's own, one matrix after the other under vmap; its momentum is kept outside."""

        def one(m: Any) -> Any:
            update, _ = muon.update([m], muon.init([jnp.zeros_like(m)]), [jnp.zeros_like(m)])
            return update[0]

        return jax.vmap(one)(m)

    def replica(state: Any, batch: Any) -> Any:
        params, (stacks, slots) = state
        value, grads = jax.value_and_grad(workload.loss)(params, batch)
        flat, old = jax.tree.leaves(grads), jax.tree.leaves(params)
        new, held = list(old), {}
        for shape, members in shapes.items():
            height = momentum[shape].shape[0]
            stack = jnp.stack([flat[i] for i in members])
            stack = jnp.pad(stack, ((0, height - len(members)), (0, 0), (0, 0)))
            mine = jax.lax.psum_scatter(stack, "data", scatter_dimension=0, tiled=True) / n
            held[shape] = 0.95 * stacks[shape] + mine
            updates = jax.lax.all_gather(orthogonal(held[shape]), "data", axis=0, tiled=True)
            for j, i in enumerate(members):
                new[i] = old[i] + updates[j]
        reduced = [jax.lax.pmean(flat[i], "data") for i in rest]
        updates, slots = adam.update(reduced, slots, [old[i] for i in rest])
        for i, u in zip(rest, updates, strict=True):
            new[i] = old[i] + u
        return (jax.tree.unflatten(tree, new), (held, slots)), jax.lax.pmean(value, "data")

    everywhere, split = PartitionSpec(), PartitionSpec("data")
    params = jax.tree.map(lambda _: everywhere, workload.params)
    specs = (params, (dict.fromkeys(momentum, split), jax.tree.map(lambda _: everywhere, small)))
    mapped = jax.shard_map(replica, mesh=mesh, in_specs=(specs, split), out_specs=(specs, everywhere), check_vma=False)
    shardings = jax.tree.map(
        lambda s: one_replica.named(mesh, *s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
    given = Workload(mapped, workload.params, (momentum, small), workload.batch, workload.loss)
    return jax.jit(mapped, donate_argnums=0), shardings, one_replica.named(mesh, "data"), given


VARIANTS = {
    "replicated": as_given(one_replica.replicated),
    "zero1": as_given(one_replica.zero1),
    "owned by hand": owned,
    "shardstep": as_given(one_replica.sharded("replicated")),
    "shardstep-sharded": as_given(one_replica.sharded("sharded")),
}


if __name__ == "__main__":
    main()
