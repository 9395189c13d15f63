"""What the TPU compiler makes of a step: no TPU needed, `libtpu` compiles ahead of time.

    python benchmarks/tpu_aot.py                                     # the small program on all topologies
    python benchmarks/tpu_aot.py --workload transformer resnet50 --topology v5e:4x4 --json out.json
    python benchmarks/tpu_aot.py --workload scanned --topology v5e:4x4 v5p:4x4x4 --optimizer adam \\
        --variant replicated fsdp "weights sharded" --json benchmarks/results/tpu_scanned.json
    python benchmarks/tpu_aot.py --summary                           # which goals the measured rows meet

For each topology, workload and optimizer, four programs: replicated, hand-annotated ZeRO-1 (a NamedSharding on the
moments), shardstep with replicated and with sharded weights. From the compiled HLO:

  all-reduces     those of 1 MB and more: gradients that were not scattered
  wire            bytes that a replica sends in a step (ring algorithms)
  cycles          the compiler's own estimate, in thousands; it does not count collectives. Split into the weight update
                  (what the optimizer's lines became), copies (also transposes, slices, pads and converts that stand
                  alone) and the rest
  memory          arguments and temporaries, and the compiler's peak
  predicted       what shardstep's cost model says collectives take, in microseconds

"matrices" is the program for comparing the closed original: four weights of 2048 x 2048, 16 examples per replica.
`--variant original` compiles that, for "matrices" and "masters" (replica_mode.py): one iteration of its training loop.
libtpu serves one process at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask about
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import replica_mode
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recorded import RESULTS, stamp
from rich.console import Console
from rich.table import Table
from tpu_goals import indexed, summary

import shardstep
from shardstep._src.machine.topology import Topology, collective_time, describe
from shardstep._src.tools.hlo import Collective, collectives, counts, instructions, wire_bytes

TOPOLOGIES = ("v3:4x4", "v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v6e:4x4")
OPTIMIZERS = {"adam": optax.adam(1e-3), "momentum": optax.sgd(1e-3, momentum=0.9), "sgd": optax.sgd(1e-3)}


# --- workloads ------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    params: Any
    statistics: Any  # BatchNorm's
    optimizer: Any


@dataclass(frozen=True)
class Workload:
    """A training step with the shapes of its state and of one global batch. Nothing is allocated."""

    step: Callable[[State, Any], tuple[State, jax.Array]]
    state: State
    batch: Any


def training(loss: Callable, variables: Any, optimizer: optax.GradientTransformation, batch: Any) -> Workload:
    """`loss(params, statistics, batch) -> (value, new statistics)`."""

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state.statistics, batch)
        with jax.named_scope(UPDATE):
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        return State(params, statistics, moments), value

    params, statistics = variables["params"], variables.get("batch_stats", {})
    return Workload(step, State(params, statistics, jax.eval_shape(optimizer.init, params)), batch)


UPDATE = "weight_update"


def matrices(replicas: int, optimizer: optax.GradientTransformation) -> Workload:
    def loss(weights: list[jax.Array], _: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), {}

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((16 * replicas, 2048), jnp.float32)
    return training(loss, {"params": weights}, optimizer, batch)


def masters(replicas: int, optimizer: optax.GradientTransformation) -> Workload:
    """The same with the weights in bfloat16, and float32 masters that only the update reads; float32 gradients."""
    examples = jax.ShapeDtypeStruct((16 * replicas, 2048), jnp.float32)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(jax.tree.map(lambda w: w.astype(jnp.float32), state.params), x)
        masters, moments = state.optimizer
        with jax.named_scope(UPDATE):
            updates, moments = optimizer.update(grads, moments, masters)
            masters = optax.apply_updates(masters, updates)
            weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters)
        return State(weights, {}, (masters, moments)), value

    def of(dtype: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((2048, 2048), dtype)] * 4

    kept = of(jnp.float32)
    return Workload(step, State(of(jnp.bfloat16), {}, (kept, jax.eval_shape(optimizer.init, kept))), examples)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=jnp.bfloat16)
        x = x + attention(nn.LayerNorm(dtype=jnp.bfloat16)(x), mask=mask)
        h = nn.Dense(4 * width, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x))
        return x + nn.Dense(width, dtype=jnp.bfloat16)(nn.gelu(h))


class Transformer(nn.Module):
    width: int = 1024
    layers: int = 4
    vocabulary: int = 32768

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)(tokens)
        for _ in range(self.layers):
            x = Block(self.width // 64)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=jnp.bfloat16)(nn.LayerNorm(dtype=jnp.bfloat16)(x))


def transformer(replicas: int, optimizer: optax.GradientTransformation, length: int = 256) -> Workload:
    """118 million parameters in float32, computed in bfloat16; four sequences per replica."""
    model = Transformer()
    batch = jax.ShapeDtypeStruct((4 * replicas, length + 1), jnp.int32)

    def loss(params: Any, _: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), {}

    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, length), jnp.int32))
    return training(loss, variables, optimizer, batch)


class Bottleneck(nn.Module):
    filters: int
    strides: int

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=jnp.bfloat16)
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), (self.strides, self.strides))(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, (1, 1), (self.strides, self.strides))(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(1000, dtype=jnp.bfloat16)(jnp.mean(x, (1, 2)))


def resnet50(replicas: int, optimizer: optax.GradientTransformation) -> Workload:
    """25.6 million parameters; eight images per replica. BatchNorm sees the whole batch, as the step is written."""
    model = ResNet50()
    images = jax.ShapeDtypeStruct((8 * replicas, 224, 224, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8 * replicas,), jnp.int32)

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": statistics}
        logits, changed = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return jnp.mean(losses), changed["batch_stats"]

    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3), jnp.bfloat16))
    return training(loss, variables, optimizer, {"image": images, "label": labels})


def scanned(replicas: int, optimizer: optax.GradientTransformation) -> Workload:
    """1.3 billion parameters in 24 layers that are stacked and scanned, each under `jax.checkpoint`; f32 weights, bf16
    products; four sequences of 1024 per replica."""
    width, layers, heads, vocabulary, length = 2048, 24, 16, 32000, 1024

    def read(w: jax.Array) -> jax.Array:
        return w.astype(jnp.bfloat16)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        qkv = (norm(x, w["attention_norm"]) @ read(w["qkv"])).reshape(*x.shape[:2], 3, heads, width // heads)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + mixed.reshape(x.shape) @ read(w["out"])
        return x + jax.nn.gelu(norm(x, w["mlp_norm"]) @ read(w["up"])) @ read(w["down"]), None

    def loss(params: Any, _: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        embed = read(params["embed"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), embed[tokens[:, :-1]], params["layers"])
        logits = (norm(x, params["norm"]) @ embed.T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])), {}

    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "attention_norm": (width,),
        "mlp_norm": (width,),
    }
    stack = {name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for name, shape in shapes.items()}
    single = {"embed": (vocabulary, width), "norm": (width,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in single.items()} | {"layers": stack}
    tokens = jax.ShapeDtypeStruct((4 * replicas, length + 1), jnp.int32)
    return training(loss, {"params": params}, optimizer, tokens)


WORKLOADS = {
    "matrices": matrices,
    "masters": masters,
    "transformer": transformer,
    "resnet50": resnet50,
    "scanned": scanned,
}


# --- variants -------------------------------------------------------------------------------------------------------


def replicated(workload: Workload, mesh: Mesh) -> jax.stages.Lowered:
    everywhere, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(
        workload.step, in_shardings=(everywhere, by_example), out_shardings=(everywhere, everywhere), donate_argnums=0
    )
    return step.lower(workload.state, workload.batch)


def zero1(workload: Workload, mesh: Mesh) -> jax.stages.Lowered:
    """By hand: each moment split along its first dimension that the replicas divide."""
    everywhere, by_example = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def split(leaf: Any) -> NamedSharding:
        dim = next((d for d, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
        return everywhere if dim is None else NamedSharding(mesh, PartitionSpec(*[None] * dim, "data"))

    state = jax.tree.map(lambda _: everywhere, workload.state)
    state = state._replace(optimizer=jax.tree.map(split, workload.state.optimizer))
    step = jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step.lower(workload.state, workload.batch)


def fsdp(workload: Workload, mesh: Mesh) -> jax.stages.Lowered:
    """By hand: weights and moments split along a dimension that the replicas divide, of stacked layers another one."""
    by_example = NamedSharding(mesh, PartitionSpec("data"))

    def split(leaf: Any) -> NamedSharding:
        dims = (*range(1, len(leaf.shape)), *range(min(len(leaf.shape), 1)))
        dim = next((d for d in dims if leaf.shape[d] % mesh.size == 0), None)
        return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data"))

    state, everywhere = jax.tree.map(split, workload.state), NamedSharding(mesh, PartitionSpec())
    step = jax.jit(workload.step, in_shardings=(state, by_example), out_shardings=(state, everywhere), donate_argnums=0)
    return step.lower(workload.state, workload.batch)


def ours(weights: str, workload: Workload, mesh: Mesh) -> jax.stages.Lowered:
    step = shardstep.shard(workload.step, mesh, batch_argnums=1, weights=weights)
    return step.lower(workload.state, workload.batch)


VARIANTS: dict[str, Callable[[Workload, Mesh], jax.stages.Lowered]] = {
    "replicated": replicated,
    "zero1": zero1,
    "fsdp": fsdp,
    "weights replicated": functools.partial(ours, "replicated"),
    "weights sharded": functools.partial(ours, "sharded"),
}


ORIGINAL = "original"
OF_THE_ORIGINAL = ("matrices", "masters")  # their losses do not mix examples: summing gradients is enough


def summed(replicas: int) -> optax.GradientTransformation:
    """The mean of all replicas' gradients, in a program for one replica."""

    def everyone(x: jax.Array) -> jax.Array:
        return replica_mode.sum_over_replicas(x, replicas) / replicas

    return optax.stateless(lambda grads, _: jax.tree.map(everyone, grads))


