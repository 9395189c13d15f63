"""Flax Linen: `TrainState`, batch statistics and dropout, as in Flax's own examples.

python examples/linen.py
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import loop
import optax
from flax.training import train_state

import shardstep


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, training: bool):
        x = nn.Dense(512)(x)
        x = nn.BatchNorm(use_running_average=not training)(x)
        x = nn.Dropout(0.2, deterministic=not training)(nn.relu(x))
        return nn.Dense(loop.CLASSES)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def create_state(key) -> TrainState:
    model = MLP()
    params_key, dropout_key = jax.random.split(key)
    variables = model.init(params_key, jax.numpy.zeros((1, loop.FEATURES)), training=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        key=dropout_key,
        tx=optax.adamw(1e-3),
    )


def train_step(state: TrainState, batch):
    dropout_key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            training=True,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updates

    (loss, updates), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=updates["batch_stats"]), loss


def main(steps: int, plain: bool = False) -> list[float]:
    state = create_state(jax.random.key(0))
    step = jax.jit(train_step) if plain else shardstep.shard(train_step)  # the one line

    def train_on(batch):
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return loop.train(train_on, steps)


if __name__ == "__main__":
    loop.command_line(main, "linen")
