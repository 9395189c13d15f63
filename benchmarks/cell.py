"""One cell of the suite: every variant of one workload with one optimizer on one number of devices.

    python benchmarks/cell.py transformer-42m adamw+clip                       # 8 simulated CPU devices
    python benchmarks/cell.py mlp-4x1024 adam --devices 4 --variant shardstep expert --json out.json

Beware of the allocator. On CPU, XLA takes its temporaries from malloc at each step, and glibc maps a block above
32 MiB afresh each time: a program with larger temporaries then pays for page faults, not for its update. At width 1024
the MLP's baselines lie 360 bytes above that line and shardstep lies below it. So by default freed memory is kept, which
favours the baselines; `--malloc default` shows what an untuned process sees, and the rows tell the page faults either
way.

Beware of transposes. A weight's gradient comes out of the backward pass transposed. In the replicated program under
`jit` XLA puts the transpose behind the all-reduce and into the update of the moments, which then read the gradient
column by column. The same work under `shard_map`, whose transpose stays before the all-reduce, takes a third of the CPU
time; no other difference was found in the programs. The MLP is measured at width 960 too, where strides are no power
of two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# glibc: never map a block of its own for an allocation, never give freed memory back.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}


def restart_keeping_memory() -> None:
    """glibc reads its settings when a process starts, so start once more with them."""
    if any(os.environ.get(key) != value for key, value in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})


def simulate(devices: int) -> Any:
    """So many CPU devices, as a mesh with one axis; before JAX touches any."""
    import jax
    from jax.sharding import AxisType

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def measure(workload: str, optimizer: str, mesh: Any, steps: int, variants: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Its rows. Behind each step time stands what is left of it without the forward and backward pass."""
    import jax
    from variants import FORWARD_BACKWARD, VARIANTS, default_of, forward_backward, variants_for
    from workloads import WORKLOADS

    from shardstep._src.tools.measuring import measure, rows

    chosen = WORKLOADS[workload](mesh.size, optimizer)
    jax.eval_shape(chosen.step, jax.eval_shape(chosen.init), chosen.batch)  # what JAX caches of tracing, all find alike
    contenders = [VARIANTS[name](chosen, mesh) for name in variants or variants_for(chosen)]
    contenders.append(forward_backward(chosen, mesh))
    say = lambda text: print(f"  {text}", file=sys.stderr, flush=True)  # noqa: E731
    found = {m.contender: m for m in measure(contenders, steps, say=say)}
    compute = found.pop(FORWARD_BACKWARD).step.median
    made = rows(list(found.values()), workload, optimizer, mesh.size, parameters=chosen.parameters)
    default = default_of(chosen, mesh)
    for row in made:
        row |= {"forward_backward_ms": round(compute, 4), "update_share": 1 - compute / row["step_ms"]}
        row["default"] = row["variant"] == default
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("optimizer")
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help="measured steps of each variant (default: %(default)s)")
    parser.add_argument("--variant", nargs="*", default=(), help="all that there are for this optimizer, if not given")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep", help="see above")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if args.malloc == "keep":
        restart_keeping_memory()
    found = measure(args.workload, args.optimizer, simulate(args.devices), args.steps, args.variant)
    found = [{**row, "malloc": args.malloc} for row in found]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        for row in found:
            print(f"{row['variant']:20s} {row['step_ms']:9.1f} ms  spread {row['spread']:7.1f}  {row['collectives']}")


if __name__ == "__main__":
    main()
