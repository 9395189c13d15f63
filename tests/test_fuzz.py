"""Any step, sharded, gives the numbers of the plain step: random programs (see grammar.py) against `jax.jit`."""

from __future__ import annotations

import functools

import grammar
import jax
import jax.numpy as jnp
import numpy as np
import shardstep
from hypothesis import given, settings
from hypothesis import strategies as st

STEPS = 2  # the second runs on the state of the first, in the layout it rests in
TOLERANCE, TOLERANCE_BF16 = 1e-4, 0.06  # of a leaf's largest value, or of SMALL where that is larger
SMALL = 0.25
ROUGH = 1e-6  # a relative change of the weights that a rounding error may amount to

# One example is one program: five of the profile's worth make 100 programs of each kind in CI.
many = settings(max_examples=5 * settings().max_examples)
layouts = st.sampled_from(["replicated", "sharded"])


@many
@given(grammar.programs(training=False), layouts)
def test_any_state_and_metrics(program, weights):
    agrees(program, weights)


@many
@given(grammar.programs(training=True), layouts)
def test_gradients_and_updates(program, weights):
    agrees(program, weights)


def agrees(program: grammar.Program, weights: str) -> None:
    arguments = program.arguments()
    plain = jax.jit(program.step())
    sharded = shardstep.shard(
        program.step(),
        mesh_of(program.replicas),
        batch_argnums=(1, 2),
        batch_axis=program.batch_axes,
        weights=weights,
        options=shardstep.Options(min_shard_bytes=64),
    )
    expected, found = run(plain, *arguments), run(sharded, *arguments)
    tolerance = TOLERANCE_BF16 if program.rounds_to_bf16 else TOLERANCE
    wrong = differences(expected, found, tolerance)
    assert not wrong or ill_conditioned(program, plain, wrong), "\n".join(wrong.values())


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


def differences(expected, found, tolerance: float) -> dict[str, str]:
    """Leaf by leaf what is wrong: floats beyond the tolerance, anything else that is not exactly equal."""
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    wrong = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, a), b in zip(leaves, jax.tree.leaves(found), strict=True):
        where = jax.tree_util.keystr(path)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            wrong[where] = f"{where}: {b.dtype}{b.shape} for {a.dtype}{a.shape}"
        elif not jnp.issubdtype(a.dtype, jnp.floating):
            if not np.array_equal(a, b):
                wrong[where] = f"{where}: {a.tolist()} became {b.tolist()}"
        elif not (off := distance(a, b)) <= tolerance:
            wrong[where] = f"{where}: off by {off:.3g}\n{a}\nbecame\n{b}"
    return wrong


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, as a part of the largest value."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.max(gap, initial=0.0) / max(np.max(np.abs(a), initial=0.0), SMALL))


def ill_conditioned(program: grammar.Program, plain, wrong: dict[str, str]) -> bool:
    """Does the plain step itself give other numbers for weights that differ by a rounding error?

    The grammar keeps clear of jumps and of growing errors, but a sum may come to lie on a kink by accident. Asked only of
    what differs, so that all other programs are held to the tolerance.
    """
    state, *batch = program.arguments()
    expected = run(plain, state, *batch)
    unclear: set[str] = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        moved = {
            name: x * (1 + ROUGH * rng.normal(size=x.shape)).astype(x.dtype) if x.dtype == jnp.float32 else x
            for name, x in state.items()
        }
        unclear |= differences(expected, run(plain, moved, *batch), TOLERANCE / 10).keys()
    return wrong.keys() <= unclear
