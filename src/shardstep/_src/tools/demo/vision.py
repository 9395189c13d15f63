"""A small ResNet and a multilayer perceptron in plain JAX, and pictures to tell apart.

The user's side of the demo: nothing here knows of replicas, meshes or shardings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]

CLASSES, SIZE = 8, 16


def pictures(count: int) -> Iterator[dict[str, np.ndarray]]:
    """Stripes under noise; the direction of the stripes is the class."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    while True:
        label = rng.integers(0, CLASSES, count)
        angle, phase = np.pi * label / CLASSES, rng.uniform(0, 2 * np.pi, count)
        across = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
        stripes = np.sin(0.8 * across + phase[:, None, None])
        noisy = stripes[..., None] + rng.normal(0, 0.5, (count, SIZE, SIZE, 3))
        yield {"input": noisy.astype(np.float32), "target": label.astype(np.int32)}


def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1))


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the channels."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return scale * centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


# --- ResNet ---------------------------------------------------------------------------------------------------------


def init_resnet(key: jax.Array, width: int = 64, blocks: int = 3) -> Params:
    keys = iter(jax.random.split(key, 2 + 2 * blocks))

    def kernel(fan_in: int, fan_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (3, 3, fan_in, fan_out)) / math.sqrt(9 * fan_in)

    return {
        "stem": kernel(3, width),
        "blocks": [
            {"norm": jnp.ones(width), "first": kernel(width, width), "second": kernel(width, width)}
            for _ in range(blocks)
        ],
        "norm": jnp.ones(width),
        "head": jax.random.normal(next(keys), (width, CLASSES)) / math.sqrt(width),
    }


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def resnet_loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    x = conv(batch["input"], params["stem"], stride=2)
    for block in params["blocks"]:
        x = x + conv(jax.nn.relu(conv(norm(x, block["norm"]), block["first"])), block["second"])
    pooled = jnp.mean(norm(x, params["norm"]), axis=(1, 2))
    return cross_entropy(pooled @ params["head"], batch["target"])


# --- multilayer perceptron ------------------------------------------------------------------------------------------


def init_mlp(key: jax.Array, width: int = 1024) -> Params:
    sizes = [SIZE * SIZE * 3, width, width, CLASSES]
    keys = jax.random.split(key, len(sizes))
    return {
        f"dense_{i}": {"kernel": jax.random.normal(keys[i], (m, n)) / math.sqrt(m), "bias": jnp.zeros(n)}
        for i, (m, n) in enumerate(pairwise(sizes))
    }


def mlp_loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["input"].reshape(batch["input"].shape[0], -1)
    *hidden, last = params.values()
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return cross_entropy(x @ last["kernel"] + last["bias"], batch["target"])