def original(workload: str, optimizer: str, devices: list[Any]) -> tuple[str, Any]:
    """What the closed original makes of one iteration of a training loop, and the memory of the whole loop."""
    n = len(devices)
    job = WORKLOADS[workload](1, optax.chain(summed(n), OPTIMIZERS[optimizer]))
    loop = replica_mode.training_loop(lambda state, batch: job.step(state, batch)[0], job.state, job.batch, n)
    program = replica_mode.compiled(loop, devices)
    return program.body, program.memory


# --- reading the compiled program -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    topology: str
    workload: str
    optimizer: str
    variant: str
    replicas: int
    large_all_reduces: int
    counts: dict[str, int]
    wire_mb: float
    cycles_update: float  # thousands
    cycles_copies: float
    cycles_rest: float
    arguments_mb: float
    temporaries_mb: float
    peak_mb: float
    predicted_us: float
    compile_s: float
    commit: str
    code: str | None  # none: measured before rows had it
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]

    @property
    def cycles(self) -> float:
        return self.cycles_update + self.cycles_copies + self.cycles_rest


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1  # what the compiler says of work on the SparseCores, a lookup on v5p for one
_MOVING = (
    "copy|transpose|slice|dynamic-slice|dynamic-update-slice|pad|concatenate|convert_element_type|convert|reshape|"
    "bitcast-convert|bitcast|constant|or"  # `or`, of a constant and a bitcast: how in_place.py writes a weight
)
_FORMATTING = re.compile(rf"^(?:ROOT )?%?(?:{_MOVING})(?:_(?:{_MOVING}))*(?:_fusion|-done|-start)?(?:\.[\w.]+)? = ")


