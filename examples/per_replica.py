"""A step written for `pmap` or `shard_map`: for one replica's share of the batch, with `lax.pmean` over the replicas.

python examples/per_replica.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import loop
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardstep

optimizer = optax.adamw(1e-3)


def init(key):
    first, second = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(first, (loop.FEATURES, 512)) / loop.FEATURES**0.5,
        "out": jax.random.normal(second, (512, loop.CLASSES)) / 512**0.5,
    }
    return params, optimizer.init(params)


def loss_fn(params, batch):
    logits = jax.nn.relu(batch["image"] @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def train_step(state, batch):
    params, opt_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    gradients = lax.pmean(gradients, axis_name="batch")  # what makes it a data-parallel step
    loss = lax.pmean(loss, axis_name="batch")
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def main(steps: int, plain: bool = False) -> list[float]:
    state = init(jax.random.key(0))
    if plain:
        mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=False)
        step = jax.jit(mapped(train_step))
    else:
        step = shardstep.shard(train_step, axis_name="batch")  # the one line, in place of pmap

    def train_on(batch):
        nonlocal state
        state, loss = step(state, jax.tree.map(jnp.asarray, batch))
        return loss

    return loop.train(train_on, steps)


if __name__ == "__main__":
    loop.command_line(main, "per_replica")
