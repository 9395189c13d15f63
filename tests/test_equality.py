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

EXAMPLES = 120  # a batch that 1, 2, 3, 5 and 8 replicas divide, so that one plain run serves them all

# On all these numbers of replicas; the other programs on 8, and on 3 where they compile fast.
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
SLOW_TO_COMPILE = ("transformer_bf16", "transformer_remat", "transformer_scanned_layers", "vit", "moe", "unet")
OTHERS = tuple(name for name in zoo.ZOO if name not in NAMED)
RUNS = (
    *((name, n) for name in NAMED for n in (1, 2, 3, 5, 8)),
    *((name, n) for name in OTHERS for n in (3, 8) if n == 8 or name not in SLOW_TO_COMPILE),
)

# In bf16 each replica rounds its term of a gradient before the terms are added: eight roundings of 2^-9, and twice that
# in a square. `jax.jit` itself, given the same batch split over eight devices, is as far from one device.
HALF = 2**-4
HALF_METRICS = 2**-7
HALF_PRECISION = ("transformer_bf16", "ema_and_masters", "loss_scaling")

# What must be gathered, and why.
FALLBACKS = {
    "mixup": {"sort"},  # a random permutation of the examples is a sort over the batch
    "accumulation_loop": {"reshape"},  # two microbatches of adjoining examples: the first is with the first replicas
}


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """The programs run three times and are compiled once: half of the time went into optimising them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.lru_cache(maxsize=2)
def program(name: str) -> zoo.Program:
    return zoo.ZOO[name](batch=EXAMPLES)


@functools.lru_cache(maxsize=2)
def plain(name: str):
    """The states of the plain run, the first included, and the metrics of every step."""
    p = program(name)
    step, states, history = p.jit(p.step), [p.state], []
    for batch in p.batches:
        *state, metrics = step(*states[-1], *batch)
        states.append(tuple(state))
        history.append(metrics)
    return states, history


def replicas(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def shard(name: str, mesh: Mesh, **how) -> shardstep.ShardedStep:
    p = program(name)
    return shardstep.shard(p.step, mesh, batch_argnums=p.batch_argnums, batch_axis=p.batch_axis, **how)


def check_equal(name: str, step: shardstep.ShardedStep) -> None:
    state, history = zoo.run(program(name), step)
    states, expected = plain(name)
    half = name in HALF_PRECISION
    assert_agree(states, state, HALF if half else F32)
    assert_agree([expected, expected], history, HALF_METRICS if half else F32)


def check_plan(name: str, plan: shardstep.Plan) -> None:
    wire = plan.wire_bytes
    assert wire.sharded <= wire.replicated * 1.001 + 1024
    assert {f.primitive for f in plan.fallbacks} <= FALLBACKS.get(name, set()), plan.fallbacks


@pytest.mark.parametrize(("name", "n"), RUNS)
def test_same_numbers(name, n):
    step = shard(name, replicas(n))
    check_equal(name, step)
    check_plan(name, step.plan(*program(name).state, *program(name).batches[0]))


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", ["resnet", "recommender", "handwritten", "ema_and_masters", "steps_in_a_scan"])
def test_weights_that_rest_sharded(name, n):
    step = shard(name, replicas(n), weights="sharded")
    check_equal(name, step)
    check_plan(name, step.plan(*program(name).state, *program(name).batches[0]))


@pytest.mark.parametrize("name", ["lstm", "vae", "handwritten", "accumulation_scan"])
def test_two_data_axes(name):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("hosts", "chips"))
    step = shard(name, mesh)
    check_equal(name, step)
    check_plan(name, step.plan(*program(name).state, *program(name).batches[0]))


@pytest.mark.parametrize("name", ["masked_loss", "handwritten"])
def test_groups(name):
    """Between groups there is one more all-reduce, of shards: it may cost more than one all-reduce of everything."""
    check_equal(name, shard(name, replicas(8), group=4))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_batch_is_found(name):
    p = program(name)
    found = shardstep.shard(p.step, replicas(8), batch_axis=p.batch_axis)
    plans = [step.plan(*p.state, *p.batches[0]) for step in (found, shard(name, replicas(8)))]
    assert [leaf.role for leaf in plans[0].leaves] == [leaf.role for leaf in plans[1].leaves]
