"""From what size on does a tensor travel better alone?

    python benchmarks/buckets.py                 # 8 simulated CPU devices, or the GPUs or TPUs there are

For tensors of each size: 32 of them reduced, scattered and gathered again, each in a collective of its own and packed
into one, in turn. Packing wins while a collective's fixed cost is more than copying its data twice.

8 simulated CPU devices on 2 cores under load, JAX 0.12.0.1, 2026-11-16 (alone / packed): 1 KiB 3.6x, 4 KiB 3.6x, 16 KiB
1.8x, 64 KiB 1.4x, 256 KiB 0.8x, 1 MiB 0.23x. Hence 256 KiB a bucket on CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardstep._src.core.layout import REPLICATED, Array, Axis, Partial, Split
from shardstep._src.core.program import Var
from shardstep._src.core.schedule import Transfer
from shardstep._src.runtime.packing import transfer


def program(mesh: Mesh, shape: tuple[int, int], count: int, packed: bool):
    axes = (Axis(("data",), mesh.size),)
    there = tuple(Transfer(Var(Array(shape, jnp.dtype("float32"))), (Partial(),), (Split(0),)) for _ in range(count))
    back = tuple(Transfer(t.var, t.target, (REPLICATED,)) for t in there)

    def move(xs, bundle):
        if packed:
            return transfer(xs, bundle, axes)
        return [transfer([x], (t,), axes)[0] for x, t in zip(xs, bundle, strict=True)]

    def replica(*xs):
        return move([2 * x for x in move([x[0] for x in xs], there)], back)

    spec = PartitionSpec("data")
    return jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = Mesh(np.asarray(jax.devices()[: args.devices]), ("data",))
    for kib in (1, 4, 16, 64, 256, 1024, 4096):
        count = max(2, min(args.tensors, 32 * 1024 // kib))
        shape = (64, kib * 4)
        where = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
        xs = [jax.device_put(np.ones((mesh.size, *shape), np.float32), where) for _ in range(count)]
        runs = {name: program(mesh, shape, count, name == "packed") for name in ("alone", "packed")}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.rounds + 2):
            for name, run in runs.items():
                started = time.perf_counter()
                jax.block_until_ready(run(*xs))
                if i >= 2:
                    times[name].append(time.perf_counter() - started)
        alone, packed = (1e3 * statistics.median(times[name]) for name in ("alone", "packed"))
        print(
            f"{count:3d} x {kib:5d} KiB: alone {alone:8.2f} ms, packed {packed:8.2f} ms, {alone / packed:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
