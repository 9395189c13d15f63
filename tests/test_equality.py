"""Promise 1, same numbers: every program of the zoo, plain and sharded, for three chained steps.

And what a plan owes every program: never more bytes on the wire than the all-reduce program, and no fallback that is
not listed here with its reason.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import zoo
from agreement import F32, assert_agree
from jax.sharding import Mesh

import shardstep

NAMED = (
    "transformer",
    "resnet",
    "lstm",
    "vae",
    "clip",
    "recommender",
    "masked_loss",
    "per_example_clip",
    "handwritten",
)
OTHERS = tuple(name for name in zoo.ZOO if name not in NAMED)

EXAMPLES = 120  # a batch that 1, 2, 3, 5 and 8 replicas divide, so that one plain run serves them all


@functools.lru_cache(maxsize=2)
def program(name: str) -> zoo.Program:
    return zoo.ZOO[name](batch=EXAMPLES)


@functools.lru_cache(maxsize=2)
def plain(name: str):
    return zoo.run(program(name))


def data_mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def sharded(name: str, mesh: Mesh, **how) -> shardstep.ShardedStep:
    p = program(name)
    return shardstep.shard(p.step, mesh, batch_argnums=p.batch_argnums, batch_axis=p.batch_axis, **how)


def check(name: str, step: shardstep.ShardedStep) -> shardstep.Plan:
    p = program(name)
    plan = step.plan(*p.state, *p.batches[0])
    state, metrics = zoo.run(p, step)
    expected, expected_metrics = plain(name)
    assert_agree((p.state, expected_metrics), (state, metrics), (expected, expected_metrics), F32)
    return plan


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", NAMED)
def test_named_programs(name, replicas):
    check(name, sharded(name, data_mesh(replicas)))


@pytest.mark.parametrize("replicas", [3, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_programs(name, replicas):
    check(name, sharded(name, data_mesh(replicas)))
