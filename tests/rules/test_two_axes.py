"""Equations on two axes: what the second axis cuts is the first one's block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulate import check_decisions, cut_by_axes

from shardstep._src.core.layout import PARTIAL, Array, Split
from shardstep._src.planning.propagation.rule_queries import localise, nests, valid_decisions
from shardstep._src.rules import Site

VALUE = jnp.arange(12, dtype=jnp.float32).reshape(2, 6)


def summed(inner: Split):
    """A sum of six columns, padded to eight along the outer axis, and what the inner axis may decide after that."""
    eqn = jax.make_jaxpr(lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None))(VALUE).eqns[0]
    site = Site(eqn.primitive, eqn.params, (Array((2, 6), VALUE.dtype),), (Array((), VALUE.dtype),), 2)
    outer = next(d for d in valid_decisions(site, (Split(1, extent=8),)) if d.results == (PARTIAL,))
    nested = localise(site, outer)
    following = Site(nested.primitive, nested.params, nested.inputs, nested.outputs, 2)
    return eqn, site, outer, [d for d in valid_decisions(following, (inner,)) if d.operands == (inner,)]


@pytest.mark.parametrize("inner", [Split(1), Split(0)])
def test_padding_is_found_after_a_second_cut(inner):
    eqn, site, outer, offered = summed(inner)
    assert any(nests([outer], d) for d in offered)
    for decision in offered:
        check_decisions(eqn, site, [outer, decision], [VALUE], [VALUE.sum()], np.random.default_rng(0), (2, 2))


def test_padding_is_not_cut_by_rows_from_all_over_a_block():
    """The first index of such a block does not say where the padding is: poison would be added up."""
    eqn, site, outer, offered = summed(Split(1, outer=2))
    assert offered and not any(nests([outer], d) for d in offered)
    with pytest.raises(AssertionError):
        check_decisions(eqn, site, [outer, offered[0]], [VALUE], [VALUE.sum()], np.random.default_rng(0), (2, 2))


def test_terms_are_as_large_as_the_value_beside_padding():
    """What stands in the padding of the outer axis says nothing of how a small value is cut into terms (by fuzzing)."""
    value = np.asarray([0.002, -0.0006, 0.003], jnp.bfloat16)
    for seed in range(20):
        blocks = cut_by_axes(value, (Split(0, extent=4), PARTIAL), (2, 2), np.random.default_rng(seed))
        assert abs(float(blocks[2][0] + blocks[3][0]) - 0.003) < 1e-4
