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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cell import restart_keeping_memory, simulate
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table
from variants import annotated, sharded
from workloads import State, dense

from shardstep._src.tools.hlo import Collective, collectives, counts
from shardstep._src.tools.measuring import Contender, Measured, measure, rows

# --- the workload ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    replicas: int
    microbatches: int
    width: int
    layers: int
    examples: int  # per replica and microbatch

    @property
    def weight_bytes(self) -> int:
        return 4 * self.width**2


def loss(weights: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, target = batch
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - target) ** 2)


@dataclass(frozen=True)
class Accumulation:
    """As much of a workload as the variants here ask for."""

    name: str
    step: Callable[[State, Any], tuple[State, jax.Array]]
    init: Callable[[], State]
    batch: Any


def accumulation(size: Size, split: NamedSharding | None = None) -> Accumulation:
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
        params = [dense(k, size.width, size.width) for k in jax.random.split(jax.random.key(0), size.layers)]
        return State(params, optimizer.init(params))

    rng = np.random.default_rng(0)
    examples = size.replicas * size.microbatches * size.examples
    batch = tuple(rng.standard_normal((examples, size.width), np.float32) for _ in range(2))
    name = f"{size.microbatches} microbatches, {size.layers} weights of width {size.width}"
    return Accumulation(name, step, init, batch)


def contenders(size: Size, mesh: Mesh) -> list[Contender]:
    plain, laid_out = accumulation(size), accumulation(size, NamedSharding(mesh, PartitionSpec(None, "data")))
    return [
        annotated("replicated", weights=False, moments=False)(plain, mesh),
        annotated("annotated", weights=False, moments=False)(laid_out, mesh),
        sharded("shardstep", "replicated")(plain, mesh),
    ]


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
    measured: Measured
    traffic: Traffic
    in_loop: dict[str, int]
    outside: dict[str, int]


def run(size: Size, mesh: Mesh, steps: int) -> list[Result]:
    made = contenders(size, mesh)
    found = measure(made, steps)
    return [result(m, collectives(c.lower().compile().as_text()), size) for c, m in zip(made, found, strict=True)]


def result(measured: Measured, found: Sequence[Collective], size: Size) -> Result:
    inside = counts(c for c in found if c.in_loop)
    outside = counts(c for c in found if not c.in_loop)
    return Result(measured, Traffic.of(found, size), inside, outside)


# --- reporting ------------------------------------------------------------------------------------------------------


def table(title: str, found: Sequence[Result]) -> Table:
    made = Table(title=title)
    for name in ("", *(r.measured.contender for r in found)):
        made.add_column(name, justify="right" if name else "left")
    ours = found[-1]

    def kinds(counts: dict[str, int]) -> str:
        return "\n".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"

    rows: dict[str, Callable[[Result], str]] = {
        "step, ms": lambda r: str(r.measured.step),
        "step, of shardstep's": lambda r: f"{r.measured.step.median / ours.measured.step.median:.2f}x",
        "gradients sent a device, MB": lambda r: f"{r.traffic.gradients / 1e6:.1f}",
        "gradients, of shardstep's": lambda r: f"{r.traffic.gradients / ours.traffic.gradients:.1f}x",
        "weights sent a device, MB": lambda r: f"{r.traffic.weights / 1e6:.1f}",
        "examples and scalars sent, MB": lambda r: f"{r.traffic.others / 1e6:.1f}",
        "sent a device, MB": lambda r: f"{r.traffic.total / 1e6:.1f}",
        "collectives of each microbatch": lambda r: kinds(r.in_loop),
        "collectives outside the loop": lambda r: kinds(r.outside),
        "arguments a device, MB": lambda r: f"{r.measured.compiled.arg_bytes / 1e6:.1f}",
        "temporaries a device, MB": lambda r: f"{r.measured.compiled.temp_bytes / 1e6:.1f}",
        "loss at the last step": lambda r: f"{r.measured.losses[-1]:.6f}",
    }
    for name, cell in rows.items():
        made.add_row(name, *(cell(r) for r in found))
    return made


def report(found: Sequence[Result], size: Size) -> list[dict[str, Any]]:
    """Rows of the suite's schema; what is sent counts the loop's collectives once per microbatch."""
    made = rows([r.measured for r in found], f"accumulation over {size.microbatches}", "adam", size.replicas)
    more = (
        {
            "wire_bytes": r.traffic.total,
            "traffic": vars(r.traffic),
            "collectives_in_loop": r.in_loop,
            "collectives_outside": r.outside,
        }
        for r in found
    )
    return [{**row, **extra} for row, extra in zip(made, more, strict=True)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="simulated CPU devices (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of each square weight (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="weights (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=1, help="per replica and microbatch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each variant (default: %(default)s)")
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep", help="see cell.py")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.malloc == "keep":
        restart_keeping_memory()
    mesh = simulate(args.devices)
    size = Size(args.devices, args.microbatches, args.width, args.layers, args.examples)
    found = run(size, mesh, args.steps)
    Console(width=None if sys.stdout.isatty() else 140).print(
        table(f"{accumulation(size).name}, {args.devices} replicas; medians (quartiles)", found)
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(found, size), indent=2) + "\n")


if __name__ == "__main__":
    main()
