"""A run that is stopped, killed or finished goes on where it was."""

from __future__ import annotations

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import mesh_of

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint import saving, staging
from shardstep._src.tools import training as module


def create():
    return {"w": jnp.ones((16, 8)), "n": jnp.asarray(0)}


def update(state, batch):
    return {"w": state["w"] * 0.9 + jnp.mean(batch), "n": state["n"] + 1}, jnp.sum(state["w"])


def batch(i):
    return jnp.full((16, 2), i, jnp.float32)


def started(path, **options):
    step = shardstep.shard(update, mesh_of(8))
    return step, shardstep.training(path, step, create, batch(0), **options)


def run_to(path, total, stop=None, **options):
    step, run = started(path, **options)
    seen = []
    with run:
        for i in run.steps(total):
            run.state, loss = step(run.state, batch(i))
            run.log(loss=loss)
            seen.append(i)
            if i == stop:
                os.kill(os.getpid(), signal.SIGTERM)
    return run, seen


def test_a_run_goes_on_where_it_stopped(tmp_path, capfd):
    before = signal.getsignal(signal.SIGTERM)
    run, seen = run_to(tmp_path, 20, stop=6, save_every=4, keep=1, show_every=0)
    assert run.preempted and seen == list(range(7))
    assert shardstep.latest_step(tmp_path) == 7 and sorted(p.name for p in tmp_path.iterdir()) == ["7"]
    assert signal.getsignal(signal.SIGTERM) is before
    run, seen = run_to(tmp_path, 10, save_every=4, show_every=0)
    assert not run.preempted and seen == [7, 8, 9]
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == [7, 8, 10]  # every fourth, and the last
    plain = create()
    for i in range(10):
        plain, loss = jax.jit(update)(plain, batch(i))
    np.testing.assert_allclose(np.asarray(run.state["w"]), np.asarray(plain["w"]), rtol=1e-6)
    assert int(run.state["n"]) == 10
    shown = capfd.readouterr().out
    assert "preempted at step 7: saved" in shown and "resumed at step 7" in shown
    assert f"step 9 loss {float(loss):.6f}" in shown and "steps/s" in shown and "step 8 (" in shown


def test_an_error_in_the_loop_keeps_what_was_saved(tmp_path):
    step, run = started(tmp_path, save_every=2)
    with pytest.raises(ZeroDivisionError), run:
        for i in run.steps(9):
            run.state, _ = step(run.state, batch(i))
            if i == 4:
                raise ZeroDivisionError
    assert shardstep.latest_step(tmp_path) == 4


@pytest.fixture
def gate(monkeypatch):
    """Holds back what is written, before it gets its name, until it is set."""
    opened = threading.Event()
    named = staging.OnDisk.commit
    monkeypatch.setattr(staging.OnDisk, "commit", lambda self: (opened.wait(60), named(self))[1])
    return opened


def behind(path, background):
    """How many steps a kill would cost, asked after each of 12."""
    step, run = started(path, save_every=3, background=background)
    with run:
        for i in run.steps(12):
            run.state, _ = step(run.state, batch(i))
            yield i + 1 - (shardstep.latest_step(path) or 0)


def test_in_the_background_no_kill_costs_more_than_twice_save_every(tmp_path, gate):
    """Checkpoints that take for ever: the loop goes on up to the next save, and waits there for the one before."""
    lost = behind(tmp_path, True)
    assert [next(lost) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    threading.Timer(0.2, gate.set).start()
    assert 1 <= next(lost) <= 4  # step 3 is there, and step 6 perhaps
    assert max(lost) <= 6


def test_where_saves_are_waited_for_no_kill_costs_more_than_save_every(tmp_path):
    assert list(behind(tmp_path, False)) == [1, 2, 3] * 4


def test_a_save_is_called_saved_when_it_is_whole(tmp_path, gate, capfd):
    step, run = started(tmp_path, save_every=2, show_every=0)
    with run:
        for i in run.steps(6):
            run.state, loss = step(run.state, batch(i))
            if i == 3:
                gate.set()
                saving.finish()
            run.log(loss=loss)
    shown = capfd.readouterr().out.splitlines()
    assert "saving step 2 (" in shown[2] and "saved step 2 (" in shown[3]


def test_minutes_become_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    schedule = module._Schedule(None, 1.0)
    schedule.begin(0)
    saved = []
    for n in range(1, 200):
        clock[0] += 2.0  # seconds per step: thirty make a minute
        if schedule.is_due(n):
            saved.append(n)
            schedule.saved(n)
    assert saved == [30, 60, 90, 120, 150, 180]


def test_arguments_that_make_no_sense(tmp_path):
    step = shardstep.shard(update, mesh_of(8))
    with pytest.raises(ShardstepError, match=r"a step that shardstep\.shard returned"):
        shardstep.training(tmp_path, update, create, batch(0))
    for wrong in (dict(save_every=0), dict(save_minutes=-1), dict(keep=0), dict(keep_every=3)):
        with pytest.raises(ShardstepError, match=r"use a number|pass keep="):
            shardstep.training(tmp_path, step, create, batch(0), **wrong)
    shardstep.save(tmp_path / "one", create())
    with pytest.raises(ShardstepError, match="is one checkpoint, without a number"):
        shardstep.training(tmp_path / "one", step, create, batch(0))
