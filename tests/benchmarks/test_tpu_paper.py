"""The paper's models, and the module that the closed original is given; libtpu is not asked here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paper_models
import pytest
import replica_mode
import tpu_paper


def size(model):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


def test_the_models_have_the_sizes_of_the_papers():
    assert size(paper_models.resnet50(16)) == 25_557_032
    assert 205e6 < size(paper_models.transformer_big(256)) < 215e6
    tokens = paper_models.transformer_big(256).batch(512)
    assert tokens["source"].size == 512 * 256 and tokens["target"].shape[1] == tokens["source"].shape[1] + 1


def small_resnet(monkeypatch):
    monkeypatch.setattr(paper_models, "STAGES", (1, 1))
    model, key = paper_models.resnet50(2), jax.random.key(0)
    images = jax.random.normal(key, (8, 32, 32, 3))
    return model, {"image": images, "label": jnp.arange(8)}


def small_transformer(monkeypatch):
    for name, value in {"WIDTH": 32, "HEADS": 2, "HIDDEN": 64, "LAYERS": 1, "VOCABULARY": 128, "LENGTH": 8}.items():
        monkeypatch.setattr(paper_models, name, value)
    model, key = paper_models.transformer_big(16), jax.random.key(0)
    source, target = (jax.random.randint(key, (8, length), 0, 128) for length in (8, 9))
    return model, {"source": source, "target": target}


@pytest.mark.parametrize("create", [small_resnet, small_transformer])
def test_a_replica_of_the_original_does_the_work_of_the_whole_step(monkeypatch, create):
    """Four replicas under `vmap`: gradients, and BatchNorm's statistics, go through sums over all of them."""
    monkeypatch.setattr(paper_models, "half", lambda x: x)  # in float32 the two differ by nothing but the order of sums
    model, batch = create(monkeypatch)
    monkeypatch.setattr(replica_mode._sum, "bind", lambda x, replicas: jax.lax.psum(x, "replicas"))
    whole = tpu_paper.whole_batch(model, optax.sgd(1.0), 4)
    part = tpu_paper.of_a_replica(model, optax.sgd(1.0), 4)
    keys = iter(jax.random.split(jax.random.key(1), 200))
    state = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape) + (x.ndim == 1), whole.state)
    want, _ = jax.jit(whole.step)(state, batch)
    shares = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    got = jax.jit(jax.vmap(part.step, in_axes=(None, 0), axis_name="replicas"))(state, shares)
    for a, b, old in zip(*map(jax.tree.leaves, (got.params, want.params, state.params)), strict=True):
        np.testing.assert_array_equal(a[0], a[3])
        moved = np.abs(np.asarray(b) - np.asarray(old)).max()
        np.testing.assert_allclose(a[0], b, atol=1e-3 * moved + 1e-6, rtol=0)


def test_the_module_of_the_original_marks_its_state_and_sums_over_replicas():
    def step(state, x):
        return state - replica_mode.sum_over_replicas(x.sum(0), 32)

    shapes = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    text = str(replica_mode.training_loop(step, *shapes, 32))
    assert "mhlo.num_replicas = 32" in text and "stablehlo.while" in text and "stablehlo.all_reduce" in text
    (signature,) = [line for line in text.splitlines() if "@main(" in line]
    state, batch = signature.split("%arg1")
    assert "mhlo.parameter_replication = [true]" in state and "parameter_replication" not in batch


def test_every_cell_is_wanted_once_and_can_be_made():
    cells = list(tpu_paper.wanted())
    assert len(cells) == len(set(cells))
    for topology, workload, optimizer, variant in cells:
        assert topology in tpu_paper.TOPOLOGIES and workload in tpu_paper.MODELS
        assert optimizer in tpu_paper.OPTIMIZERS and variant in tpu_paper.VARIANTS
