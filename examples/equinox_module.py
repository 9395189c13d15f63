"""Equinox: a module with functions inside, `eqx.nn.State` for BatchNorm, filtered transformations.

python examples/equinox_module.py
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import loop
import optax

import shardstep

optimizer = optax.adamw(1e-3)


class MLP(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    activation: Callable

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(loop.FEATURES, 512, key=first)
        self.norm = eqx.nn.BatchNorm(512, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(512, loop.CLASSES, key=second)
        self.activation = jax.nn.relu

    def __call__(self, x, state, key):
        x, state = self.norm(self.hidden(x), state)
        return self.out(self.dropout(self.activation(x), key=key)), state


def compute_loss(model, state, batch, key):
    keys = jax.random.split(key, batch["image"].shape[0])
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    logits, state = batched(batch["image"], state, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), state


def make_step(model, state, opt_state, batch, key):
    (loss, state), gradients = eqx.filter_value_and_grad(compute_loss, has_aux=True)(model, state, batch, key)
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


def main(steps: int, plain: bool = False) -> list[float]:
    model, state = eqx.nn.make_with_state(MLP)(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    step = eqx.filter_jit(make_step) if plain else shardstep.shard(make_step)  # the one line
    key = jax.random.key(1)

    def train_on(batch):
        nonlocal model, state, opt_state, key
        key, now = jax.random.split(key)
        model, state, opt_state, loss = step(model, state, opt_state, batch, now)
        return loss

    return loop.train(train_on, steps)


if __name__ == "__main__":
    loop.command_line(main, "equinox_module")
