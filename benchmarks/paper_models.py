"""The two models of the paper as it trained them: ResNet-50 for images, Transformer-big for translation.

Float32 weights, bfloat16 compute, weights as plain arrays. The same loss serves a step for the whole batch (`jit`,
shardstep) and one for a single replica (the closed original): `everyone` makes of a replica's mean the mean over all
replicas, and is left out where the step sees the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Mean = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Model:
    """Shapes of the weights and of one replica's examples, and the loss: `loss(params, batch, everyone)`."""

    params: Any
    batch: Callable[[int], Any]  # of so many replicas
    loss: Callable[[Any, Any, Mean], jax.Array]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


# --- ResNet-50 ------------------------------------------------------------------------------------------------------

STAGES = (3, 4, 6, 3)


def _normalised(filters: int, *kernel: int) -> dict[str, Any]:
    return {"w": shape(*kernel, filters), "scale": shape(filters), "bias": shape(filters)}


def _bottleneck(inputs: int, filters: int) -> dict[str, Any]:
    block = {
        "reduce": _normalised(filters, 1, 1, inputs),
        "middle": _normalised(filters, 3, 3, filters),
        "expand": _normalised(4 * filters, 1, 1, filters),
    }
    return block if inputs == 4 * filters else {**block, "shortcut": _normalised(4 * filters, 1, 1, inputs)}


def _convolve(p: dict[str, jax.Array], x: jax.Array, everyone: Mean, stride: int = 1) -> jax.Array:
    """A convolution and its normalisation over the examples of all replicas."""
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, half(p["w"]), (stride, stride), "SAME", dimension_numbers=layout)
    y32 = y.astype(jnp.float32)
    mean, square = everyone(jnp.stack([jnp.mean(y32, (0, 1, 2)), jnp.mean(y32 * y32, (0, 1, 2))]))
    factor = p["scale"] * jax.lax.rsqrt(square - mean * mean + 1e-5)
    return y * half(factor) + half(p["bias"] - mean * factor)


def resnet50(images: int) -> Model:
    """25.6 million parameters; so many images of 224 x 224 per replica."""
    inputs, blocks = 64, []
    for stage, count in enumerate(STAGES):
        for _ in range(count):
            blocks.append(_bottleneck(inputs, 64 * 2**stage))
            inputs = 256 * 2**stage
    params = {
        "stem": _normalised(64, 7, 7, 3),
        "blocks": blocks,
        "dense": {"w": shape(inputs, 1000), "bias": shape(1000)},
    }
    strides = [2 if stage and not i else 1 for stage, count in enumerate(STAGES) for i in range(count)]

    def loss(params: Any, batch: Any, everyone: Mean) -> jax.Array:
        x = jax.nn.relu(_convolve(params["stem"], batch["image"], everyone, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for p, stride in zip(params["blocks"], strides, strict=True):
            y = jax.nn.relu(_convolve(p["reduce"], x, everyone))
            y = jax.nn.relu(_convolve(p["middle"], y, everyone, stride))
            y = _convolve(p["expand"], y, everyone)
            x = jax.nn.relu(y + (_convolve(p["shortcut"], x, everyone, stride) if "shortcut" in p else x))
        pooled = jnp.mean(x.astype(jnp.float32), (1, 2))
        logits = half(pooled) @ half(params["dense"]["w"]) + half(params["dense"]["bias"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return jnp.mean(each)

    def batch(replicas: int) -> Any:
        return {
            "image": jax.ShapeDtypeStruct((images * replicas, 224, 224, 3), jnp.bfloat16),
            "label": jax.ShapeDtypeStruct((images * replicas,), jnp.int32),
        }

    return Model(params, batch, loss)


# --- Transformer-big ------------------------------------------------------------------------------------------------

WIDTH, HEADS, HIDDEN, LAYERS, VOCABULARY, LENGTH = 1024, 16, 4096, 6, 32768, 64


def _attention_weights() -> dict[str, Any]:
    return {**{name: shape(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}, "norm": shape(WIDTH)}


def _mlp_weights() -> dict[str, Any]:
    return {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH), "norm": shape(WIDTH)}


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return half(jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6) * scale)


def _attend(p: dict[str, jax.Array], x: jax.Array, read: jax.Array, causal: bool) -> jax.Array:
    def heads(y: jax.Array, w: jax.Array) -> jax.Array:
        return (y @ half(w)).reshape(*y.shape[:2], HEADS, WIDTH // HEADS)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads(x, p["query"]), heads(read, p["key"])) / (WIDTH // HEADS) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, jnp.bfloat16(-1e9))
    weights = half(jax.nn.softmax(scores.astype(jnp.float32)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, heads(read, p["value"])).reshape(x.shape) @ half(p["out"])


def _mlp(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.relu(_norm(x, p["norm"]) @ half(p["up"])) @ half(p["down"])


def transformer_big(tokens: int) -> Model:
    """210 million parameters, six layers of encoder and of decoder; so many tokens per replica, 64 to a sentence."""
    encoder = [{"self": _attention_weights(), "mlp": _mlp_weights()} for _ in range(LAYERS)]
    decoder = [{**layer, "cross": _attention_weights()} for layer in encoder]
    params = {"embedding": shape(VOCABULARY, WIDTH), "encoder": encoder, "decoder": decoder, "norm": shape(2, WIDTH)}

    def loss(params: Any, batch: Any, everyone: Mean) -> jax.Array:
        table = half(params["embedding"])
        x = table[batch["source"]]
        for p in params["encoder"]:
            y = _norm(x, p["self"]["norm"])
            x = _mlp(p["mlp"], x + _attend(p["self"], y, y, causal=False))
        read = _norm(x, params["norm"][0])
        x = table[batch["target"][:, :-1]]
        for p in params["decoder"]:
            y = _norm(x, p["self"]["norm"])
            x = x + _attend(p["self"], y, y, causal=True)
            x = _mlp(p["mlp"], x + _attend(p["cross"], _norm(x, p["cross"]["norm"]), read, causal=False))
        logits = (_norm(x, params["norm"][1]) @ table.T).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"][:, 1:]))

    def batch(replicas: int) -> Any:
        sentences = replicas * tokens // LENGTH
        return {
            "source": jax.ShapeDtypeStruct((sentences, LENGTH), jnp.int32),
            "target": jax.ShapeDtypeStruct((sentences, LENGTH + 1), jnp.int32),
        }

    return Model(params, batch, loss)
