"""Random training steps, where they run, and what the plain step says they should return.

`write(choices, kind)` writes a step in the language of grammar.py: any new state (`"state"`), gradients and an update
by hand (`"training"`), one of Optax's optimizers (`"optimizer"`), or a step per replica (`"replica"`).
`disagreements(program)` runs it plain and sharded and lists what differs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grammar
import jax
import jax.numpy as jnp
import numpy as np
import optax
from choices import Choices, Drawn, Skip
from grammar import CALLS, NAMESPACE, NUMBERS, Dialect, Line, Value, Writer, indent, is_complex, is_float, names_in
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardstep

KINDS = ("training", "state", "optimizer", "replica")
LINES = 8  # of a step, at most
STEPS = 2  # the second runs on the state of the first, in the layout it rests in
TOLERANCE, TOLERANCE_HALF = 1e-4, 0.06  # of a leaf's largest value, or of SMALL where that is larger
SMALL = 0.25
ROUNDING = 1e-6  # a relative change of the weights that rounding errors may amount to

# Large epsilons: Adam would scale the rounding of tiny gradients up to full size.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1, eps=0.1),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), eps=0.1),
    "amsgrad": lambda: optax.amsgrad(0.1, eps=0.1),
    "adabelief": lambda: optax.adabelief(0.1, eps=0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, eps=1e-2),
    "adagrad": lambda: optax.adagrad(0.1, eps=0.1),
    "adan": lambda: optax.adan(0.1, eps=0.1),
    "lamb": lambda: optax.lamb(0.1, eps=0.1),
    "lars": lambda: optax.lars(0.1, eps=0.1),
    "nadam": lambda: optax.nadam(0.1, eps=0.1),
    "novograd": lambda: optax.novograd(0.1, eps=0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, eps=0.1, centered=True, momentum=0.5),
    "yogi": lambda: optax.yogi(0.1, eps=0.1),
    "muon": lambda: optax.contrib.muon(0.1, eps=0.1),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1, eps=0.1)),
    "clipped by unit": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1, momentum=0.9)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.1, eps=0.1), 3),
    "every other step": lambda: optax.MultiSteps(optax.adam(0.1, eps=0.1), 2).gradient_transformation(),
    "averaged": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1, eps=0.1),
    "trust ratio": lambda: optax.chain(optax.trace(0.9), optax.scale_by_trust_ratio(eps=0.1), optax.scale(-0.1)),
    "matrices and vectors": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1, eps=0.1), "vector": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params),
    ),
}


# -- where it runs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The mesh, and what `shard` is asked for."""

    mesh: tuple[int, ...]
    explicit: bool = False
    group: int | None = None
    topology: str | None = None
    weights: str = "replicated"
    min_shard_bytes: int = 64
    bucket_bytes: int | None = None

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh)

    @property
    def options(self) -> shardstep.Options:
        return shardstep.Options(
            min_shard_bytes=self.min_shard_bytes,
            bucket_bytes=self.bucket_bytes,
            topology=self.topology,
            engine="rewrite",
        )


MESHES = [(8,), (2,), (3,), (8,), (2, 4), (5,), (2, 3), (4, 2), (8,), (2, 2, 2), (4,), (1,)]
TOPOLOGIES = {8: ["v5e:2x4", "v5e:4x2", "v4:2x2x2", "h200:2x4", "v3:2x2"], 4: ["v5e:2x2", "v6e:4x1"]}


def setting(choices: Choices) -> Setting:
    mesh = choices.one_of(MESHES)
    n = math.prod(mesh)
    group, topology = None, None
    if n in TOPOLOGIES and len(mesh) == 1 and choices.below(3) == 2:
        topology = choices.one_of(TOPOLOGIES[n])
    elif n == 8 and len(mesh) == 1:
        group = choices.one_of([None, None, 2, 4])
    return Setting(
        mesh,
        choices.below(8) == 7,
        group,
        topology,
        choices.one_of(["replicated", "sharded", "auto"]),
        choices.one_of([64, 0]),
        choices.one_of([None, None, 0]),
    )


