"""What is trained: a loss, how the weights begin, and one global batch.

Each workload is a function of the number of replicas, which share its batch evenly. On CPU the batches are small: two
cores stand for all the replicas, and a real batch would hide the update that is measured here. `transformer-compute`
has a larger one on purpose. Whether a workload is bound by its update or by its compute is measured, not declared (see
goals.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optimization import OPTIMIZERS


class State(NamedTuple):
    params: Any
    optimizer: Any
    statistics: Any = ()  # BatchNorm's


Loss = Callable[
    [Any, Any, Any, str | None], tuple[jax.Array, Any]
]  # params, statistics, batch, axis -> loss, statistics


@dataclass(frozen=True)
class Workload:
    """`loss` is per replica where an axis is named: statistics are then taken over that axis too."""

    name: str
    optimizer: str
    loss: Loss
    create: Callable[[jax.Array], tuple[Any, Any]]  # key -> params, statistics
    batch: Any
    microbatches: int = 1
    # (params, batch, read) -> loss, where a scan reads weights layer by layer: `read(name, w)` makes of a weight what a
    # product takes, bfloat16, and gathers it where that is done by hand
    layered: Callable[[Any, Any, Callable[[str, jax.Array], jax.Array]], jax.Array] | None = None

    def step(self, state: State, batch: Any) -> tuple[State, jax.Array]:
        """The training step as a user writes it, for the whole batch."""
        transformation = OPTIMIZERS[self.optimizer].plain()
        value, grads, statistics = self.gradient(state, batch, None)
        updates, moments = transformation.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments, statistics), value

    def gradient(self, state: State, batch: Any, axis: str | None, share: float = 1) -> tuple[jax.Array, Any, Any]:
        """Loss, gradient and statistics; `share` of the loss and gradient, where others add the rest."""

        def part(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            value, changed = self.loss(params, state.statistics, batch, axis)
            return value * (share / self.microbatches), changed

        if self.microbatches == 1:
            (value, statistics), grads = jax.value_and_grad(part, has_aux=True)(state.params, batch)
            return value, grads, statistics
        return *accumulated(part, state.params, batch, self.microbatches), state.statistics

    def init(self) -> State:
        params, statistics = self.create(jax.random.key(0))
        return State(params, OPTIMIZERS[self.optimizer].plain().init(params), statistics)

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(self.init).params))


def accumulated(part: Callable[..., Any], params: Any, batch: Any, microbatches: int) -> tuple[jax.Array, Any]:
    """Microbatch after microbatch, weights and gradients in bfloat16."""
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    def one(carry: tuple[jax.Array, Any], batch: Any) -> tuple[tuple[jax.Array, Any], None]:
        (value, _), grads = jax.value_and_grad(part, has_aux=True)(low, batch)
        return (carry[0] + value.astype(jnp.float32), jax.tree.map(jnp.add, carry[1], grads)), None

    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
    carry, _ = jax.lax.scan(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, low)), parts)
    return carry


def plain(name: str, optimizer: str, loss: Callable, create: Callable, batch: Any) -> Workload:
    """Of a loss without statistics."""
    return Workload(
        name,
        optimizer,
        lambda params, statistics, batch, axis: (loss(params, batch), statistics),
        lambda key: (create(key), ()),
        batch,
    )


def dense(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / math.sqrt(shape[0])


# --- multilayer perceptrons -----------------------------------------------------------------------------------------


def mlp(replicas: int, optimizer: str, width: int = 1024, layers: int = 4) -> Workload:
    """Square weights and one example per replica: almost nothing but weight update."""

    def create(key: jax.Array) -> list[jax.Array]:
        return [dense(k, width, width) for k in jax.random.split(key, layers)]

    def loss(weights: list[jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - target) ** 2)

    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((replicas, width), np.float32) for _ in range(2))
    return plain(f"mlp-{layers}x{width}", optimizer, loss, create, batch)


def small_tensors(replicas: int, optimizer: str, layers: int = 50, width: int = 48) -> Workload:
    """A hundred tensors of 9 KiB and less: what counts is how many messages are sent."""

    def create(key: jax.Array) -> list[dict[str, jax.Array]]:
        return [{"w": dense(k, width, width), "b": jnp.zeros(width)} for k in jax.random.split(key, layers)]

    def loss(params: list[dict[str, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean((x - target) ** 2)

    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((4 * replicas, width), np.float32) for _ in range(2))
    return plain("small-tensors", optimizer, loss, create, batch)


# --- transformers ---------------------------------------------------------------------------------------------------


def attention(qkv: jax.Array, heads: int, causal: bool) -> jax.Array:
    """Of queries, keys and values that lie side by side: (batch, length, 3 * width)."""
    examples, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = jnp.split(qkv.reshape(examples, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(examples, length, width)


def transformer(
    replicas: int,
    optimizer: str,
    width: int = 1024,
    layers: int = 2,
    vocabulary: int = 8192,
    length: int = 16,
    heads: int = 16,
    sequences: int = 1,
    name: str = "transformer-42m",
) -> Workload:
    """A language model without biases; 42 million parameters and one short sequence per replica by default."""

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "norm_attention": jnp.ones(width),
            "qkv": dense(qkv, width, 3 * width),
            "out": dense(out, width, width),
            "norm_mlp": jnp.ones(width),
            "up": dense(up, width, 4 * width),
            "down": dense(down, 4 * width, width),
        }

    def create(key: jax.Array) -> dict[str, Any]:
        embedding, unembedding, *keys = jax.random.split(key, 2 + layers)
        return {
            "embedding": 0.02 * jax.random.normal(embedding, (vocabulary, width)),
            "layers": [layer(k) for k in keys],
            "norm": jnp.ones(width),
            "unembedding": dense(unembedding, width, vocabulary),
        }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + attention(norm(x, p["norm_attention"]) @ p["qkv"], heads, causal=True) @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["norm_mlp"]) @ p["up"]) @ p["down"]
        logits = (norm(x, params["norm"]) @ params["unembedding"]).astype(
            jnp.float32
        )  # also where weights are bfloat16
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    batch = np.random.default_rng(0).integers(0, vocabulary, (replicas * sequences, length + 1), np.int32)
    return plain(name, optimizer, loss, create, batch)


class Blocks(NamedTuple):
    """What GPT-2 and BERT have in common: biases, learned positions, one table for reading and writing tokens."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    causal: bool

    def create(self, key: jax.Array) -> dict[str, Any]:
        tokens, positions, *keys = jax.random.split(key, 2 + self.layers)
        return {
            "tokens": 0.02 * jax.random.normal(tokens, (self.vocabulary, self.width)),
            "positions": 0.02 * jax.random.normal(positions, (self.length, self.width)),
            "layers": [self._layer(k) for k in keys],
            "norm": self._norm(),
        }

    def _norm(self) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(self.width), "bias": jnp.zeros(self.width)}

    def _layer(self, key: jax.Array) -> dict[str, Any]:
        d = self.width
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        keys = jax.random.split(key, len(shapes))
        affine = {
            name: {"w": 0.02 * jax.random.normal(k, shape), "b": jnp.zeros(shape[1])}
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return {**affine, "norm_attention": self._norm(), "norm_mlp": self._norm()}

    def logits(self, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        def norm(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            return p["scale"] * jax.nn.standardize(x, epsilon=1e-5) + p["bias"]

        def affine(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            return x @ p["w"] + p["b"]

        x = params["tokens"][tokens] + params["positions"]
        for p in params["layers"]:
            qkv = affine(p["qkv"], norm(p["norm_attention"], x))
            x = x + affine(p["out"], attention(qkv, self.heads, self.causal))
            x = x + affine(p["down"], jax.nn.gelu(affine(p["up"], norm(p["norm_mlp"], x))))
        return norm(params["norm"], x) @ params["tokens"].T


def gpt2_small(replicas: int, optimizer: str) -> Workload:
    """124 million parameters, one sequence of 16 tokens per replica."""
    model = Blocks(width=768, layers=12, heads=12, vocabulary=50257, length=16, causal=True)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.logits(params, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    batch = np.random.default_rng(0).integers(0, model.vocabulary, (replicas, model.length + 1), np.int32)
    return plain("gpt2-small", optimizer, loss, model.create, batch)


def bert(replicas: int, optimizer: str) -> Workload:
    """BERT-small: 29 million parameters; every seventh token is to be guessed. No replica count divides 30522."""
    model = Blocks(width=512, layers=4, heads=8, vocabulary=30522, length=32, causal=False)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits = model.logits(params, jnp.where(batch["hidden"], 103, batch["tokens"]))  # 103: [MASK]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return jnp.mean(jnp.mean(each, axis=1, where=batch["hidden"]))

    tokens = np.random.default_rng(0).integers(0, model.vocabulary, (replicas, model.length), np.int32)
    hidden = np.broadcast_to(np.arange(model.length) % 7 == 3, tokens.shape).copy()
    return plain("bert-small", optimizer, loss, model.create, {"tokens": tokens, "hidden": hidden})


# --- models as large users write them -------------------------------------------------------------------------------


def scanned_gpt(
    replicas: int, optimizer: str, width: int = 256, layers: int = 12, vocabulary: int = 4096, length: int = 16
) -> Workload:
    """Weights stacked by layer, one `lax.scan` over them, `jax.checkpoint` around each layer, products in bfloat16."""
    heads = width // 64
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def create(key: jax.Array) -> tuple[Any, Any]:
        embedding, *keys = jax.random.split(key, 1 + len(shapes))
        stack = {
            name: jax.random.normal(k, (layers, *shape)) / math.sqrt(shape[0])
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = {"norm_attention": jnp.ones((layers, width)), "norm_mlp": jnp.ones((layers, width))}
        table = 0.02 * jax.random.normal(embedding, (vocabulary, width))
        return {"embedding": table, "layers": {**stack, **norms}, "norm": jnp.ones(width)}, ()

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (scale * x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)

    def layered(params: Any, tokens: jax.Array, read: Callable[[str, jax.Array], jax.Array]) -> jax.Array:
        def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            mixed = attention(norm(x, p["norm_attention"]) @ read("qkv", p["qkv"]), heads, causal=True)
            x = x + mixed @ read("out", p["out"])
            return x + jax.nn.gelu(norm(x, p["norm_mlp"]) @ read("up", p["up"])) @ read("down", p["down"]), None

        table = read("embedding", params["embedding"])
        x, _ = jax.lax.scan(jax.checkpoint(layer), table[tokens[:, :-1]], params["layers"])
        logits = (norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def loss(params: Any, statistics: Any, tokens: jax.Array, axis: str | None) -> tuple[jax.Array, Any]:
        return layered(params, tokens, lambda _, w: w.astype(jnp.bfloat16)), statistics

    batch = np.random.default_rng(0).integers(0, vocabulary, (replicas, length + 1), np.int32)
    return Workload("scanned-gpt", optimizer, loss, create, batch, layered=layered)


def mixture(
    replicas: int,
    optimizer: str,
    width: int = 256,
    layers: int = 2,
    experts: int = 8,
    tokens: int = 64,
    dtype: Any = jnp.float32,
) -> Workload:
    """Mixture of experts: each token is dispatched to one of eight, up to a capacity, and what it makes is combined.

    Weights are float32; products are taken in `dtype`.
    """
    capacity = 2 * tokens // experts

    def create(key: jax.Array) -> list[dict[str, jax.Array]]:
        def layer(key: jax.Array) -> dict[str, jax.Array]:
            router, up, down = jax.random.split(key, 3)
            return {
                "router": dense(router, width, experts),
                "up": jax.random.normal(up, (experts, width, 4 * width)) / math.sqrt(width),
                "down": jax.random.normal(down, (experts, 4 * width, width)) / math.sqrt(4 * width),
            }

        return [layer(k) for k in jax.random.split(key, layers)]

    def dispatched(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        """Of one example: (tokens, width)."""
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts)
        position = jnp.cumsum(chosen, axis=0) * chosen - 1  # in the queue of its expert; -1 where it does not go
        sent = chosen[..., None] * jax.nn.one_hot(position.astype(jnp.int32), capacity)
        up, down, sent = (a.astype(dtype) for a in (p["up"], p["down"], sent))
        queued = jnp.einsum("td,tec->ecd", x.astype(dtype), sent)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", queued, up)), down)
        return jnp.einsum("ecd,tec,te->td", made, sent, gates.astype(dtype)).astype(x.dtype)

    def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        for p in params:
            x = x + jax.vmap(lambda one, p=p: dispatched(p, one))(x)
        return jnp.mean((x - target) ** 2)

    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((replicas, tokens, width), np.float32) for _ in range(2))
    return plain("mixture", optimizer, loss, create, batch)


def accumulating(replicas: int, optimizer: str, microbatches: int = 8) -> Workload:
    """The transformer of width 512, eight microbatches of one sequence per replica, gradients in bfloat16."""
    made = transformer(replicas, optimizer, width=512, sequences=microbatches, name="accumulating")
    return replace(made, microbatches=microbatches)


# --- others ---------------------------------------------------------------------------------------------------------


def recommender(replicas: int, optimizer: str, tables: int = 8, entries: int = 50_000, width: int = 64) -> Workload:
    """Eight embedding tables (26 million parameters) under a small network; 32 examples per replica read 256 rows."""

    def create(key: jax.Array) -> dict[str, Any]:
        embedding, *keys = jax.random.split(key, 4)
        sizes = (tables * width + 16, 256, 64, 1)
        return {
            "tables": [0.05 * jax.random.normal(k, (entries, width)) for k in jax.random.split(embedding, tables)],
            "layers": [
                {"w": dense(k, m, n), "b": jnp.zeros(n)} for k, m, n in zip(keys, sizes, sizes[1:], strict=False)
            ],
        }

    def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        looked_up = [table[batch["ids"][:, i]] for i, table in enumerate(params["tables"])]
        x = jnp.concatenate([batch["dense"], *looked_up], axis=-1)
        *hidden, last = params["layers"]
        for p in hidden:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        return jnp.mean(optax.sigmoid_binary_cross_entropy((x @ last["w"] + last["b"])[:, 0], batch["clicked"]))

    rng, examples = np.random.default_rng(0), 32 * replicas
    batch = {
        "ids": rng.integers(0, entries, (examples, tables), np.int32),
        "dense": rng.standard_normal((examples, 16), np.float32),
        "clicked": rng.integers(0, 2, examples).astype(np.float32),
    }
    return plain("recommender", optimizer, loss, create, batch)


def resnet50(replicas: int, optimizer: str, images: int = 2, side: int = 64) -> Workload:
    """ResNet-50 in Flax Linen, BatchNorm over all replicas, images of 64 x 64."""
    from flax import linen as nn

    class ResNet(nn.Module):
        axis: str | None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9, axis_name=self.axis)
            conv = functools.partial(nn.Conv, use_bias=False)
            x = nn.relu(norm()(conv(64, (7, 7), (2, 2))(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, blocks in enumerate((3, 4, 6, 3)):
                for block in range(blocks):
                    width, stride = 64 * 2**stage, 2 if stage and not block else 1
                    y = nn.relu(norm()(conv(width, (1, 1))(x)))
                    y = nn.relu(norm()(conv(width, (3, 3), (stride, stride))(y)))
                    y = norm()(conv(4 * width, (1, 1))(y))
                    if not block:
                        x = norm()(conv(4 * width, (1, 1), (stride, stride))(x))
                    x = nn.relu(x + y)
            return nn.Dense(1000)(jnp.mean(x, axis=(1, 2)))

    def create(key: jax.Array) -> tuple[Any, Any]:
        made = jax.jit(ResNet(None).init)(key, jnp.zeros((1, side, side, 3)))
        return made["params"], made["batch_stats"]

    def loss(params: Any, statistics: Any, batch: dict[str, jax.Array], axis: str | None) -> tuple[jax.Array, Any]:
        logits, changed = ResNet(axis).apply(
            {"params": params, "batch_stats": statistics}, batch["image"], mutable=["batch_stats"]
        )
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(each), changed["batch_stats"]

    rng, examples = np.random.default_rng(0), images * replicas
    batch = {
        "image": rng.standard_normal((examples, side, side, 3), np.float32),
        "label": rng.integers(0, 1000, examples, np.int32),
    }
    return Workload("resnet50", optimizer, loss, create, batch)


def of_width(width: int) -> Callable[[int, str], Workload]:
    return functools.partial(transformer, width=width, name=f"transformer-{width}")


WORKLOADS: dict[str, Callable[[int, str], Workload]] = {
    "transformer-42m": transformer,
    # a larger batch on a smaller model: four times the compute for each weight, and more
    "transformer-compute": functools.partial(
        transformer, width=256, vocabulary=1024, length=64, heads=4, sequences=4, name="transformer-compute"
    ),
    **{f"transformer-{width}": of_width(width) for width in (256, 512, 768)},
    "transformer-tiny": functools.partial(
        transformer, width=64, vocabulary=512, heads=4, length=8, name="transformer-tiny"
    ),
    "gpt2-small": gpt2_small,
    "bert-small": bert,
    "resnet50": resnet50,
    "recommender": recommender,
    "scanned-gpt": scanned_gpt,
    "mixture": mixture,
    "accumulating": accumulating,
    "small-tensors": small_tensors,
    "mlp-4x1024": mlp,
    "mlp-4x960": functools.partial(mlp, width=960),
}
