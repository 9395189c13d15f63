"""Llama-like models by shapes: 7, 70 and 405 billion parameters, layers stacked and scanned.

    shardstep explain examples/llama.py:llama_70b --topology v5p:8x8x8   # by shapes: no weights are made
    python examples/llama.py   # trains a tiny one

Grouped-query attention, rotary positions, SwiGLU; f32 weights, bf16 products, AdamW, each layer under `jax.checkpoint`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import shardstep


class Config(NamedTuple):
    width: int
    layers: int
    heads: int
    groups: int  # heads of keys and values
    hidden: int
    vocabulary: int
    length: int = 2048  # tokens in an example


TINY = Config(64, 4, 4, 2, 128, 256, 32)
OPTIMIZER = optax.adamw(3e-4, weight_decay=0.1)


def init(c: Config, key: jax.Array) -> Any:
    head = c.width // c.heads
    shapes = {
        "q": (c.width, c.heads * head),
        "k": (c.width, c.groups * head),
        "v": (c.width, c.groups * head),
        "out": (c.heads * head, c.width),
        "gate": (c.width, c.hidden),
        "up": (c.width, c.hidden),
        "down": (c.hidden, c.width),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    layers = {n: jax.random.normal(keys[n], (c.layers, *shape)) * shape[0] ** -0.5 for n, shape in shapes.items()}
    norms = {"attention_norm": jnp.ones((c.layers, c.width)), "mlp_norm": jnp.ones((c.layers, c.width))}
    embed = 0.02 * jax.random.normal(key, (c.vocabulary, c.width))
    return {"embed": embed, "layers": layers | norms, "norm": jnp.ones(c.width), "head": embed.T}


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5) * scale).astype(jnp.bfloat16)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: pairs of features turn with the position, each pair at its own speed."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None].astype(x.dtype), jnp.sin(angle)[:, None].astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def layer(c: Config, x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    y = norm(x, w["attention_norm"])
    q, k, v = (product(y, w[name]).reshape(*x.shape[:2], -1, c.width // c.heads) for name in "qkv")
    mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + product(mixed.reshape(x.shape), w["out"])
    y = norm(x, w["mlp_norm"])
    return x + product(jax.nn.silu(product(y, w["gate"])) * product(y, w["up"]), w["down"]), None


def loss(c: Config, params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = lax.scan(jax.checkpoint(functools.partial(layer, c)), x, params["layers"])
    logits = product(norm(x, params["norm"]), params["head"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def train_step(c: Config, state: Any, tokens: jax.Array) -> Any:
    params, moments = state
    value, grads = jax.value_and_grad(functools.partial(loss, c))(params, tokens)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def model(c: Config) -> Any:
    """What the command line asks for: a step, and arguments for it; one example per replica."""
    params = init(c, jax.random.key(0))
    tokens = jnp.zeros((jax.device_count(), c.length + 1), jnp.int32)
    return functools.partial(train_step, c), ((params, OPTIMIZER.init(params)), tokens)


def tiny() -> Any:
    return model(TINY)


def llama_7b() -> Any:
    return model(Config(4096, 32, 32, 32, 11008, 32000))


def llama_70b() -> Any:
    return model(Config(8192, 80, 64, 8, 28672, 128256))


def llama_405b() -> Any:
    return model(Config(16384, 126, 128, 8, 53248, 128256))


def main(steps: int, plain: bool = False) -> list[float]:
    step, (state, _) = tiny()
    run = jax.jit(step) if plain else shardstep.shard(step)
    losses = []
    for i in range(steps):
        starts = np.random.default_rng(i).integers(0, TINY.vocabulary, (16, 1))
        tokens = (starts + np.arange(TINY.length + 1)) % TINY.vocabulary  # the model learns to count
        state, value = run(state, tokens.astype(np.int32))
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    from loop import command_line

    command_line(main, "llama")
