"""The timeline: the step in the order in which it happens, as long as it is predicted to take."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from steps import mesh_of

import shardstep
from shardstep._src.planning.timeline import PHASES, Segment, _joined

LAYERS, EXAMPLES = 6, 4096


def trained(forward):
    def step(weights, x):
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean(forward(w, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return step


def in_a_list(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def plan_of(forward, weights, examples=EXAMPLES, **how):
    x = jax.ShapeDtypeStruct((examples, 256), jnp.float32)
    return shardstep.shard(trained(forward), mesh_of(8), weights="sharded", **how).plan(weights, x)


SHAPE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
LISTED = plan_of(in_a_list, [SHAPE] * LAYERS, options=shardstep.Options(bucket_bytes=0))
SCANNED = plan_of(scanned, jax.ShapeDtypeStruct((LAYERS, 256, 256), jnp.float32))


@pytest.mark.parametrize("plan", [LISTED, SCANNED], ids=["in a list", "scanned"])
def test_the_segments_add_up_to_the_step(plan):
    for segments, total in (
        (plan.timeline, plan.step_seconds.sharded),
        (plan.timeline_before, plan.step_seconds.replicated),
    ):
        assert sum(s.seconds for s in segments) == pytest.approx(total)
    sent = sum(s.bytes for s in plan.timeline if s.what not in PHASES)
    assert sent == pytest.approx(plan.wire_bytes.sharded)


def test_each_layers_weight_is_gathered_where_the_layer_begins():
    """Not all weights in one block, in front of the forward pass or behind it."""
    kinds = [s.what for s in LISTED.timeline]
    forward = kinds[: kinds.index("backward")]
    assert forward[0] == "all-gather" and forward.count("all-gather") == forward.count("forward") == LAYERS
    assert all(a != b for a, b in itertools.pairwise(forward))


def test_a_loop_and_that_of_its_backward_pass_are_told_apart():
    """They come from one line of the user's."""
    loops = [s for s in SCANNED.timeline if s.loop]
    assert len({s.loop for s in loops}) == 1 and {s.times for s in loops} == {LAYERS}
    forward, backward = dict.fromkeys(s.visit for s in loops)
    assert {s.what for s in loops if s.visit == forward} == {"all-gather", "forward"}
    assert {s.what for s in loops if s.visit == backward} == {"all-gather", "backward", "reduce-scatter"}
    assert all(s.visit == 0 for s in SCANNED.timeline if not s.loop)


def test_forward_work_is_no_update_where_examples_visit_the_weights():
    """Few examples go to each replica's part of the weights: no value is split over examples then."""
    visited = plan_of(scanned, jax.ShapeDtypeStruct((LAYERS, 256, 256), jnp.float32), examples=64)
    assert {s.what for s in visited.timeline if s.loop} >= {"forward", "backward", "all-reduce"}
    assert not [s for s in visited.timeline if s.loop and s.what == "update"]
    assert visited.update_flops.sharded <= 2 * LAYERS * 256 * 256 / 8  # w - 0.1 * g
    assert visited.update_seconds.sharded < 0.1 * visited.step_seconds.sharded


def test_trifles_are_counted_where_their_phase_is():
    counter = Segment("update", 1, 4.0, seconds=1e-6)
    work = Segment("forward", 10, 1e6, seconds=1.0)
    update = Segment("update", 5, 1e5, seconds=0.5)
    joined = _joined([counter, work, Segment("all-gather", 1, 8.0, seconds=1e-9), update, counter])
    assert [s.what for s in joined] == ["forward", "all-gather", "update"]
    assert joined[-1].count == 7 and joined[-1].seconds == pytest.approx(0.500002)
