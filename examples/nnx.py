"""Flax NNX: a step that changes its model, its optimizer and its metrics in place.

python examples/nnx.py
"""

from __future__ import annotations

import loop
import optax
from flax import nnx

import shardstep


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(loop.FEATURES, 512, rngs=rngs)
        self.norm = nnx.BatchNorm(512, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(512, loop.CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model: MLP, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def train_step(model: MLP, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch):
    (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, gradients)
    return loss


def main(steps: int, plain: bool = False) -> list[float]:
    model = MLP(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    step = nnx.jit(train_step) if plain else shardstep.nnx.shard(train_step)  # the one line

    losses = loop.train(lambda batch: step(model, optimizer, metrics, batch), steps)
    print(f"accuracy over the run: {float(metrics.compute()['accuracy']):.3f}")  # the objects have the new values
    kernel = optimizer.opt_state[0].mu["hidden"]["kernel"].get_value()
    print(
        f"of the hidden layer's first moment, {kernel.shape}, a device holds {kernel.addressable_shards[0].data.shape}"
    )
    return losses


if __name__ == "__main__":
    loop.command_line(main, "nnx")
