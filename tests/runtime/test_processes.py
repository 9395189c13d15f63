"""Several real processes: the same numbers as one, one checkpoint for any number of them, and an end when one dies."""

from __future__ import annotations

import json
import runpy
import signal
import sys

import jax
import numpy as np
import pytest
from launch import EXAMPLE, WORKERS, by_hand, free_port, open_mpi, slurm, started
from steps import assert_same, batch, mesh_of

import shardstep

sys.path.append(str(WORKERS))
from noisy import noisy_state, noisy_step

pytestmark = pytest.mark.multiprocess

HEARTBEAT = 10  # seconds; JAX's own default is 100


# -- the same numbers --------------------------------------------------------------------------------------------------


SHORT, MORE = [(2, 2)], [(2, 1), (4, 1), (4, 2)]


@pytest.mark.parametrize("count, devices", [*SHORT, *(pytest.param(*c, marks=pytest.mark.thorough) for c in MORE)])
def test_same_as_one_process(tmp_path, count, devices):
    start, _ = jax.jit(noisy_step)(noisy_state(), batch(9))
    shardstep.save(tmp_path / "alone", start)
    port = free_port()
    commands = [[WORKERS / "equality.py", port, count, i, devices, tmp_path] for i in range(count)]
    with started(commands, tmp_path / "logs") as processes:
        processes.succeed()
    state, losses = noisy_state(), []
    for i in range(6):
        state, loss = jax.jit(noisy_step)(state, batch(i))
        losses.append(float(loss))
    _, resumed = jax.jit(noisy_step)(start, batch(0))
    for i in range(count):
        seen = json.loads((tmp_path / f"seen-{i}.json").read_text())
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(seen["restored"], float(resumed), rtol=1e-5)
        assert seen["replicas"] == count * devices
        assert seen["fresh"] and seen["checked"]
        assert seen["held"] == 1 / count  # of the optimizer's state, in each process
        assert "is not the same on all processes" in seen["refused"][0]
        assert "parts of the batch with different shapes" in seen["refused"][1]
    plan = shardstep.shard(noisy_step, mesh_of(3)).plan(noisy_state(), batch(0))
    assert_same(shardstep.restore(tmp_path / "saved", plan), state)


def test_per_replica_steps_sharded_weights_groups_and_uneven_batches(tmp_path):
    """Each process compares what it holds with one plain run (`workers/variants.py`), and fails if it differs."""
    port = free_port()
    with started([[WORKERS / "variants.py", port, 2, i, 2] for i in range(2)], tmp_path) as processes:
        processes.succeed()


# -- the example ------------------------------------------------------------------------------------------------------


def options(tmp_path, *more):
    common = ["--steps", 8, "--save-every", 2, "--heartbeat", HEARTBEAT, "--checkpoints", tmp_path / "checkpoints"]
    return [*common, "--devices", 1, *more]


def unbroken_losses(steps=8):
    """The schedule of the example in one plain loop."""
    example = runpy.run_path(str(EXAMPLE))
    state, losses = example["create_state"](), []
    for i in range(steps):
        state, loss = jax.jit(example["train_step"])(state, example["whole_batch"](i))
        losses.append(float(loss))
    return losses


def printed_losses(text):
    """Step -> loss, of what the example printed."""
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(line[1]): float(line[3]) for line in lines}


@pytest.mark.parametrize("cluster", [slurm, pytest.param(open_mpi, marks=pytest.mark.thorough)])
def test_example_in_a_cluster_that_jax_detects(tmp_path, cluster):
    commands = [[EXAMPLE, *options(tmp_path)]] * 2
    with started(commands, tmp_path / "logs", cluster(2)) as processes:
        processes.succeed()
        printed = printed_losses(processes.output())
    np.testing.assert_allclose([printed[i] for i in range(8)], unbroken_losses(), rtol=1e-5)
    assert shardstep.latest_step(tmp_path / "checkpoints") == 8


# -- a process dies ----------------------------------------------------------------------------------------------------


def resumes(tmp_path, count, at_least):
    """Started again with fewer processes, it goes on from a whole checkpoint along the same curve."""
    with started([[EXAMPLE, *options(tmp_path, *hand)] for hand in by_hand(count)], tmp_path / "again") as processes:
        processes.succeed()
        text = processes.output()
    printed = printed_losses(text)
    first = min(printed)
    assert f"resumed at step {first}" in text and first >= at_least and first % 2 == 0
    np.testing.assert_allclose([printed[i] for i in range(first, 8)], unbroken_losses()[first:], rtol=1e-5)
    return text


def test_killed_in_training_and_resized(tmp_path):
    """4 processes, then 2, then 3; two of them are killed. The losses are those of an unbroken run."""
    seen = {}
    for count, until in ((4, "step 4 "), (2, "step 7 ")):
        commands = [[EXAMPLE, *options(tmp_path, *hand), "--steps", 10**6] for hand in by_hand(count)]
        with started(commands, tmp_path / f"logs-{count}") as processes:
            processes.until(until)
            processes.kill(1)
            codes = processes.wait()  # the others notice, sooner or later
            seen |= printed_losses(processes.output())
        assert all(codes), codes  # nobody takes this for success
        at = shardstep.latest_step(tmp_path / "checkpoints")
    last = [[EXAMPLE, *options(tmp_path, *hand), "--steps", at + 3] for hand in by_hand(3)]
    with started(last, tmp_path / "logs-3") as processes:
        processes.succeed()
        assert "resumed at step" in processes.output()
        seen |= printed_losses(processes.output())
    np.testing.assert_allclose([seen[i] for i in range(at + 3)], unbroken_losses(at + 3), rtol=1e-4)


def test_told_to_stop(tmp_path):
    """SIGTERM to one of them: all save at the same step, and end well."""
    commands = [[EXAMPLE, *options(tmp_path, *hand), "--steps", 10**6, "--save-every", 10**5] for hand in by_hand(2)]
    with started(commands, tmp_path / "logs") as processes:
        processes.until("step 4 ")
        processes.running[1].send_signal(signal.SIGTERM)
        processes.succeed(60)
        text = processes.output()
    at = shardstep.latest_step(tmp_path / "checkpoints")
    assert f"preempted at step {at}: saved" in text and "stopped" in text and at == max(printed_losses(text)) + 1


@pytest.mark.parametrize("victim, where", [(1, "writing"), (0, "sealing")])
def test_killed_in_a_save(tmp_path, victim, where):
    commands = [[WORKERS / "dies_in_save.py", victim, where, *options(tmp_path, *hand)] for hand in by_hand(2)]
    with started(commands, tmp_path / "logs") as processes:
        processes.running[victim].wait(120)
        codes = processes.wait()  # the others notice, sooner or later
    assert all(codes), codes
    assert shardstep.latest_step(tmp_path / "checkpoints") == 2
    left = list((tmp_path / "checkpoints").glob("4.shardstep-*"))  # what it died on
    assert left or victim != 0  # unless the first process lived to tidy up
    assert ("skipping the checkpoint" in resumes(tmp_path, 1, at_least=2)) == bool(left)