@functools.cache
def mesh_of(shape: tuple[int, ...], explicit: bool = False) -> Mesh:
    names = ("data",) if len(shape) == 1 else tuple("abc"[: len(shape)])
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(shape)
    return Mesh(np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape), names, axis_types=kinds)


# -- programs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A training step `step(state, x, z) -> state, metrics` and the arguments to call it with."""

    setting: Setting
    dialect: Dialect
    state: tuple[Value, ...]
    typed_key: bool
    batch: tuple[Value, ...]
    batch_axes: tuple[int, ...]
    optimizer: str
    source: str

    def __repr__(self) -> str:
        leaves = ", ".join(f"{v}: {v.dtype}{list(v.shape)}" for v in (*self.state, *self.batch))
        words = [str(self.setting), leaves, f"examples on {self.batch_axes}", self.optimizer, self.dialect.axis_name]
        return f"\n# {'; '.join(filter(None, words))}\n{self.source}"

    @property
    def rounds(self) -> bool:
        """Does something have fewer bits than float32?"""
        return any(half in repr(self) for half in ("bf16", "f16"))

    def step(self) -> Callable[..., Any]:
        namespace = dict(NAMESPACE)
        if self.optimizer:
            namespace["optimizer"] = OPTIMIZERS[self.optimizer]()
        exec(compile(self.source, "<program>", "exec"), namespace)
        return namespace["step"]

    def arguments(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        key = jax.random.key(7) if self.typed_key else np.asarray(jax.random.PRNGKey(7))
        state: dict[str, Any] = {v.name: data(rng, v) for v in self.state} | {"key": key}
        if self.dialect.numbers:
            state |= NUMBERS
        if self.optimizer:
            weights = {name: jnp.asarray(x) for name, x in state.items() if name.startswith("w")}
            state["opt"] = jax.tree.map(np.asarray, OPTIMIZERS[self.optimizer]().init(weights))
        return state, *(data(rng, v) for v in map(self.whole, self.batch))

    def whole(self, v: Value) -> Value:
        """The examples of all replicas."""
        n = self.dialect.n if self.dialect.axis_name else 1
        return dataclasses.replace(v, shape=(v.shape[0] * n, *v.shape[1:]))

    def plain(self) -> Callable[..., Any]:
        """What the step means without shardstep."""
        if self.dialect.axis_name:
            return per_replica(self.step(), self.dialect)
        return with_numbers(self.step())

    def sharded(self) -> Callable[..., Any]:
        return shardstep.shard(
            self.step(),
            mesh_of(self.setting.mesh, self.setting.explicit),
            batch_argnums=(1, 2),
            batch_axis=self.batch_axes,
            axis_name=self.dialect.axis_name or None,
            weights=self.setting.weights,
            group=self.setting.group,
            options=self.setting.options,
        )


def data(rng: np.random.Generator, v: Value) -> np.ndarray:
    if grammar.is_int(v):
        values = rng.integers(0, int(v.scale) + 1, v.shape)
    elif v.exact:
        values = rng.integers(-16, 17, v.shape) / 8
    else:
        values = rng.normal(size=v.shape) + (1j * rng.normal(size=v.shape) if is_complex(v) else 0)
    return np.asarray(values, grammar.DTYPES[v.dtype])


def with_numbers(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step under `jit`, with the Python numbers of its state as constants, as `eqx.filter_jit` has it."""

    def run(state: dict[str, Any], *batch: Any) -> Any:
        numbers = {k: v for k, v in state.items() if isinstance(v, int | float)}
        arrays = {k: v for k, v in state.items() if k not in numbers}
        back: dict[str, Any] = {}

        def traced(arrays: dict[str, Any], *batch: Any) -> Any:
            state, metrics = step(arrays | numbers, *batch)
            back.update({k: v for k, v in state.items() if isinstance(v, int | float)})
            return {k: v for k, v in state.items() if k not in back}, metrics

        key = tuple(sorted(numbers.items()))
        if key not in compiled:
            compiled[key] = jax.jit(traced), back
        jitted, kept = compiled[key]
        state, metrics = jitted(arrays, *batch)
        return state | kept, metrics

    compiled: dict[Any, Any] = {}
    return run


def per_replica(step: Callable[..., Any], dialect: Dialect) -> Callable[..., Any]:
    """As `pmap` has it: the state is everyone's, metrics come side by side."""
    mesh = Mesh(np.asarray(jax.devices()[: dialect.n]), (dialect.axis_name,))
    mine = PartitionSpec(dialect.axis_name)

    def run(state: Any, *batch: Any) -> Any:
        state, metrics = step(state, *batch)
        return state, jax.tree.map(lambda x: x[None], metrics)

    specs = (PartitionSpec(), mine, mine)
    step_of_all = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), mine), check_vma=False)
    )
    # Placed as the step returns its state, which would otherwise be compiled for once more.
    return lambda *arguments: step_of_all(*jax.device_put(arguments, tuple(NamedSharding(mesh, s) for s in specs)))


