"""A few optimizers in plain JAX, and those of optax where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.errors import ShardstepError

Tree = Any


class Optimizer(NamedTuple):
    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # (gradients, state, params) -> (params, state)


def named(name: str) -> Optimizer:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    try:
        import optax
    except ImportError:
        raise ShardstepError(
            f"--optimizer {name}: built in are {', '.join(OPTIMIZERS)}; for others install optax"
        ) from None
    make = getattr(optax, name, None)
    try:
        transformation = make(1e-3)  # type: ignore[misc]
        init, update = transformation.init, transformation.update
    except (TypeError, AttributeError):
        raise ShardstepError(f"--optimizer {name}: neither built in ({', '.join(OPTIMIZERS)}) nor in optax") from None

    def step(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(init, step)


def clipped(grads: Tree, limit: float = 1.0) -> Tree:
    """By their global norm."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / norm), grads)


def zeros(params: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, params)


class AdamW(NamedTuple):
    mean: Tree
    square: Tree
    steps: jax.Array


def adamw(grads: Tree, state: AdamW, params: Tree, rate: float = 1e-3, decay: float = 0.01) -> tuple[Tree, AdamW]:
    grads = clipped(grads)
    steps = state.steps + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.square, grads)

    def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        direction = (m / (1 - 0.9**steps)) / (jnp.sqrt(v / (1 - 0.99**steps)) + 1e-8)
        return p - rate * (direction + decay * p)

    return jax.tree.map(update, params, mean, square), AdamW(mean, square, steps)


def sgd(grads: Tree, momentum: Tree, params: Tree, rate: float = 0.05) -> tuple[Tree, Tree]:
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, clipped(grads))
    return jax.tree.map(lambda p, m: p - rate * m, params, momentum), momentum


def lion(grads: Tree, momentum: Tree, params: Tree, rate: float = 3e-4, decay: float = 0.1) -> tuple[Tree, Tree]:
    def update(p: jax.Array, m: jax.Array, g: jax.Array) -> jax.Array:
        return p - rate * (jnp.sign(0.9 * m + 0.1 * g) + decay * p)

    params = jax.tree.map(update, params, momentum, grads)
    return params, jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, momentum, grads)


OPTIMIZERS = {
    "adamw": Optimizer(lambda params: AdamW(zeros(params), zeros(params), jnp.zeros((), jnp.int32)), adamw),
    "sgd": Optimizer(zeros, sgd),
    "lion": Optimizer(zeros, lion),
}