def cycles(text: str) -> tuple[float, float, float]:
    """The compiler's estimate in thousands of cycles: update, copies, rest. Loops count as often as they turn."""
    update = copies = rest = 0
    for line, times in instructions(text):
        if (found := _CYCLES.search(line)) and int(found[1]) != _UNKNOWN:
            spent = times * int(found[1])
            if _FORMATTING.match(line):
                copies += spent
            elif f"/{UPDATE}/" in line:
                update += spent
            else:
                rest += spent
    return update / 1e3, copies / 1e3, rest / 1e3


def read(text: str, memory: Any, seconds: float, **what: Any) -> Row:
    found = collectives(text)
    update, copies, rest = cycles(text)
    return Row(
        **what,
        large_all_reduces=sum(c.kind == "all-reduce" and c.bytes >= 1e6 for c in found),
        counts=counts(found),
        wire_mb=wire_bytes(found) / 1e6,
        cycles_update=update,
        cycles_copies=copies,
        cycles_rest=rest,
        arguments_mb=memory.argument_size_in_bytes / 1e6,
        temporaries_mb=memory.temp_size_in_bytes / 1e6,
        peak_mb=getattr(memory, "peak_memory_in_bytes", 0) / 1e6,
        predicted_us=predicted(found, describe(what["topology"])) * 1e6,
        compile_s=seconds,
        **stamp("tpu_aot"),
    )