# -- writing a step -----------------------------------------------------------------------------------------------


@st.composite
def programs(draw, kind: str) -> Program:
    return write(Drawn(draw), kind)


def write(choices: Choices, kind: str) -> Program:
    """A step of this kind, for a setting of its own."""
    where = setting(choices)
    n = where.replicas
    rare = choices.below(10)
    dialect = Dialect(
        n,
        half={8: "bf16", 9: "f16"}.get(rare, ""),
        complexes=rare == 7 and kind != "replica",  # XLA dies of the plain step's complex sums over replicas
        small=rare == 6,
        empty=rare == 5,
        numbers=kind != "replica" and choices.below(5) == 4,
        calls=choices.below(6) == 5,
        axis_name="data" if kind == "replica" else "",
        own_keys=kind == "replica" and choices.coin(),
    )
    even = n * choices.between(1, 3 if n < 5 else 2)
    examples = choices.one_of([even] * 4 + [1, n + 1, max(n - 1, 1), 13])
    if kind == "replica":
        examples = choices.between(1, 3)
    return _Step(choices, where, dialect, examples).write(kind)


class _Step:
    """A step being written."""

    def __init__(self, choices: Choices, where: Setting, dialect: Dialect, examples: int):
        self.choices, self.where, self.dialect, self.examples = choices, where, dialect, examples
        n = dialect.n
        sizes = [1, 2, 3, 4, n, 2 * n, examples]
        self.dims = [choices.one_of(sizes) for _ in range(choices.between(2, 3))] + [0] * dialect.empty
        self.floats = ["f32", "f32", dialect.half or "f32"]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.choices.one_of(self.dims) for _ in range(self.choices.between(1, 3)))

    def leaf(self, name: str, shape: tuple[int, ...], floats: Sequence[str]) -> Value:
        return Value(name, shape, self.choices.one_of(floats), 2.0, None, frozenset([name]))

    def batch(self) -> tuple[Value, Value, int]:
        choices = self.choices
        features = [choices.one_of(self.dims) for _ in range(choices.between(1, 4))]
        axis = 0 if self.dialect.axis_name else choices.one_of([0, 0, 0, 1])
        z_shape = (choices.one_of(self.dims), self.examples) if axis else (self.examples, *features[2:])
        x = Value("x", (self.examples, *features[:2]), choices.one_of(self.floats), 2.0, 3, frozenset("x"))
        kinds = [("i32", 4.0, 0), ("f32", 2.0, 3)] + [("u8", 4.0, 0), ("i8", 4.0, 0)] * self.dialect.small
        dtype, scale, grain = choices.one_of(kinds)
        return x, Value("z", z_shape, dtype, scale, grain, frozenset("z")), axis

    def write(self, kind: str) -> Program:
        choices, dialect = self.choices, self.dialect
        some = self.floats + ["c64"] * dialect.complexes
        weights = [self.leaf(f"w{i}", self.shape(), some) for i in range(choices.between(1, 3))]
        shapes = [w.shape for w in weights]
        moments = [
            self.leaf(f"m{i}", choices.one_of([*shapes, self.shape()]), some) for i in range(choices.between(0, 2))
        ]
        count = Value("count", (), "i32", 7.0, 0, frozenset(["count"]))
        state = (*weights, *moments, count)
        x, z, axis = self.batch()
        w = Writer(choices, (*moments, count, z, *weights, x), dialect)
        lines = [f'{v} = state["{v}"]' for v in (*state, "key", *(NUMBERS if dialect.numbers else ()))]
        if dialect.own_keys:
            lines.append(f'key = jax.random.fold_in(key, lax.axis_index("{dialect.axis_name}"))')
        optimizer = choices.one_of(OPTIMIZERS) if kind == "optimizer" else ""
        if kind != "state":
            w.write(choices.between(0, 2))
            _loss(w, weights)
        w.write(choices.between(3, LINES) if kind == "state" else choices.between(0 if optimizer else 1, 4))
        returned = _returned(w, state, weights if optimizer else ())
        lines += [line.code for line in grammar.needed(w.lines, returned) if line.code] + [returned]
        source = "def step(state, x, z):\n" + indent("\n".join(lines))
        return Program(self.where, dialect, state, choices.coin(), (x, z), (0, axis), optimizer, source)


