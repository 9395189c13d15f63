"""Gradient accumulation over microbatches: plain `jit` data parallelism against shardstep.

    python benchmarks/accumulation.py                               # 8 simulated CPU devices, 8 microbatches
    python benchmarks/accumulation.py --microbatches 4 --steps 20 --json out.json

The step is the one people write: `lax.scan` over microbatches made by `reshape`, a carry that gradients are added to,
one Adam update behind the loop. Three programs of it:

    replicated   `jit`, the batch split by a NamedSharding, nothing else said
    annotated    the same with `with_sharding_constraint` on the microbatches: replicas share each of them
    shardstep    the step as it is

Beware of the first. `reshape` carries the split over to the microbatches, which a scan must go through one by one, so
XLA gathers the examples. With 8 microbatches on 8 replicas (and with 3) every replica then computes all of them: no
gradient travels because no work is shared; with 4, pairs of replicas share one. The second is what data parallelism
means: it reduces every microbatch's gradients inside the loop. In shardstep's program each replica adds up its own
terms, and the sum is reduced once.

Bytes are read from the compiled programs; a collective inside the loop counts once per microbatch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import core
import jax
import jax.numpy as jnp
import numpy as np
import optax
from core import Measurement, State, Workload
from hlo import Collective, collectives
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

VARIANTS = ("replicated", "annotated", "shardstep")


# --- the workload ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    replicas: int
    microbatches: int
    width: int
    layers: int
    examples: int  # a replica and microbatch

    @property
    def weight_bytes(self) -> int:
        return 4 * self.width**2


def loss(weights: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, target = batch
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - target) ** 2)


def accumulation(size: Size, split: NamedSharding | None = None) -> Workload:
    """Adam behind a scan over microbatches, which are laid out as `split` says if it says anything."""
    optimizer = optax.adam(1e-3)

    def microbatches(batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(size.microbatches, -1, *x.shape[1:]), batch)
        return parts if split is None else lax.with_sharding_constraint(parts, split)

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def add(total: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(state.params, microbatch)), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        total, _ = lax.scan(add, start, microbatches(batch))
        value, grads = jax.tree.map(lambda x: x / size.microbatches, total)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments), value

    def init() -> State:
        params = [core.dense(k, size.width, size.width) for k in jax.random.split(jax.random.key(0), size.layers)]
        return State(params, optimizer.init(params))

    rng = np.random.default_rng(0)
    examples = size.replicas * size.microbatches * size.examples
    batch = tuple(rng.standard_normal((examples, size.width), np.float32) for _ in range(2))
    return Workload(f"{size.microbatches} microbatches, {size.layers} weights of width {size.width}", step, init, batch)


def annotated(size: Size) -> Callable[[Workload, Mesh], core.Step]:
    def variant(_: Workload, mesh: Mesh) -> core.Step:
        return core.replicated(accumulation(size, NamedSharding(mesh, PartitionSpec(None, "data"))), mesh)

    return variant


# --- bytes, microbatch by microbatch --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes each replica sends in a step, by what is sent."""

    gradients: float  # reductions of a weight's size
    weights: float  # gathers of that size
    others: float  # examples, scalars

    @classmethod
    def of(cls, found: Iterable[Collective], size: Size) -> Traffic:
        gradients = weights = others = 0.0
        for c in found:
            sent = c.wire_bytes * (size.microbatches if c.in_loop else 1)
            if c.bytes < size.weight_bytes:
                others += sent
            elif c.kind in ("all-reduce", "reduce-scatter"):
                gradients += sent
            else:
                weights += sent
        return cls(gradients, weights, others)

    @property
    def total(self) -> float:
        return self.gradients + self.weights + self.others


@dataclass(frozen=True)
class Result:
    measurement: Measurement
    traffic: Traffic
    in_loop: dict[str, int]
    outside: dict[str, int]


def measure(size: Size, mesh: Mesh, steps: int) -> list[Result]:
    core.VARIANTS["annotated"] = annotated(size)  # core's functions find variants by name
    workload = accumulation(size)
    compiled, lower, compile_ = core.compile_all(workload, mesh, VARIANTS, times=1)
    costs, losses = core.run_all(workload, mesh, VARIANTS, steps)
    return [
        result(
            core.describe(
                name,
                compiled[name],
                core.Timing.of(lower[name]),
                core.Timing.of(compile_[name]),
                costs[name],
                losses[name],
            ),
            collectives(compiled[name].as_text()),
            size,
        )
        for name in VARIANTS
    ]


def result(measurement: Measurement, found: Sequence[Collective], size: Size) -> Result:
    inside = core.counts(c for c in found if c.in_loop)
    outside = core.counts(c for c in found if not c.in_loop)
    traffic = Traffic.of(found, size)
    measurement.wire_bytes = traffic.total  # the loop's collectives counted once per microbatch
    return Result(measurement, traffic, inside, outside)


# --- reporting ------------------------------------------------------------------------------------------------------


def table(title: str, found: Sequence[Result]) -> Table:
    made = Table(title=title)
    for name in ("", *(r.measurement.variant for r in found)):
        made.add_column(name, justify="right" if name else "left")
    ours = found[-1]

    def kinds(counts: dict[str, int]) -> str:
        return "\n".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"

    rows: dict[str, Callable[[Result], str]] = {
        "step, ms": lambda r: str(r.measurement.step),
        "step, of shardstep's": lambda r: f"{r.measurement.step.median / ours.measurement.step.median:.2f}x",
        "gradients sent a device, MB": lambda r: f"{r.traffic.gradients / 1e6:.1f}",
        "gradients, of shardstep's": lambda r: f"{r.traffic.gradients / ours.traffic.gradients:.1f}x",
        "weights sent a device, MB": lambda r: f"{r.traffic.weights / 1e6:.1f}",
        "examples and scalars sent, MB": lambda r: f"{r.traffic.others / 1e6:.1f}",
        "sent a device, MB": lambda r: f"{r.traffic.total / 1e6:.1f}",
        "collectives of each microbatch": lambda r: kinds(r.in_loop),
        "collectives outside the loop": lambda r: kinds(r.outside),
        "arguments a device, MB": lambda r: f"{r.measurement.argument_bytes / 1e6:.1f}",
        "temporaries a device, MB": lambda r: f"{r.measurement.temporary_bytes / 1e6:.1f}",
        "loss at the last step": lambda r: f"{r.measurement.loss:.6f}",
    }
    for name, cell in rows.items():
        made.add_row(name, *(cell(r) for r in found))
    return made


def as_json(base: Result, r: Result) -> dict[str, Any]:
    return {
        **core.as_json(base.measurement, r.measurement),
        "traffic": vars(r.traffic),
        "collectives_in_loop": r.in_loop,
        "collectives_outside": r.outside,
    }


def report(found: Sequence[Result], args: argparse.Namespace) -> dict[str, Any]:
    return {**core.report({}, args), "variants": [as_json(found[0], r) for r in found]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of each square weight (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="weights (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=1, help="a replica and microbatch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each variant (default: %(default)s)")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep", help="see core.py")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.malloc == "keep":
        core.restart_keeping_memory()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    size = Size(args.devices, args.microbatches, args.width, args.layers, args.examples)
    found = measure(size, mesh, args.steps)
    Console(width=None if sys.stdout.isatty() else 140).print(
        table(f"{accumulation(size).name}, {args.devices} replicas; medians (quartiles)", found)
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(found, args), indent=2) + "\n")


if __name__ == "__main__":
    main()