def predicted(found: Iterable[Collective], machine: Topology) -> float:
    """Seconds that these collectives take one after the other, by the model of links."""
    by_size = {ring.size: ring for ring in machine.rings}

    def seconds(c: Collective) -> float:
        if c.group == machine.replicas:
            return machine.time(c.kind, c.bytes)
        return collective_time(c.kind, c.bytes, by_size[c.group]) if c.group in by_size else 0.0

    return sum(c.times * seconds(c) for c in found)


def compile_one(topology: str, workload: str, optimizer: str, variant: str) -> tuple[Row, str]:
    devices = sorted(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices, key=lambda d: d.id)
    start = time.perf_counter()
    if variant == ORIGINAL:
        text, memory = original(workload, optimizer, devices)
    else:
        mesh = Mesh(np.array(devices), ("data",))  # what a user has: one axis, devices by id
        job = WORKLOADS[workload](mesh.size, OPTIMIZERS[optimizer])
        compiled = VARIANTS[variant](job, mesh).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
    seconds = time.perf_counter() - start
    what = dict(topology=topology, workload=workload, optimizer=optimizer, variant=variant, replicas=len(devices))
    return read(text, memory, seconds, **what), text


# --- showing --------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> Table:
    shown = Table(title="thousands of estimated cycles (collectives not counted), MB per replica")
    for name in ("topology", "workload", "optimizer", "program"):
        shown.add_column(name)
    for name in ("AR >= 1 MB", "wire", "update", "copies", "rest", "total", "arguments", "temporaries", "peak"):
        shown.add_column(name, justify="right")
    last = None
    for row in rows:
        head = (row.topology, row.workload, row.optimizer)
        shown.add_row(
            *(head if head != last else ("", "", "")),
            row.variant,
            str(row.large_all_reduces),
            f"{row.wire_mb:.0f}",
            *(f"{c:.0f}" for c in (row.cycles_update, row.cycles_copies, row.cycles_rest, row.cycles)),
            *(f"{mb:.0f}" for mb in (row.arguments_mb, row.temporaries_mb, row.peak_mb)),
        )
        last = head
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["matrices"])
    parser.add_argument("--topology", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["adam", "momentum"])
    usual = [variant for variant in VARIANTS if variant != "fsdp"]
    parser.add_argument("--variant", nargs="+", choices=(*VARIANTS, ORIGINAL), default=usual)
    parser.add_argument("--json", type=Path, default=RESULTS / "tpu_aot.json", help="rows are added to this file")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled programs")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], help="add the rows of these files first")
    parser.add_argument("--summary", action="store_true", help="compile nothing; say which goals are met")
    args = parser.parse_args()
    known = json.loads(args.json.read_text()) if args.json.exists() else []
    known += [row for path in args.merge for row in json.loads(path.read_text())]
    rows = {_key(row): row for row in (Row(**{"code": None, **row}) for row in known)}
    if args.merge:
        save(args.json, rows)
    if args.summary:
        print(summary(indexed(asdict(row) for row in rows.values())))
    if args.merge or args.summary:
        return
    todo = [(t, w, o, v) for w in args.workload for t in args.topology for o in args.optimizer for v in args.variant]
    todo = [one for one in todo if one[3] != ORIGINAL or one[1] in OF_THE_ORIGINAL]
    for one in todo:
        row, text = compile_one(*one)
        rows[one] = row
        print(*one, f"{row.cycles:.0f}k cycles, {row.compile_s:.0f} s to compile", flush=True)
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{'-'.join(one).replace(':', '_').replace(' ', '_')}.txt").write_text(text)
        save(args.json, rows)
    Console(width=150).print(table([rows[one] for one in todo]))


def _key(row: Row) -> tuple[str, str, str, str]:
    return row.topology, row.workload, row.optimizer, row.variant


def save(path: Path, rows: dict[Any, Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    by_place = sorted(rows.values(), key=_place)
    path.write_text(json.dumps([asdict(row) for row in by_place], indent=1) + "\n")


def _place(row: Row) -> tuple[int, ...]:
    """Rows stand in the order of the tables above, however they were measured."""
    tables = (WORKLOADS, TOPOLOGIES, OPTIMIZERS, (ORIGINAL, *VARIANTS))
    return tuple(
        list(t).index(k) if k in t else len(t)
        for t, k in zip(tables, (row.workload, row.topology, row.optimizer, row.variant), strict=True)
    )


if __name__ == "__main__":
    main()