def meet(w: Writer, weight: Value) -> None:
    """A layer: some value that depends on the examples, and the weight."""
    h = w.pick(lambda v: is_float(v) and bool(v.roots & grammar.EXAMPLES))
    pairs = [(i, j) for i in range(h.ndim) for j in range(weight.ndim) if h.shape[i] == weight.shape[j]]
    forms = [(f"jnp.tensordot({h}, {weight}, ({i}, {j}))", h.shape[i]) for i, j in pairs]
    if grammar._broadcast(h.shape, weight.shape) is not None:
        forms += [(f"{h} * {weight}", 1), (f"{h} + {weight}", 1)]
    forms += _scanned(w, h, weight)
    code, terms = w.one_of(forms or [(f"{h} * jnp.mean({weight})", 1)])
    real = "jnp.real({})" if is_complex(weight) else "{}"
    try:
        w.line(real.format(code), max(h.scale, 1.0) * weight.scale * math.sqrt(terms))
    except Skip:  # too large
        w.line(real.format(f"{h} * jnp.mean({weight})"), h.scale * weight.scale)


def _scanned(w: Writer, h: Value, weight: Value) -> list[tuple[str, int]]:
    """Layers that are stacked in one weight, and scanned: [layers, m] or [layers, m, n] on a dimension of size m."""
    if weight.ndim < 2 or is_complex(weight) or is_complex(h):
        return []
    bodies = []
    for i in (i for i in range(h.ndim) if h.shape[i] == weight.shape[1]):
        if weight.ndim == 2:
            bodies.append(f"hidden * layer.reshape({(weight.shape[1],) + (1,) * (h.ndim - i - 1)})")
        else:  # there and back, so that the carry keeps its shape
            there = f"jnp.tensordot(hidden, layer, ({i}, 0))"
            bodies.append(f"jnp.moveaxis(jnp.tensordot({there}, layer, (-1, 1)), -1, {i})")
    wrap, unroll = w.one_of(["", "jax.checkpoint"]), w.one_of([1, 1, 2])
    return [
        (
            f"lax.scan({wrap}(lambda hidden, layer: ((hidden + jnp.tanh({body})).astype(hidden.dtype), None)),"
            f" {h}, {weight}, unroll={unroll})[0]",
            max(weight.shape[0], 1) ** 2,
        )
        for body in bodies
    ]


