"""An unmodified `torch.nn` model: TorchAx makes a JAX function of it, Optax trains it, shardstep shards the update.

pip install torch torchax      # tried with torch 2.12.1 and torchax 0.0.13
python examples/torch_module.py
"""

from __future__ import annotations

import jax
import loop
import optax
import torch
import torchax

import shardstep

optimizer = optax.adamw(1e-3)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(loop.FEATURES, 512),
            torch.nn.LayerNorm(512),
            torch.nn.GELU(),
            torch.nn.Linear(512, loop.CLASSES),
        )

    def forward(self, x):
        return self.layers(x)


def main(steps: int, plain: bool = False) -> list[float]:
    torch.manual_seed(0)
    params, forward = torchax.extract_jax(MLP())

    def loss_fn(params, batch):
        logits = forward(params, (batch["image"],))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def train_step(params, opt_state, batch):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    step = jax.jit(train_step) if plain else shardstep.shard(train_step)  # the one line

    def train_on(batch):
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        return loss

    return loop.train(train_on, steps)


if __name__ == "__main__":
    loop.command_line(main, "torch_module")
