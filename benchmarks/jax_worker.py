"""One process of a JAX data-parallel run of a model of `workloads.py`: by hand (`BY_HAND`), or shardstep.

    python jax_worker.py --variant shardstep --process 0 --processes 2 --port 1234
    python jax_worker.py --processes 2 --export start.npz       # weights and tokens, for other frameworks

Started by `against_torch.py`, which holds the other end of its pipes. With `--devices` one process simulates several
devices instead.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turns import pin, serve

SIZES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "scanned": {"width": 512, "layers": 8},  # scanned_gpt's: 27 million parameters
    "smoke": {"width": 64, "vocabulary": 512, "heads": 4},
}
HEADS = 16


@dataclass
class Training:
    step_function: Any
    state: Any
    batch: Any
    compiled: Any
    compile_seconds: float
    planned_wire_bytes: float | None  # what the plan says a process sends in a step; none where there is no plan
    parts: dict[str, float] = field(default_factory=dict)

    def step(self) -> float:
        import jax

        self.state, loss = jax.block_until_ready(self.step_function(self.state, self.batch))
        return float(loss)

    def facts(self) -> dict[str, Any]:
        import jax

        from shardstep._src.tools.hlo import collectives, counts, wire_bytes

        memory, found = self.compiled.memory_analysis(), collectives(self.compiled.as_text())
        return {
            "versions": {"jax": jax.__version__},
            "optimizer_bytes": _held(self.state.optimizer),
            "weight_bytes": _held(self.state.params),
            "arg_bytes": memory.argument_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "wire_bytes": wire_bytes(found),
            "planned_wire_bytes": self.planned_wire_bytes,
            "collectives": counts(found),
            "compile_s": self.compile_seconds,
        }


def _held(tree: Any) -> int:
    """Bytes on the first device of this process."""
    import jax

    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def workload(args: argparse.Namespace) -> Any:
    import workloads

    create = workloads.scanned_gpt if args.size == "scanned" else workloads.transformer
    return create(args.processes * args.devices, "adamw+clip", **SIZES[args.size])


# By hand: are weights split, are moments?
BY_HAND = {"replicated": (False, False), "zero1": (False, True), "fsdp": (True, True)}


def step_of(variant: str, work: Any, mesh: Any) -> tuple[Any, Any]:
    """The step, and how its state rests where that is said by hand."""
    import jax
    from jax.sharding import NamedSharding

    import shardstep

    if variant not in BY_HAND:
        return shardstep.shard(work.step, mesh, weights=variant.partition("-")[2] or "replicated"), None
    from variants import BY_EXAMPLE, WHOLE, by_hand

    layout = by_hand(jax.eval_shape(work.init), mesh, *BY_HAND[variant])
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout)
    step = jax.jit(
        work.step,
        in_shardings=(where, NamedSharding(mesh, BY_EXAMPLE)),
        out_shardings=(where, NamedSharding(mesh, WHOLE)),
        donate_argnums=0,
    )
    return step, where


def create(args: argparse.Namespace) -> Training:
    import jax

    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    work = workload(args)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    step, where = step_of(args.variant, work, mesh)
    own = work.batch[args.process * args.devices : (args.process + 1) * args.devices]
    batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), own)
    shapes = jax.eval_shape(work.init)
    planned = None
    if where is None:
        plan = step.plan(shapes, batch)
        state, planned = plan.init(work.init), plan.wire_bytes.sharded
    else:
        state = jax.jit(work.init, out_shardings=where)()
    started = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    return Training(step, state, batch, compiled, time.perf_counter() - started, planned)


def export(args: argparse.Namespace) -> None:
    """The initial weights by path, the global batch, the number of heads."""
    import jax
    import numpy as np

    work = workload(args)
    params = work.init().params
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    np.savez(args.export, batch=work.batch, heads=SIZES[args.size].get("heads", HEADS), **leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=[*BY_HAND, "shardstep", "shardstep-sharded"])
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1, help="simulated ones, in each process")
    parser.add_argument("--port", type=int, help="of the first process")
    parser.add_argument("--size", choices=SIZES, default="transformer")
    parser.add_argument("--core", type=int, help="stay on this core")
    parser.add_argument("--export", type=Path)
    args = parser.parse_args()
    pin(args.core)
    if args.export:
        export(args)
    else:
        serve(lambda: create(args))


if __name__ == "__main__":
    main()