def _loss(w: Writer, weights: Sequence[Value]) -> None:
    """Gradients of a loss: the mean of what a random network makes of the examples."""
    inner = Writer(w.choices, weights, w.dialect, smooth=True, outer=w)
    for weight in weights:
        meet(inner, weight)
        inner.write(w.between(0, 3))
    floats = [v for v in inner.values[::-1] if is_float(v) and v.size] or [v for v in inner.visible() if is_float(v)]
    useful = sorted(floats, key=lambda v: -len(v.roots))
    terms = [
        f"jnp.mean({form.format(v)}).astype(f32)"
        for v in useful[: w.between(1, 2)]
        for form in [w.one_of(["jnp.square({})", "jnp.cos({})"])]
    ]
    aux = w.one_of(inner.values[::-1])
    result = f"{' + '.join(terms)}, {aux}"
    body = [line.code for line in grammar.needed(inner.lines, result)] + [f"return {result}"]
    names = ", ".join(map(str, weights))
    code = f"def loss({names}):\n" + indent("\n".join(body))
    gradients = [dataclasses.replace(v, name=f"g{i}", scale=1.0) for i, v in enumerate(weights)]
    code += (
        f"\n(value, aux), ({''.join(f'{g}, ' for g in gradients)}) = "
        f"jax.value_and_grad(loss, {tuple(range(len(weights)))}, has_aux=True)({names})"
    )
    roots = frozenset().union(*(v.roots for v in w.visible()))
    uses = names_in(code)
    found = [dataclasses.replace(aux, name="aux"), Value("value", (), "f32"), *gradients]
    if w.dialect.axis_name:
        code += "".join(f'\n{g} = lax.pmean({g}, "{w.dialect.axis_name}")' for g in gradients)
    w.lines += [Line(v.name, code if i == 0 else "", uses | {"aux"} - {v.name}) for i, v in enumerate(found)]
    for v in found:
        reduced = w.dialect.axis_name and v in gradients
        w.values.append(dataclasses.replace(v, roots=frozenset() if reduced else roots))


def _returned(w: Writer, state: Sequence[Value], trained: Sequence[Value]) -> str:
    """The new state, and as metrics whatever is not read by anything: every line counts."""
    shared = (lambda v: not grammar.varies(v)) if w.dialect.axis_name else (lambda v: True)
    leaves = {v.name: w.next_of(v, shared) for v in state if v not in trained}
    if trained:
        names = {v.name: v.name for v in trained}
        gradients = {v.name: f"g{i}" for i, v in enumerate(trained)}
        code = (
            f"updates, opt = optimizer.update({_dict(gradients)}, state['opt'], {_dict(names)})\n"
            f"trained = optax.apply_updates({_dict(names)}, updates)"
        )
        w.lines += [Line("trained", code, names_in(code)), Line("opt", "", names_in(code) | {"trained"})]
        leaves |= {v.name: f'trained["{v}"]' for v in trained} | {"opt": "opt"}
    leaves["key"] = 'state["key"]' if w.dialect.own_keys else w.one_of(["key", "jax.random.fold_in(key, 1)"])
    if w.dialect.numbers:  # `hp` as a step has it that trains whatever is an array
        leaves |= {"hp": "hp - 0.25 if isinstance(hp, jax.Array) else hp", "size": "size", "tick": "tick + 1"}
    read = frozenset().union(*(line.uses for line in w.lines), *map(names_in, leaves.values()))
    metrics = {line.name: line.name for line in w.lines if line.name not in read and not line.is_function}
    return f"return {_dict(leaves)}, {_dict(metrics)}"


def _dict(entries: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{k}": {v}' for k, v in entries.items()) + "}"


# -- comparing ----------------------------------------------------------------------------------------------------


class Unwritable(Exception):
    """JAX itself cannot run this step."""


