"""Keras 3: `compile`, one line, `fit`. Metrics, callbacks and validation are Keras's own.

python examples/keras_fit.py
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import loop
import numpy as np

import shardstep


def data(batches: int):
    drawn = list(loop.batches(batches))
    return np.concatenate([b["image"] for b in drawn]), np.concatenate([b["label"] for b in drawn])


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((loop.FEATURES,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(loop.CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss, metrics=["accuracy"])
    return model


class Losses(keras.callbacks.Callback):
    """The loss of each step; Keras's own figure is the mean over the epoch so far."""

    def __init__(self):
        super().__init__()
        self.means: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.means.append(float(logs["loss"]))


def main(steps: int, plain: bool = False) -> list[float]:
    model = make_model()
    if not plain:
        shardstep.keras.shard(model)  # the one line
    images, labels = data(steps)
    losses = Losses()
    model.fit(
        images,
        labels,
        batch_size=loop.EXAMPLES,
        shuffle=False,
        validation_split=0.1,
        callbacks=[losses],
        verbose=2,
    )
    return losses.means


if __name__ == "__main__":
    loop.command_line(main, "keras_fit")
