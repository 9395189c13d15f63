"""The paper's models at the paper's scale, ahead of time: `libtpu` compiles for pods that nobody here has.

    python benchmarks/tpu_paper.py --topology v3:16x16 --workload resnet50-16        # all optimizers and programs
    python benchmarks/tpu_paper.py --deadline 600                                    # what is missing, for ten minutes
    python benchmarks/tpu_paper.py --workload transformer-big-256 --variant original --optimizer adam

Five programs for each cell: replicated, hand-annotated ZeRO-1, the closed original (see replica_mode.py; one iteration
of its training loop), shardstep with replicated and with sharded weights. Rows are kept in `results/tpu_paper.json`,
one after the other, with the commit that made them. Cycles are the compiler's estimate, which counts no collectives;
`predicted_us` is what shardstep's model of links says of those, whoever's program it is. libtpu serves one process at a
time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import paper_models
import replica_mode
import tpu_aot
from jax.experimental import topologies
from jax.sharding import Mesh
from paper_models import Model
from recorded import RESULTS, keep, read, stamp
from tpu_aot import UPDATE, State, Workload
from tpu_goals import total

from shardstep._src.machine.topology import describe
from shardstep._src.tools.hlo import collectives, counts, wire_bytes

MODELS: dict[str, Callable[[], Model]] = {
    **{f"resnet50-{n}": functools.partial(paper_models.resnet50, n) for n in (16, 32)},
    **{f"transformer-big-{n}": functools.partial(paper_models.transformer_big, n) for n in (256, 2048)},
}
OPTIMIZERS = {
    "lars": lambda: optax.lars(1e-3, weight_decay=1e-4, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-3),
}
TOPOLOGIES = ("v3:16x16", "v3:4x4", "v5p:8x8x8")
VARIANTS = ("replicated", "zero1", "original", "weights replicated", "weights sharded")
Cell = tuple[str, str, str, str]  # topology, workload, optimizer, variant


def wanted() -> Iterator[Cell]:
    """Every cell, what the claims need first."""
    cells: list[tuple[str, str, tuple[str, ...]]] = [
        ("v3:16x16", "transformer-big-256", ("adam", "sgd")),
        ("v3:16x16", "resnet50-16", ("lars", "sgd")),
        ("v3:4x4", "transformer-big-256", ("adam", "sgd")),
        ("v5p:8x8x8", "transformer-big-256", ("adam", "sgd")),
        ("v3:16x16", "transformer-big-256", ("momentum",)),
        ("v3:16x16", "resnet50-16", ("momentum",)),
        ("v3:16x16", "transformer-big-2048", ("adam", "sgd", "momentum")),
        ("v3:16x16", "resnet50-32", ("lars", "sgd", "momentum")),
        ("v3:4x4", "resnet50-16", ("lars", "sgd")),
        ("v5p:8x8x8", "resnet50-16", ("lars", "sgd")),
    ]
    for topology, workload, optimizers in cells:
        for optimizer, variant in itertools.product(optimizers, VARIANTS):
            yield topology, workload, optimizer, variant


# --- programs -------------------------------------------------------------------------------------------------------


def whole_batch(model: Model, optimizer: optax.GradientTransformation, replicas: int) -> Workload:
    """The step as a user writes it."""

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        return model.loss(params, batch, lambda x: x), statistics

    return tpu_aot.training(loss, {"params": model.params}, optimizer, model.batch(replicas))


def of_a_replica(model: Model, optimizer: optax.GradientTransformation, replicas: int) -> Workload:
    """The step as one replica runs it: its own examples, gradients summed by hand. Returns the state alone."""

    def everyone(x: jax.Array) -> jax.Array:
        return replica_mode.sum_over_replicas(x, replicas) / replicas

    def step(state: State, batch: Any) -> State:
        # each term is a part of the loss: the gradient through `everyone` adds the other replicas' parts
        grads = jax.grad(lambda p: model.loss(p, batch, everyone) / replicas)(state.params)
        grads = jax.tree.map(lambda g: replica_mode.sum_over_replicas(g, replicas), grads)
        with jax.named_scope(UPDATE):
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        return State(params, state.statistics, moments)

    state = State(model.params, {}, jax.eval_shape(optimizer.init, model.params))
    return Workload(step, state, model.batch(1))


def compiled(cell: Cell, devices: list[Any]) -> tuple[str, Any]:
    """The text of one step and the memory of the program."""
    _, workload, optimizer, variant = cell
    model, chosen = MODELS[workload](), OPTIMIZERS[optimizer]()
    if variant == "original":
        job = of_a_replica(model, chosen, len(devices))
        loop = replica_mode.training_loop(job.step, job.state, job.batch, len(devices))
        program = replica_mode.compiled(loop, devices)
        return program.body, program.memory
    job = whole_batch(model, chosen, len(devices))
    program = tpu_aot.VARIANTS[variant](job, Mesh(np.array(devices), ("data",))).compile()
    return program.as_text(), program.memory_analysis()


def measure(cell: Cell) -> dict[str, Any]:
    topology, workload, optimizer, variant = cell
    devices = sorted(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices, key=lambda d: d.id)
    started = time.monotonic()
    text, memory = compiled(cell, devices)
    found, (update, copies, rest) = collectives(text), tpu_aot.cycles(text)
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return {
        "topology": topology,
        "workload": workload,
        "optimizer": optimizer,
        "variant": variant,
        "replicas": len(devices),
        "large_all_reduces": sum(c.kind == "all-reduce" and c.bytes >= 1e6 for c in found),
        "counts": counts(found),
        "wire_mb": wire_bytes(found) / 1e6,
        "cycles_update": update,
        "cycles_copies": copies,
        "cycles_rest": rest,
        "arguments_mb": arguments / 1e6,
        "temporaries_mb": temporaries / 1e6,
        "peak_mb": (getattr(memory, "peak_memory_in_bytes", 0) or arguments + temporaries) / 1e6,
        "predicted_us": 1e6 * tpu_aot.predicted(found, describe(topology)),
        "compile_s": round(time.monotonic() - started, 1),
        **stamp("tpu_paper"),
    }


# --- the file -------------------------------------------------------------------------------------------------------


def key(row: dict[str, Any]) -> Cell:
    return row["topology"], row["workload"], row["optimizer"], row["variant"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", choices=TOPOLOGIES)
    parser.add_argument("--workload", nargs="+", choices=MODELS)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--variant", nargs="+", choices=VARIANTS)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds; the next run goes on from there")
    parser.add_argument("--again", action="store_true", help="also what was compiled before")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = {key(row): row for row in read("tpu_paper", args.out)}
    chosen = (args.topology, args.workload, args.optimizer, args.variant)
    todo = [c for c in wanted() if all(x is None or part in x for part, x in zip(c, chosen, strict=True))]
    started = time.monotonic()
    for cell in todo:
        if (cell in rows and not args.again) or time.monotonic() - started > args.deadline:
            continue
        try:
            rows[cell] = measure(cell)
        except Exception as error:  # one compiler's refusal: the other cells still count
            print(*cell, f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        order = {c: i for i, c in enumerate(wanted())}
        kept = sorted(rows.values(), key=lambda row: order[key(row)])
        keep("tpu_paper", kept, args.out)
        print(*cell, f"{total(rows[cell]):.0f}k cycles, {rows[cell]['compile_s']} s", flush=True)


if __name__ == "__main__":
    main()
