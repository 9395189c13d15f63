"""A gradient that is scattered in pieces arrives as if it had been scattered whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from steps import mesh_of

from shardstep._src.core.backend import Backend
from shardstep._src.core.layout import Axis
from shardstep._src.runtime.collectives import scatter

PLACES = [((24, 10), 0), ((10, 24), 1), ((240,), 0)]
SIZES = [4, 100, 130]  # a number, a piece that divides, one that does not


def every_place_and_size():
    """Each place and each size on three replicas; all of them together, and on other replicas, are thorough."""
    for shape, dim in PLACES:
        for size in SIZES:
            for replicas in (2, 3, 4):
                kept = replicas == 3 and ((shape, dim) == PLACES[0] or size == SIZES[-1])
                yield pytest.param(replicas, shape, dim, size, marks=[] if kept else pytest.mark.thorough)


@pytest.mark.parametrize(("replicas", "shape", "dim", "message_bytes"), every_place_and_size())
def test_scattered_in_pieces(replicas, shape, dim, message_bytes):
    mesh = mesh_of(replicas)
    (name,) = mesh.axis_names
    terms = np.random.default_rng(0).standard_normal((replicas, *shape)).astype(np.float32)

    def run(axis):
        def body(x):
            return scatter(x[0], dim, axis)

        out = PartitionSpec(*[None] * dim, name)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(name), out_specs=out))

    axis = Axis((name,), replicas, Backend(message_bytes=message_bytes))
    np.testing.assert_allclose(run(axis)(jnp.asarray(terms)), terms.sum(0), rtol=1e-5, atol=1e-6)
    assert "collective_permute" in run(axis).lower(terms).as_text()
    assert "collective_permute" not in run(axis._replace(backend=Backend())).lower(terms).as_text()
