"""How cost grows: with replicas, the model, layers (scanned and unrolled) and leaves; slopes against theory.

    python benchmarks/growth.py --json results/growth.json              # some minutes
    python benchmarks/growth.py replicas layers --json results/growth.json
    python benchmarks/growth.py --slopes                                # of the rows that are there

Up to 8 replicas a program is compiled, and its bytes are read from it; from 16 to 4,096 the plan says them. A slope is
the exponent of a power law through the points (least squares on logarithms): 1 is linear, 0 is constant, -1 is 1/N.
Bytes do not depend on the clock. Planning and compiling are told in CPU seconds, over all threads, which a busy machine
stretches less than the clock.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recorded import RESULTS, Row, keep, read, stamp

PLANNED = (16, 64, 256, 1024, 4096)
COMPILED = (1, 2, 4, 8)
WIDTHS = (128, 256, 384, 512)  # ten times as many weights from the first to the last
LAYERS = (4, 8, 16, 32)
LEAVES = (10, 100, 1_000, 10_000)


def mesh_of(replicas: int) -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.asarray(jax.devices()[:replicas]), ("data",))


def planned(step: Any, arguments: Any, replicas: int, weights: str) -> Row:
    """What the plan says of one replica, and what it took, tracing included."""
    import shardstep
    from shardstep._src.core.gc_pause import undisturbed
    from shardstep._src.tools.measuring import timed

    with undisturbed():
        plan, cost = timed(lambda: shardstep.shard(step, mesh_of(replicas), weights=weights).plan(*arguments))
    return {
        "plan_cpu_s": round(cost.cpu, 3),
        "wire_bytes": plan.wire_bytes.sharded,
        "replicated_wire_bytes": plan.wire_bytes.replicated,
        "state_bytes": plan.state_bytes.sharded,
        "peak_bytes": plan.peak_bytes.sharded,
    }


def compiled(step: Any, arguments: Any, replicas: int, weights: str) -> Row:
    """What the compiled program says of one device."""
    import shardstep
    from shardstep._src.tools.hlo import collectives, wire_bytes
    from shardstep._src.tools.measuring import timed

    sharded = shardstep.shard(step, mesh_of(replicas), weights=weights)
    program, cost = timed(sharded.lower(*arguments).compile)
    memory = program.memory_analysis()
    return {
        "compiled_wire_bytes": wire_bytes(collectives(program.as_text())),
        "arg_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_cpu_s": round(cost.cpu, 3),
    }


# --- what grows -----------------------------------------------------------------------------------------------------


def with_replicas() -> Iterator[Row]:
    """The same model, the same examples per replica."""
    import jax
    import workloads

    for replicas in (*COMPILED, *PLANNED):
        for weights in ("replicated", "sharded"):
            workload = workloads.transformer(1, "adam", width=1024, layers=2, vocabulary=8192)
            batch = jax.ShapeDtypeStruct((replicas, *workload.batch.shape[1:]), workload.batch.dtype)
            asked = workload.step, (jax.eval_shape(workload.init), batch), replicas, weights
            row = {"replicas": replicas, "weights": weights, **planned(*asked)}
            yield row | (compiled(*asked) if 1 < replicas <= COMPILED[-1] else {})


def with_model() -> Iterator[Row]:
    import jax
    import workloads

    for width in WIDTHS:
        workload = workloads.transformer(8, "adam", width=width, vocabulary=8 * width, heads=width // 64)
        for weights in ("replicated", "sharded"):
            asked = workload.step, (jax.eval_shape(workload.init), workload.batch), 8, weights
            yield {"parameters": workload.parameters, "weights": weights, **planned(*asked), **compiled(*asked)}


def with_layers() -> Iterator[Row]:
    """Scanned and unrolled; embeddings and all."""
    import jax
    import workloads

    for layers in LAYERS:
        scanned = workloads.scanned_gpt(8, "adam", width=128, layers=layers, vocabulary=1024)
        unrolled = workloads.transformer(8, "adam", width=128, layers=layers, vocabulary=1024, heads=2)
        for form, workload in (("scanned", scanned), ("unrolled", unrolled)):
            asked = workload.step, (jax.eval_shape(workload.init), workload.batch), 8, "sharded"
            yield {"layers": layers, "form": form, **planned(*asked), **compiled(*asked)}


def with_leaves() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp
    import scaling

    for leaves in LEAVES:
        step, state = scaling.deep(leaves // 3)
        yield {"leaves": leaves, **planned(step, (state, jax.ShapeDtypeStruct((64, 64), jnp.float32)), 8, "sharded")}


GROWING: dict[str, Callable[[], Iterator[Row]]] = {
    "replicas": with_replicas,
    "parameters": with_model,
    "layers": with_layers,
    "leaves": with_leaves,
}


# --- slopes ---------------------------------------------------------------------------------------------------------


class Slope(NamedTuple):
    """`what` grows as the `exponent`-th power of `axis`; theory says `expected`."""

    what: str
    axis: str
    exponent: float
    expected: float | None
    points: int

    @property
    def as_expected(self) -> bool:
        """No faster than theory says: a part that does not grow bends a line down."""
        return self.expected is None or self.exponent <= self.expected + CLOSE


CLOSE = 0.15  # a few points on a machine that others use
# rows, axis, figure, exponent that theory says (None: nothing is claimed)
EXPECTED: tuple[tuple[str, dict[str, str], str, float | None], ...] = (
    ("replicas", {"weights": "sharded"}, "state_bytes", -1),
    ("replicas", {"weights": "replicated"}, "wire_bytes", 0),
    ("replicas", {"weights": "sharded"}, "wire_bytes", 0),
    ("replicas", {"weights": "sharded"}, "plan_cpu_s", 0),
    ("parameters", {"weights": "replicated"}, "compiled_wire_bytes", 1),
    ("parameters", {"weights": "sharded"}, "compiled_wire_bytes", 1),
    ("parameters", {"weights": "sharded"}, "arg_bytes", 1),
    ("parameters", {"weights": "sharded"}, "temp_bytes", 1),
    ("layers", {"form": "scanned"}, "plan_cpu_s", 0),
    ("layers", {"form": "scanned"}, "compile_cpu_s", 0),
    ("layers", {"form": "unrolled"}, "plan_cpu_s", 1),
    ("layers", {"form": "unrolled"}, "compile_cpu_s", 1),
    ("leaves", {}, "plan_cpu_s", 1),
)
FIRST = {"replicas": 8, "leaves": 1_000}  # below it something else counts: (N - 1)/N, or what any plan takes


def slopes(rows: Sequence[Row]) -> list[Slope]:
    found = []
    for axis, which, figure, expected in EXPECTED:
        points = [
            (row[axis], row[figure])
            for row in rows
            if row["axis"] == axis
            and row[axis] >= FIRST.get(axis, 0)
            and all(row.get(k) == v for k, v in which.items())
            and row.get(figure)
        ]
        if len(points) > 1:
            name = f"{figure}{', ' if which else ''}{', '.join(f'{k} {v}' for k, v in which.items())}"
            found.append(Slope(name, axis, exponent(points), expected, len(points)))
    return found


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Of y = c x^e, by least squares on logarithms."""
    xs, ys = ([math.log(point[i]) for point in points] for i in range(2))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*GROWING, []], help="what grows (default: everything)")
    parser.add_argument("--json", type=Path, help="rows are kept here; those of other axes stay")
    parser.add_argument("--slopes", action="store_true", help="measure nothing")
    args = parser.parse_args()
    path = args.json or RESULTS / "growth.json"
    rows = read(path.stem, path.parent)
    if not args.slopes:
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", PLANNED[-1] if set(args.axes or GROWING) & {"replicas"} else 8)
        for axis in args.axes or GROWING:
            rows = [row for row in rows if row["axis"] != axis]
            for found in GROWING[axis]():
                rows.append({"axis": axis, **found, **stamp("growth")})
                print({"axis": axis, **found}, flush=True)
                if args.json:
                    keep(path.stem, rows, path.parent)
    for slope in slopes(rows):
        print(slope, "" if slope.as_expected else "  NOT AS EXPECTED")


if __name__ == "__main__":
    main()
