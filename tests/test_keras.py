"""Keras 3: the same model trained by Keras alone and with `shardstep.keras.shard`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import pytest

import shardstep

keras = pytest.importorskip("keras")

random = np.random.default_rng(0)
X, Y = random.normal(size=(200, 64)).astype(np.float32), random.integers(0, 10, 200)


def make_model(optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(10),
        ]
    )
    options = {"metrics": ["accuracy"], **options}
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def adam():
    return keras.optimizers.Adam(1e-2, epsilon=1e-3)


def fit(model, **options):
    options = {"batch_size": 64, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options).history


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_fit_evaluate_and_predict(mesh):
    """200 examples in batches of 64: the last one is short."""
    plain, sharded = make_model(adam()), shardstep.keras.shard(make_model(adam()), mesh)
    epochs = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(sorted(logs)))
    theirs = fit(plain, validation_split=0.2)
    ours = fit(sharded, validation_split=0.2, callbacks=[callback])
    assert epochs == [["accuracy", "loss", "val_accuracy", "val_loss"]] * 2
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4)
    assert_same(sharded.get_weights(), plain.get_weights())
    assert_same(sharded.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0))
    assert_same([sharded.predict(X, verbose=0)], [plain.predict(X, verbose=0)])

    moments = [v.value for v in sharded.optimizer.variables if v.value.size == 64 * 128]
    assert len(moments) == 2
    assert all(m.addressable_shards[0].data.size == m.size // 8 for m in moments)


def test_steps_per_execution_and_training_on(mesh):
    plain = make_model(adam(), steps_per_execution=2)
    sharded = shardstep.keras.shard(make_model(adam(), steps_per_execution=2), mesh)
    for _ in range(2):  # a second fit goes on where the first stopped
        theirs, ours = fit(plain, epochs=1), fit(sharded, epochs=1)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
    assert_same(sharded.get_weights(), plain.get_weights())
    assert_same([sharded.train_on_batch(X[:64], Y[:64])[0]], [plain.train_on_batch(X[:64], Y[:64])[0]])


def test_sample_weights_and_saving(mesh, tmp_path):
    weights = random.uniform(size=200).astype(np.float32)

    def train(prepare, path):
        checkpoint = keras.callbacks.ModelCheckpoint(path)
        fit(prepare(make_model(adam())), sample_weight=weights, callbacks=[checkpoint])
        loaded = prepare(keras.saving.load_model(path))  # with the optimizer's state
        return fit(loaded, epochs=1)["loss"], loaded.get_weights()

    theirs, wanted = train(lambda model: model, tmp_path / "plain.keras")
    ours, trained = train(lambda model: shardstep.keras.shard(model, mesh), tmp_path / "sharded.keras")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert_same(trained, wanted)


def test_a_custom_train_step(mesh):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(10)

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "examples": data[0].shape[0]}, state

    def train(prepare):
        keras.utils.set_random_seed(0)
        model = Model()
        model.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return fit(prepare(model), batch_size=40)["loss"]

    np.testing.assert_allclose(train(lambda m: shardstep.keras.shard(m, mesh)), train(lambda m: m), rtol=1e-4)


def test_the_plan_of_a_model(mesh):
    model = shardstep.keras.shard(make_model(adam()), mesh)
    plan = shardstep.keras.plan(model, X[:64], Y[:64])
    assert plan.auxiliary_share > 0.8
    assert {leaf.role for leaf in plan.leaves} >= {"weight", "auxiliary", "batch"}


def test_errors(mesh):
    with pytest.raises(shardstep.ShardstepError, match="compile the model first"):
        shardstep.keras.shard(keras.Sequential([keras.layers.Dense(1)]), mesh)
    with pytest.raises(shardstep.ShardstepError, match="run_eagerly"):
        shardstep.keras.shard(make_model(run_eagerly=True), mesh)
    with pytest.raises(shardstep.ShardstepError, match="not sharded yet"):
        shardstep.keras.plan(make_model(), X, Y)
