"""Matrix optimizers on simulated devices: replicated, ZeRO-1 by hand, shardstep.

    python benchmarks/matrix_optimizers.py                       # 8 simulated CPU devices, into results/matrices.json
    python benchmarks/matrix_optimizers.py --only muon soap      # these rows again
    python benchmarks/matrix_optimizers.py --counts              # compile only: flops, LAPACK calls, bytes; no rows
    python benchmarks/matrix_optimizers.py --summary             # which goals the rows meet

Six layers of two matrices, 192 x 512, few examples: almost nothing but weight update. The contenders take turns; step
times are medians. Flops per replica are the compiler's (`cost_analysis`: a loop counts once, and factorizations that
are calls into LAPACK not at all), for the whole step and beside what the forward and backward pass take by themselves.
LAPACK calls are counted in matrices, of the replica that has most; a branch that another replica takes is not.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import matrix_zoo as zoo
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recorded import RESULTS, Row, keep, read, stamp

import shardstep
from shardstep._src.tools.hlo import collectives, counts, wire_bytes

# name: (optimizer of matrix_zoo, are the layers stacked?)
OPTIMIZERS = {
    "muon": ("muon_unrolled", False),
    "stacked muon": ("muon_unrolled", True),
    "shampoo (eigh)": ("shampoo_eigh", False),
    "soap (qr)": ("soap", False),
    "kron": ("kron", False),
    "sgd": ("sgd", False),
}
FACTOR, SHARE = 4.0, 1.4  # over replicated; flops of the update per replica, times 1/N of the replicated step's
LAYERS, SHAPE = 6, (192, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--counts", action="store_true", help="compile, run nothing, keep nothing")
    parser.add_argument("--summary", action="store_true", help="measure nothing; say which goals the rows meet")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    for name in [] if args.summary else args.only:
        row = compare(name, Mesh(np.asarray(jax.devices()), ("data",)), 0 if args.counts else args.rounds)
        print(shown(row), flush=True)
        if not args.counts:
            others = {(r["optimizer"], r["devices"]): r for r in read("matrices")}
            others[row["optimizer"], row["devices"]] = row
            keep(
                "matrices",
                sorted(others.values(), key=lambda r: (list(OPTIMIZERS).index(r["optimizer"]), r["devices"])),
            )
    if not args.counts:
        print(*(f"{said}: {'met' if met else 'missed'}" for said, met in goals(read("matrices", RESULTS))), sep="\n")


def compare(name: str, mesh: Mesh, rounds: int) -> Row:
    """Compile the contenders; if there are rounds, let them take turns."""
    step, state, batch = made(name, mesh)
    everywhere, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    whole = jax.tree.map(lambda _: everywhere, state)
    split = (whole[0], jax.tree.map(lambda x: by_rows(x, mesh), state[1]))
    sharded = shardstep.shard(step, mesh, batch_argnums=1)
    programs: dict[str, tuple[Callable[..., Any], Any]] = {
        "replicated": (jax.jit(step, in_shardings=(whole, by_example), out_shardings=(whole, everywhere)), whole),
        "zero1": (jax.jit(step, in_shardings=(split, by_example), out_shardings=(split, everywhere)), split),
        "shardstep": (sharded, None),
    }
    passes = jax.jit(jax.value_and_grad(zoo.loss), in_shardings=(whole[0], by_example))
    variants: dict[str, Row] = {}
    running, losses = {}, {}
    placed = jax.device_put(batch, by_example)
    for who, (program, layout) in programs.items():
        variants[who] = counted(program.lower(state, batch).compile())
        if rounds:
            mine = sharded.place(state, batch)[0] if layout is None else jax.device_put(state, layout)
            for _ in range(2):
                mine, losses[who] = program(mine, placed)
            running[who] = (program, mine)
    if rounds:
        np.testing.assert_allclose(float(losses["shardstep"]), float(losses["replicated"]), rtol=1e-4)
        timed(running, placed, rounds, variants)
    return {
        "optimizer": name,
        "devices": mesh.size,
        **stamp("matrices"),
        "passes_flops": passes.lower(state[0], batch).compile().cost_analysis()["flops"],
        "owned": [f"{o.count} x {list(o.shape)}: {o.who}; {o.why}" for o in sharded.plan(state, batch).owned],
        "variants": variants,
    }


def made(name: str, mesh: Mesh) -> tuple[Callable[..., Any], Any, Any]:
    kind, stacked = OPTIMIZERS[name]
    optimizer = optax.sgd(0.05, 0.9) if kind == "sgd" else zoo.transformation(kind, vmapped=stacked)
    return *zoo.training(optimizer, zoo.layers(LAYERS, SHAPE, stacked)), zoo.examples(2 * mesh.size, SHAPE[0])


def timed(running: dict[str, Any], batch: Any, rounds: int, into: dict[str, Row]) -> None:
    """The contenders take turns. CPU time is that of all replicas; it tells more on a machine that is not quiet."""
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in running}
    for _ in range(rounds):
        for who, (program, state) in running.items():
            wall, cpu = time.perf_counter(), time.process_time()
            state, _ = program(state, batch)
            jax.block_until_ready(state)
            times[who].append((time.perf_counter() - wall, time.process_time() - cpu))
            running[who] = (program, state)
    for who, found in times.items():
        wall_ms, cpu_ms = ([1e3 * t for t in of] for of in zip(*found, strict=True))
        low, median, high = statistics.quantiles(wall_ms * 2 if len(wall_ms) == 1 else wall_ms, n=4, method="inclusive")
        into[who] |= {"step_ms": round(median, 2), "quartiles_ms": [round(low, 2), round(high, 2)]}
        into[who] |= {"cpu_ms": round(statistics.median(cpu_ms), 2)}


def counted(compiled: Any) -> Row:
    text, memory = compiled.as_text(), compiled.memory_analysis()
    sent = collectives(text)
    return {
        "flops": compiled.cost_analysis()["flops"],
        "factorizations": factorizations(text),
        "wire_bytes": wire_bytes(sent),
        "collectives": counts(sent),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


_LAPACK = re.compile(r"= \(?\w+\[([\d,]*)\].*custom_call_target=\"lapack_")
_BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=)([^}\n]*?)(?:\}|, metadata|$)")


def factorizations(text: str) -> int:
    """Matrices that a replica hands to LAPACK, of branches the one with most."""
    own: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        elif found := _LAPACK.search(line):
            *batch, _, _ = (int(d) for d in found[1].split(","))
            own[name] = own.get(name, 0) + int(np.prod(batch or [1]))
    total = sum(own.values())
    for branches in _BRANCHES.findall(text):
        done = [own.get(b, 0) for b in re.findall(r"%([\w.\-]+)", branches)]
        total -= sum(done) - max(done, default=0)
    return total


def by_rows(x: Any, mesh: Mesh) -> NamedSharding:
    """A NamedSharding along the first dimension that the replicas divide."""
    dim = next((d for d, size in enumerate(x.shape) if size and size % mesh.size == 0), None)
    return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data"))


# --- what rows say --------------------------------------------------------------------------------------------------


def update_share(row: Row, who: str = "shardstep") -> float:
    """Flops per replica of the update and of the passes, over what the replicated step takes for the update."""
    update = row["variants"]["replicated"]["flops"] - row["passes_flops"]
    return (row["variants"][who]["flops"] - row["passes_flops"]) / max(update, 1.0)


def goals(rows: Iterable[Row]) -> Iterable[tuple[str, bool]]:
    for row in rows:
        if row["optimizer"] == "sgd":
            continue
        ours, zero1, base = (row["variants"][who]["step_ms"] for who in ("shardstep", "zero1", "replicated"))
        factor, share = base / ours, row["devices"] * update_share(row)
        said = f"{row['optimizer']}: {factor:.2f}x replicated, {zero1 / ours:.2f}x ZeRO-1, flops {share:.2f}/N"
        yield said, factor >= FACTOR and ours < zero1 and share <= SHARE


def shown(row: Row) -> str:
    base = row["variants"]["replicated"]
    lines = [row["optimizer"], *(f"  {owned}" for owned in row["owned"])]
    for who, m in row["variants"].items():
        times, sent = "", f"wire {m['wire_bytes'] / 1e6:.2f} MB"
        if "step_ms" in m:
            faster, less = (base[unit] / m[unit] for unit in ("step_ms", "cpu_ms"))
            times = f"{m['step_ms']:9.2f} ms ({faster:.2f}x, CPU {less:.2f}x)"
        lines.append(
            f"  {who:12s}{times}  update flops {update_share(row, who):.3f} of replicated, LAPACK {m['factorizations']}"
            f"  {sent}  temporaries {m['temporary_bytes'] / 1e6:.1f} MB  {m['collectives']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
