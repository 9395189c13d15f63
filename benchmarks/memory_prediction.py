"""Predicted memory against what XLA allocates: arguments + temporaries of each device.

    python benchmarks/memory_prediction.py                         # the zoo, on 8 simulated CPU devices
    python benchmarks/memory_prediction.py --only mlp transformer  # some of it
    python benchmarks/memory_prediction.py --batch 256 --out benchmarks/results/memory.json

Every program is planned and compiled with its weights replicated and with its weights sharded, and as plain data
parallelism. Nothing runs. The last line counts the programs above 1 MB that are predicted within 20 % and within 2x.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests")]
MEGABYTE = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of zoo programs")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    from zoo import ZOO

    rows = []
    for name in args.only or ZOO:
        for weights in ("replicated", "sharded"):
            rows.append(compare(name, ZOO[name](args.batch), weights))
            print(line(rows[-1]), flush=True)
        jax.clear_caches()
        gc.collect()
    print(summary(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


def compare(name: str, program: Any, weights: str) -> dict[str, Any]:
    import shardstep
    from shardstep._src.planning.estimate import estimate

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    sharded = shardstep.shard(
        program.step,
        mesh,
        weights=weights,
        batch_argnums=program.batch_argnums,
        batch_axis=program.batch_axis,
        options=shardstep.Options(engine="rewrite"),
    )
    arguments = (*program.state, *program.batches[0])
    planned, _ = sharded.program(arguments, {})
    decided, replicas = planned.decided, planned.replicas
    predicted = estimate(decided.schedule, decided.donated, replicas.axes, replicas.topology).memory
    found: Any = sharded.lower(*arguments).compile().memory_analysis()
    return {
        "program": name,
        "weights": weights,
        "predicted_arguments": predicted.arguments,
        "predicted_temporaries": predicted.temporaries,
        "arguments": found.argument_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }


def ratio(row: dict[str, Any]) -> float:
    predicted = row["predicted_arguments"] + row["predicted_temporaries"]
    return predicted / (row["arguments"] + row["temporaries"])


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['program']:24s} {row['weights']:10s}"
        f" predicted {row['predicted_arguments'] / MEGABYTE:8.2f} + {row['predicted_temporaries'] / MEGABYTE:8.2f} MB"
        f"   XLA {row['arguments'] / MEGABYTE:8.2f} + {row['temporaries'] / MEGABYTE:8.2f} MB   {ratio(row):.2f}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    large = [ratio(row) for row in rows if row["arguments"] + row["temporaries"] > MEGABYTE]
    if not large:
        return "no program above 1 MB"
    near = sum(1 / 1.2 <= r <= 1.2 for r in large)
    far = sum(not 0.5 <= r <= 2 for r in large)
    spread = f"{min(large):.2f} to {max(large):.2f}"
    return f"{len(large)} above 1 MB: {near / len(large):.0%} within 20 %, {far} more than 2x off ({spread})"


if __name__ == "__main__":
    main()
