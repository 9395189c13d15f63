"""Any step, sharded, gives the numbers of the plain step: random programs (see grammar.py) against `jax.jit`."""

from __future__ import annotations

import functools

import grammar
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import shardstep

pytestmark = pytest.mark.usefixtures("quick_to_compile")

STEPS = 2  # the second runs on the state of the first, in the layout it rests in
TOLERANCE, TOLERANCE_BF16 = 1e-4, 0.06  # of a leaf's largest value, or of SMALL where that is larger
SMALL = 0.25
ROUNDING = 1e-6  # a relative change of the weights that rounding errors may amount to

# One example is one program: five of the profile's worth make 10 programs of each kind, 100 for `make test-all`.
many = settings(max_examples=5 * settings().max_examples)
weights = st.sampled_from(["replicated", "sharded"])
groups = st.sampled_from([None, None, 2, 4])  # for eight replicas


@many
@given(program=grammar.programs(training=False), weights=weights, group=groups)
def test_any_state_and_metrics(program, weights, group):
    agrees(program, weights, group)


@many
@given(program=grammar.programs(training=True), weights=weights, group=groups)
def test_gradients_and_updates(program, weights, group):
    agrees(program, weights, group)


def agrees(program: grammar.Program, weights: str, group: int | None) -> None:
    arguments = program.arguments()
    plain = jax.jit(program.step())
    sharded = shardstep.shard(
        program.step(),
        mesh_of(program.replicas),
        batch_argnums=(1, 2),
        batch_axis=program.batch_axes,
        weights=weights,
        group=group if program.replicas == 8 else None,
        options=shardstep.Options(min_shard_bytes=64),
    )
    off = differences(run(plain, *arguments), run(sharded, *arguments))
    tolerance = TOLERANCE_BF16 if program.rounds_to_bf16 else TOLERANCE
    wrong = {where: by for where, by in off.items() if not by <= tolerance}
    if wrong and ill_conditioned(program, plain, wrong):
        event("ill-conditioned")
    else:
        assert not wrong


@functools.cache
def mesh_of(replicas: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:replicas]), ("data",))


def run(step, state, *batch):
    """The state and metrics of every step."""
    outputs = []
    for _ in range(STEPS):
        state, metrics = step(state, *batch)
        outputs.append(jax.tree.map(to_numpy, (state, metrics)))
    return outputs


def to_numpy(x) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def differences(expected, found) -> dict[str, float]:
    """How far every leaf is off; infinitely, if it is no float and not exactly equal."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    pairs = zip(leaves, jax.tree.leaves(found), strict=True)
    return {jax.tree_util.keystr(path): distance(a, b) for (path, a), b in pairs}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return np.inf
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.max(gap, initial=0.0) / max(np.max(np.abs(a), initial=0.0), SMALL))


def ill_conditioned(program: grammar.Program, plain, wrong: dict[str, float]) -> bool:
    """Is the plain step itself off by as much, when its weights differ by a rounding error?

    The grammar keeps clear of jumps and of growing errors, but a sum may come to lie on a kink by accident.
    """
    state, *batch = program.arguments()
    expected = run(plain, state, *batch)
    unclear = dict.fromkeys(wrong, 0.0)
    for seed in range(8):
        moved = {name: x if x.dtype != jnp.float32 else perturbed(x, seed) for name, x in state.items()}
        off = differences(expected, run(plain, moved, *batch))
        unclear = {where: max(unclear[where], off[where]) for where in wrong}
    return all(np.isfinite(off) and off <= 10 * unclear[where] for where, off in wrong.items())


def perturbed(x: jax.Array, seed: int) -> jax.Array:
    noise = np.random.default_rng(seed).normal(size=x.shape)
    return (x * (1 + ROUNDING * noise)).astype(x.dtype)
