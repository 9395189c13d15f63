"""Plain JAX and Optax, with checkpoints: kill it, run it again, and it goes on where it was.

python examples/optax_only.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import loop
import optax

import shardstep

optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, 200))
)


def init(key):
    first, second = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(first, (loop.FEATURES, 512)) / loop.FEATURES**0.5,
        "bias": jnp.zeros(512),
        "out": jax.random.normal(second, (512, loop.CLASSES)) / 512**0.5,
    }
    return {"params": params, "optimizer": optimizer.init(params)}


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["image"] @ params["hidden"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], batch["label"]).mean()


def train_step(state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}, loss


def main(steps: int, plain: bool = False, checkpoints: str | Path = "optax_only_checkpoints") -> list[float]:
    if plain:
        step, state, start = jax.jit(train_step), init(jax.random.key(0)), 0
    else:
        step = shardstep.shard(train_step)  # the one line: over all devices
        plan = step.plan(jax.eval_shape(init, jax.random.key(0)), next(loop.batches(1)))
        start = shardstep.latest_step(checkpoints) or 0
        # born in its layout, or read into it: no device ever holds all of the optimizer's state
        state = shardstep.restore(checkpoints, plan) if start else plan.init(init, jax.random.key(0))

    count = start

    def train_on(batch):
        nonlocal state, count
        state, loss = step(state, batch)
        count += 1
        if not plain and count % 25 == 0:
            shardstep.save(checkpoints, state, step=count, wait=False)
        return loss

    losses = loop.train(train_on, steps, start)
    shardstep.finish()  # the last save may still be running
    return losses


if __name__ == "__main__":
    loop.command_line(main, "optax_only")
