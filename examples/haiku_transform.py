"""Haiku: `transform_with_state`, as in Haiku's own examples.

python examples/haiku_transform.py
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import loop
import optax

import shardstep

optimizer = optax.adamw(1e-3)


class TrainingState(NamedTuple):
    params: hk.Params
    network: hk.State
    optimizer: optax.OptState


def forward(image, is_training: bool):
    x = hk.Linear(512)(image)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
    x = jax.nn.relu(x)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.2, x)
    return hk.Linear(loop.CLASSES)(x)


network = hk.transform_with_state(forward)


def loss_fn(params, state, key, batch):
    logits, state = network.apply(params, state, key, batch["image"], is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), state


def update(state: TrainingState, key, batch):
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, network_state), gradients = gradient(state.params, state.network, key, batch)
    updates, opt_state = optimizer.update(gradients, state.optimizer, state.params)
    return TrainingState(optax.apply_updates(state.params, updates), network_state, opt_state), loss


def main(steps: int, plain: bool = False) -> list[float]:
    params, network_state = network.init(jax.random.key(0), next(loop.batches(1))["image"], is_training=True)
    state = TrainingState(params, network_state, optimizer.init(params))
    step = jax.jit(update) if plain else shardstep.shard(update)  # the one line
    key = jax.random.key(1)

    def train_on(batch):
        nonlocal state, key
        key, now = jax.random.split(key)
        state, loss = step(state, now, batch)
        return loss

    return loop.train(train_on, steps)


if __name__ == "__main__":
    loop.command_line(main, "haiku_transform")
