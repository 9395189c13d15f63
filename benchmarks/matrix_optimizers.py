"""Matrix optimizers on simulated devices: replicated, ZeRO-1 by hand, shardstep.

    python benchmarks/matrix_optimizers.py                       # 8 simulated CPU devices, into results/matrices.json
    python benchmarks/matrix_optimizers.py --only muon soap      # these rows again
    python benchmarks/matrix_optimizers.py --counts              # compile only: flops, LAPACK calls, bytes; keeps no rows
    python benchmarks/matrix_optimizers.py --summary             # which goals the rows meet

Six layers of two matrices, 192 x 512, few examples: almost nothing but weight update. The contenders take turns; step
times are medians. Flops per replica are the compiler's (`cost_analysis`: a loop counts once, and factorizations that
are calls into LAPACK not at all), for the whole step and beside what the forward and backward pass take by themselves.
LAPACK calls are counted in matrices, of the replica that has most; a branch that another replica takes is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import matrix_zoo as zoo
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardstep
from shardstep._src.tools.hlo import collectives, counts, wire_bytes

# name: (optimizer of matrix_zoo, are the layers stacked?)
OPTIMIZERS = {
    "muon": ("muon_unrolled", False),
    "stacked_muon": ("muon_unrolled", True),
    "shampoo": ("shampoo_eigh", False),
    "soap": ("soap", False),
    "kron": ("kron", False),
    "sgd": ("sgd", False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--shape", type=int, nargs=2, default=(192, 512))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=sorted(OPTIMIZERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = Mesh(np.asarray(jax.devices()[: args.devices]), ("data",))
    results = []
    for name in [args.only] if args.only else OPTIMIZERS:
        results.append({"optimizer": name, "jax": jax.__version__, **compare(name, mesh, args)})
        print(shown(results[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


def compare(name: str, mesh: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    kind, stacked = OPTIMIZERS[name]
    optimizer = optax.sgd(0.05, 0.9) if kind == "sgd" else zoo.transformation(kind, vmapped=stacked)
    step, state = zoo.training(optimizer, zoo.layers(args.layers, tuple(args.shape), stacked))
    batch = zoo.examples(2 * mesh.size, args.shape[0])
    everywhere, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    whole = jax.tree.map(lambda _: everywhere, state)
    split = (whole[0], jax.tree.map(lambda x: by_rows(x, mesh), state[1]))
    sharded = shardstep.shard(step, mesh, batch_argnums=1)
    programs = {
        "replicated": (jax.jit(step, in_shardings=(whole, by_example), out_shardings=(whole, everywhere)), whole),
        "zero1": (jax.jit(step, in_shardings=(split, by_example), out_shardings=(split, everywhere)), split),
        "shardstep": (sharded, None),
    }
    passes = jax.jit(
        lambda params, batch: jax.value_and_grad(zoo.loss)(params, batch), in_shardings=(whole[0], by_example)
    )
    flops = passes.lower(state[0], batch).compile().cost_analysis()["flops"]
    found: dict[str, Any] = {"passes_flops": flops, "owned": [str(o) for o in sharded.plan(state, batch).owned]}
    running, losses = {}, {}
    placed = jax.device_put(batch, by_example)
    for who, (program, layout) in programs.items():
        compiled = program.lower(state, batch).compile()
        sent = collectives(compiled.as_text())
        found[who] = {
            "flops": compiled.cost_analysis()["flops"],
            "wire_bytes": wire_bytes(sent),
            "collectives": counts(sent),
        }
        mine = sharded.place(state, batch)[0] if layout is None else jax.device_put(state, layout)
        for _ in range(2):
            mine, losses[who] = program(mine, placed)
        running[who] = [program, mine, []]
    np.testing.assert_allclose(float(losses["shardstep"]), float(losses["replicated"]), rtol=1e-4)
    for _ in range(args.rounds):
        for turn in running.values():
            started = time.perf_counter()
            turn[1], _ = turn[0](turn[1], placed)
            jax.block_until_ready(turn[1])
            turn[2].append(time.perf_counter() - started)
    for who, (_, _, seconds) in running.items():
        found[who]["step_ms"] = round(1e3 * statistics.median(seconds), 2)
    return found


def by_rows(x: Any, mesh: Mesh) -> NamedSharding:
    """A NamedSharding along the first dimension that the replicas divide."""
    dim = next((d for d, size in enumerate(x.shape) if size and size % mesh.size == 0), None)
    return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data"))


def shown(result: dict[str, Any]) -> str:
    base = result["replicated"]
    n = result["passes_flops"]
    lines = [result["optimizer"]]
    for who in ("replicated", "zero1", "shardstep"):
        m = result[who]
        update = (m["flops"] - n) / max(base["flops"] - n, 1)
        lines.append(
            f"  {who:12s} {m['step_ms']:9.2f} ms ({base['step_ms'] / m['step_ms']:.2f}x)  update flops {update:.3f} of"
            f" replicated  wire {m['wire_bytes'] / 1e6:.2f} MB  {m['collectives']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