def disagreements(program: Program) -> dict[str, float]:
    """What the sharded step returns or tells the host that the plain step does not, and how far it is off."""
    arguments = program.arguments()
    plain = program.plain()
    try:
        expected, calls = run(plain, *arguments)
    except Exception as error:
        raise Unwritable(f"{type(error).__name__}: {error}") from error
    found, made = run(program.sharded(), *arguments)
    off = differences(expected, found, program.dialect.axis_name)
    tolerance = TOLERANCE_HALF if program.rounds else TOLERANCE
    wrong = {where: by for where, by in off.items() if not by <= tolerance}
    if wrong and ill_conditioned(program, plain, expected, wrong):
        wrong = {}
    if called(calls, program) != called(made, program):
        wrong["calls of the host"] = math.inf
    return wrong


def run(step: Callable[..., Any], state: Any, *batch: Any) -> tuple[list[Any], list[Any]]:
    """The state and metrics of every step, and the calls made."""
    CALLS.clear()
    outputs = []
    for _ in range(STEPS):
        state, metrics = step(state, *batch)
        outputs.append(jax.tree.map(to_numpy, (state, metrics)))
    jax.effects_barrier()
    return outputs, list(CALLS)


def to_numpy(x: Any) -> np.ndarray:
    x = jnp.asarray(x) if isinstance(x, int | float) else x
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def called(calls: Sequence[tuple[int, np.ndarray]], program: Program) -> collections.Counter:
    """How often the host was told what; of values that were rounded, only the shape is sure.

    In a step per replica, what is everyone's is told once by us and by everyone under `pmap`.
    """
    counted = collections.Counter(
        (label, x.shape, str(x.dtype), x.tobytes() if not jnp.issubdtype(x.dtype, jnp.inexact) else b"")
        for label, x in calls
    )
    return collections.Counter(counted.keys()) if program.dialect.axis_name else counted


def differences(expected: Any, found: Any, axis_name: str = "") -> dict[str, float]:
    """How far every leaf is off; infinitely, if it is no float and not exactly equal."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    pairs = list(zip(leaves, jax.tree.leaves(found), strict=True))
    compare = distance_per_replica if axis_name else lambda path, a, b: distance(a, b)
    return {jax.tree_util.keystr(path): compare(path, a, b) for (path, a), b in pairs}


def distance_per_replica(path: Sequence[Any], a: np.ndarray, b: np.ndarray) -> float:
    """A metric comes back side by side, or once if it is everyone's."""
    if path[1].idx == 0:  # state
        return distance(a, b)
    shared = max(distance(one, b) for one in a)
    side_by_side = a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) if a.ndim > 1 else a
    return min(shared, distance(side_by_side, b))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return np.inf
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else np.inf
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    undefined = np.isnan(a)  # the mean of nothing, say: XLA's own functions differ in what they make of it
    gap = np.where((a == b) | undefined, 0.0, np.abs(a - b))
    a = a[~undefined]
    return float(np.max(gap, initial=0.0) / max(np.max(np.abs(a), initial=0.0), SMALL))


def ill_conditioned(program: Program, plain: Callable[..., Any], expected: Any, wrong: dict[str, float]) -> bool:
    """Is the plain step itself off by as much, when its weights differ by a rounding error?

    The grammar keeps clear of jumps and of growing errors, but a sum may come to lie on a kink by accident.
    """
    state, *batch = program.arguments()
    unclear = dict.fromkeys(wrong, 0.0)
    for seed in range(8):
        moved = {name: perturbed(x, seed) for name, x in state.items()}
        off = differences(expected, run(plain, moved, *batch)[0], program.dialect.axis_name)
        unclear = {where: max(unclear[where], off[where]) for where in wrong}
    return all(np.isfinite(off) and off <= 10 * unclear[where] for where, off in wrong.items())


def perturbed(x: Any, seed: int) -> Any:
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        return x
    noise = np.random.default_rng(seed).normal(size=x.shape)
    return (x * (1 + ROUNDING * noise)).astype(x.dtype)
