"""A character transformer in plain JAX.

This is the user's side of the demo: it knows nothing of replicas, meshes or shardings.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]


class Config(NamedTuple):
    vocabulary: int
    context: int = 32
    width: int = 384
    heads: int = 4
    layers: int = 2


def init(key: jax.Array, config: Config) -> Params:
    d = config.width
    keys = iter(jax.random.split(key, 3 + 4 * config.layers))

    def dense(fan_in: int, fan_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (fan_in, fan_out)) / math.sqrt(fan_in)

    def layer() -> Params:
        return {
            "norm_attention": jnp.ones(d),
            "qkv": dense(d, 3 * d),
            "out": dense(d, d),
            "norm_mlp": jnp.ones(d),
            "up": dense(d, 4 * d),
            "down": dense(4 * d, d),
        }

    return {
        "embedding": 0.02 * jax.random.normal(next(keys), (config.vocabulary, d)),
        "position": 0.02 * jax.random.normal(next(keys), (config.context, d)),
        "layers": [layer() for _ in range(config.layers)],
        "norm": jnp.ones(d),
        "unembedding": dense(d, config.vocabulary),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(layer: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, d = x.shape
    qkv = (x @ layer["qkv"]).reshape(batch, length, 3, heads, d // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(d // heads)
    past = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, d) @ layer["out"]


def logits(params: Params, tokens: jax.Array, config: Config) -> jax.Array:
    x = params["embedding"][tokens] + params["position"]
    for layer in params["layers"]:
        x = x + attention(layer, rms_norm(x, layer["norm_attention"]), config.heads)
        x = x + jax.nn.gelu(rms_norm(x, layer["norm_mlp"]) @ layer["up"]) @ layer["down"]
    return rms_norm(x, params["norm"]) @ params["unembedding"]


def loss(params: Params, batch: dict[str, jax.Array], config: Config) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits(params, batch["input"], config))
    chosen = jnp.take_along_axis(log_probabilities, batch["target"][..., None], axis=-1)
    return -jnp.mean(chosen)
