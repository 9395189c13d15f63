"""A gradient that is scattered in pieces arrives as if it had been scattered whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from steps import mesh_of

from shardstep._src.core.layout import Axis
from shardstep._src.core.moves import scatter


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("shape, dim", [((24, 10), 0), ((10, 24), 1), ((240,), 0)])
@pytest.mark.parametrize("message_bytes", [4, 100, 130])  # a number, a piece that divides, one that does not
def test_scattered_in_pieces(replicas, shape, dim, message_bytes):
    mesh = mesh_of(replicas)
    (name,) = mesh.axis_names
    terms = np.random.default_rng(0).standard_normal((replicas, *shape)).astype(np.float32)

    def run(axis):
        def body(x):
            return scatter(x[0], dim, axis)

        out = PartitionSpec(*[None] * dim, name)
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(name), out_specs=out))

    axis = Axis((name,), replicas, message_bytes=message_bytes)
    np.testing.assert_allclose(run(axis)(jnp.asarray(terms)), terms.sum(0), rtol=1e-5, atol=1e-6)
    assert "collective_permute" in run(axis).lower(terms).as_text()
    assert "collective_permute" not in run(axis._replace(message_bytes=0)).lower(terms).as_text()
