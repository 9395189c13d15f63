"""A step whose state holds all that processes must agree on: weights, moments, a key, a Python number."""

from __future__ import annotations

import jax
from steps import adam_state, adam_step


def noisy_state():
    return {"train": adam_state(), "key": jax.random.key(5), "steps": 0}


def noisy_step(state, batch):
    key, used = jax.random.split(state["key"])
    x = batch["x"] + 0.1 * jax.random.normal(used, batch["x"].shape)
    train, loss = adam_step(state["train"], {"x": x, "y": batch["y"]})
    return {"train": train, "key": key, "steps": state["steps"] + 1}, loss
