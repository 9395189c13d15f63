"""A run that is stopped, killed or finished goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import ROOT
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


def started(path, replicas=8, **options):
    step = shardstep.shard(update, mesh_of(replicas))
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


def behind(path, **options):
    """How many steps a kill would cost, asked after each of 12."""
    step, run = started(path, save_every=3, **options)
    with run:
        for i in run.steps(12):
            run.state, _ = step(run.state, batch(i))
            yield i + 1 - (shardstep.latest_step(path) or 0)


@pytest.fixture
def share(monkeypatch):
    """Says how long a save takes, of the time that the steps between two take."""
    return lambda value: monkeypatch.setattr(module._Pace, "_share", lambda self: self._last and value)


@pytest.mark.parametrize("takes", [0.001, 0.04, 1.0, 30.0])
def test_a_save_is_waited_for_where_that_costs_little_or_cannot_be_avoided(tmp_path, share, takes):
    share(takes)
    assert list(behind(tmp_path)) == [1, 2, 3] * 4


def test_where_waiting_would_cost_much_no_kill_costs_more_than_twice_save_every(tmp_path, share, gate, capfd):
    """From the second save on they take for ever: the loop goes on up to the next save, and waits there."""
    share(0.4)
    gate.set()
    lost = behind(tmp_path)
    assert [next(lost) for _ in range(5)] == [1, 2, 3, 1, 2]
    gate.clear()
    assert [next(lost) for _ in range(4)] == [3, 4, 5, 6]
    threading.Timer(0.2, gate.set).start()
    assert 1 <= next(lost) <= 4  # step 6 is there, and step 9 perhaps
    assert max(lost) <= 6
    assert capfd.readouterr().out.count("a checkpoint takes 40 % of the time between two: training goes on") == 1


def test_where_every_save_is_waited_for_no_kill_costs_more_than_save_every(tmp_path, share, capfd):
    share(0.4)
    assert list(behind(tmp_path, background=False)) == [1, 2, 3] * 4
    assert "training goes on" not in capfd.readouterr().out


def test_saves_slower_than_the_steps_between_them_are_waited_for(tmp_path, monkeypatch):
    """By the clock: three steps of milliseconds, and a disk that takes half a second."""
    named = staging.OnDisk.commit
    monkeypatch.setattr(staging.OnDisk, "commit", lambda self: (time.sleep(0.5), named(self))[1])
    assert list(behind(tmp_path)) == [1, 2, 3] * 4


def test_the_share_of_a_save_is_that_of_the_steps_between_two(monkeypatch):
    clock, pace = [0.0], module._Pace()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    assert pace.waits(pytest.fail)  # the first one: nothing is known
    for took, apart, waits in ((1.0, 25.0, True), (1.0, 4.0, False), (5.0, 4.0, True), (0.0, 0.0, True)):
        pace.saved(SimpleNamespace(seconds=took))
        clock[0] += apart
        assert pace.waits(lambda text: None) is waits


KILLED = """
import os, signal, sys, threading, time
sys.path[:0] = [{tests!r}, {tests!r} + "/tools"]
import jax
jax.config.update("jax_num_cpu_devices", 2)
import test_training as this
from shardstep._src.checkpoint import staging
from shardstep._src.checkpoint import saving
path, moment, saves = sys.argv[1], sys.argv[2], []
seal, named = saving._seal, staging.OnDisk.commit

def dies(where):
    time.sleep(0.5)  # whoever does not wait makes steps meanwhile
    if len(saves) == 3 and where == moment:
        os.kill(os.getpid(), signal.SIGKILL)

def sealed(*arguments):
    saves.append(1)
    dies("unsealed")
    seal(*arguments)

def commit(self):
    dies("unnamed")
    place = named(self)
    dies("named")
    return place

saving._seal, staging.OnDisk.commit = sealed, commit
step, run = this.started(path, 2, save_every=3, show_every=0)
with run:
    for i in run.steps(100):
        run.state, loss = step(run.state, this.batch(i))
        print("made", i + 1, flush=True)
"""


@pytest.mark.parametrize(("moment", "from_step"), [("unsealed", 6), ("unnamed", 9), ("named", 9)])
def test_a_kill_around_the_moment_a_save_gets_its_name_costs_no_more_than_save_every(tmp_path, moment, from_step):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    script = KILLED.format(tests=str(ROOT / "tests"))
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "run", moment], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "made 9"
    assert shardstep.latest_step(tmp_path / "run") == from_step
    _, seen = run_to(tmp_path / "run", 10)
    assert seen[0] == from_step


def test_a_save_is_called_saved_when_it_is_whole(tmp_path, gate, share, capfd):
    share(0.4)
    gate.set()
    step, run = started(tmp_path, save_every=2, show_every=0)
    with run:
        for i in run.steps(8):
            run.state, loss = step(run.state, batch(i))
            if i == 3:
                gate.clear()
            if i == 5:
                gate.set()
                saving.finish()
            run.log(loss=loss)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert "saved step 2 (" in lines[3] and "saving step 4 (" in lines[4] and "saved step 4 (" in lines[5]


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


def test_a_place_that_cannot_be_written_is_found_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    for path in ("file", "file/run", "link"):
        with pytest.raises(ShardstepError, match=rf"{path} cannot be written: (File|Not)"):
            started(tmp_path / path)
    monkeypatch.setattr(staging.os, "access", lambda path, mode: False)  # whoever runs this may be root
    with pytest.raises(ShardstepError, match="run cannot be written: there is no permission, or its file system"):
        started(tmp_path / "run")
