"""Keras 3 on the JAX backend: `fit`, `evaluate` and `predict` with a sharded weight update.

    model.compile(optimizer="adam", loss=...)
    shardstep.keras.shard(model, mesh)
    model.fit(x, y, ...)

Keras has already made the step pure: `model.train_step(state, data)` is a function of its variables, which `fit` gives
to `jax.jit`. Here it goes to `shardstep.shard` instead; metrics, callbacks, validation and `steps_per_execution` are
Keras's own and see nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported; one that was chosen before stays

import keras
from jax.sharding import Mesh

from ._src import api
from ._src.core.errors import ShardstepError
from ._src.planning.plan import Plan


def shard(model: keras.Model, mesh: Mesh | None = None, **options: Any) -> keras.Model:
    """Shard the training of a compiled model over the replicas of a mesh. Takes the options of `shardstep.shard`.

    The model is changed in place, and returned. After another `compile`, call this again.
    """
    _check(model)

    def wrap(step: Callable[..., Any]) -> api.ShardedStep:
        return api.shard(step, mesh, batch_argnums=1, **options)

    model.train_step = wrap(_original(model, "train_step"))
    model.test_step = wrap(_original(model, "test_step"))
    model.predict_step = _predicting(wrap(_returning_state(_original(model, "predict_step"))))
    model.jit_compile = False  # the steps compile themselves
    model.train_function = model.test_function = model.predict_function = None  # rebuilt by the next fit
    return model


def plan(model: keras.Model, *data: Any) -> Plan:
    """What a training step on one batch would do: `plan(model, x, y)`."""
    sharded = model.train_step
    if not isinstance(sharded, api.ShardedStep):
        raise ShardstepError("the model is not sharded yet: shardstep.keras.shard(model, mesh) comes first")
    model.test_on_batch(*data)  # Keras makes the variables of model and metrics when it first sees data
    model.reset_metrics()
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
    state = tuple([v.value for v in kind] for kind in (*variables, model.metrics_variables))
    return sharded.plan(state, data)


def _check(model: keras.Model) -> None:
    if keras.backend.backend() != "jax":
        raise ShardstepError(
            f"Keras runs on {keras.backend.backend()!r}: set KERAS_BACKEND=jax in the environment before it is imported"
        )
    if not model.compiled:
        raise ShardstepError("compile the model first: shardstep shards the step that compile() describes")
    if model.run_eagerly:
        raise ShardstepError("the model was compiled with run_eagerly=True: a sharded step has to be traced")
    if keras.distribution.distribution() is not None:
        raise ShardstepError("a keras.distribution is set, which lays the variables out itself: use one of the two")


def _original(model: keras.Model, name: str) -> Callable[..., Any]:
    """The model's own method, also where it was sharded before."""
    return getattr(type(model), name).__get__(model)


def _returning_state(predict_step: Callable[..., Any]) -> Callable[..., Any]:
    """What a step reads is state if it comes back."""

    def step(state: Any, data: Any) -> Any:
        outputs, non_trainable = predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return step


def _predicting(sharded: api.ShardedStep) -> Callable[..., Any]:
    def predict_step(state: Any, data: Any) -> Any:
        outputs, (trainable, non_trainable) = sharded(state, data)
        state[0][:] = trainable  # Keras gives this list to the next batch, and what was in it is donated
        return outputs, non_trainable

    return predict_step
