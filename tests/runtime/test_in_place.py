"""Which weights leave a step as a gather made them, and that the operation behind it changes no bit of them.

(What it spares the TPU's compiler is in test_tpu.py.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import mesh_of

import shardstep
from shardstep._src.runtime.in_place import gathered_outputs, rewritten

OPTIMIZER = optax.adam(1e-3)
WIDE, NARROW = 1024, 512


def step(state, x):
    def loss(weights):
        y = x
        for name in sorted(weights):
            y = jnp.tanh(y @ weights[name])
        return jnp.mean(y**2)

    weights, moments = state
    value, grads = jax.value_and_grad(loss)(weights)
    changes, moments = OPTIMIZER.update(grads, moments, weights)
    return (optax.apply_updates(weights, changes), moments), value


def schedule(rest):
    shapes = {"a": (WIDE, WIDE), "b": (WIDE, NARROW), "c": (NARROW, 32), "d": (32, NARROW)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = weights, jax.eval_shape(OPTIMIZER.init, weights)
    sharded = shardstep.shard(step, mesh_of(4), batch_argnums=1, weights=rest)
    program, _ = sharded.program((state, jax.ShapeDtypeStruct((16, WIDE), jnp.float32)), {})
    return program.decided.schedule


def shapes_of(found, outputs):
    return sorted(outputs[o].array.shape for o in found)


def test_weights_that_are_gathered_alone():
    """Small ones share a gather and are cut out of its result: that is an operation already. Moments stay split."""
    replicated = schedule("replicated")
    outputs = replicated.program.outputs
    assert shapes_of(gathered_outputs(replicated, 0), outputs) == [(WIDE, NARROW), (WIDE, WIDE)]
    assert shapes_of(gathered_outputs(replicated, 4 * WIDE * WIDE), outputs) == [(WIDE, WIDE)]
    assert not gathered_outputs(replicated, 4 * WIDE * WIDE + 1)


def test_weights_that_rest_sharded_are_not_gathered_to_leave():
    assert not gathered_outputs(schedule("sharded"), 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_bit_is_kept(dtype):
    """NaNs with their payload, both zeros, the smallest floats."""
    word = np.dtype(f"uint{jnp.finfo(dtype).bits}")
    sign = 1 << (8 * word.itemsize - 1)
    inf = int(np.asarray(jnp.inf, dtype).view(word))
    bits = np.array([0, sign, 1, sign | 1, inf, sign | inf, inf | 1, inf | sign | 3, inf - 1], word)
    kept = np.asarray(jax.jit(rewritten)(bits.view(jnp.dtype(dtype)))).view(word)
    np.testing.assert_array_equal(kept, bits)
