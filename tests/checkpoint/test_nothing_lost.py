"""Whatever fails while a checkpoint is written or read, a whole one stays whole, and the error says what to do."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from launch import ROOT
from steps import adam_state, adam_step, batch, mesh_of

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint import directories, event_loops, locks, manifest, staging
from shardstep._src.checkpoint import saving as saving_module


def small(value):
    return {"w": jnp.full((16, 8), value, jnp.float32), "n": jnp.asarray(value, jnp.int32)}


def small_step(state, batch):
    return {"w": state["w"] + jnp.mean(batch), "n": state["n"] + 1}


@pytest.fixture(scope="module")
def plan():
    return shardstep.shard(small_step, mesh_of(8)).plan(small(0), jnp.ones((16, 2)))


def held(path, plan, **kwargs):
    """Which of the small states a checkpoint holds."""
    state = shardstep.restore(path, plan, **kwargs)
    (value,) = set(np.asarray(state["w"]).ravel())
    assert int(state["n"]) == value
    return int(value)


# -- replacing a checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("fails", ["writing", "listing", "naming"])
def test_a_save_that_fails_leaves_what_it_was_to_replace(tmp_path, plan, monkeypatch, step, fails):
    path = tmp_path / "run"
    shardstep.save(path, small(1), step=step)

    def full(*_, **__):
        raise OSError("no space left on device")

    owner, name = {
        "writing": (ocp.AsyncCheckpointer, "save"),
        "listing": (manifest, "write"),
        "naming": (staging.OnDisk, "_named"),
    }[fails]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(ShardstepError, match=r"was not written: .*no space left on device"):
        shardstep.save(path, small(2), step=step, overwrite=True)
    monkeypatch.undo()
    assert held(path, plan, step=step) == 1
    assert not list(tmp_path.rglob("*shardstep-*"))  # and nothing is left behind
    shardstep.save(path, small(3), step=step, overwrite=True)
    assert held(path, plan, step=step) == 3


def test_a_leaf_that_cannot_be_saved(tmp_path, plan):
    shardstep.save(tmp_path, small(1), step=3)
    with pytest.raises(ShardstepError, match="3 was not written: "):
        shardstep.save(tmp_path, small(2) | {"odd": np.array([object()])}, step=3, overwrite=True)
    assert held(tmp_path, plan) == 1


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("dies", ["before it is listed", "before the old one moves", "between the names", "at the end"])
def test_a_writer_that_dies_at_any_point(tmp_path, plan, monkeypatch, step, dies):
    """What a kill leaves on disk, whole: the old one up to the end, then the new one."""
    path = tmp_path / "run"
    shardstep.save(path, small(1), step=step)
    stop = type("Killed", (BaseException,), {})

    def die(*_, **__):
        raise stop

    makes_way = staging.OnDisk._make_way

    def make_way_and_die(self, tries):
        makes_way(self, tries)
        raise stop

    if dies == "before it is listed":
        monkeypatch.setattr(manifest, "write", die)
    elif dies == "before the old one moves":
        monkeypatch.setattr(staging.OnDisk, "_named", die)
    elif dies == "between the names":
        monkeypatch.setattr(staging.OnDisk, "_make_way", make_way_and_die)
    else:
        monkeypatch.setattr(staging.OnDisk, "_leave", die)
    monkeypatch.setattr(
        staging.OnDisk, "abandon", lambda self: self._lock.release()
    )  # a dead process cleans nothing up
    with pytest.raises(ShardstepError, match="was not written"):
        shardstep.save(path, small(2), step=step, overwrite=True)
    monkeypatch.undo()
    gc.collect()
    after = 2 if dies in ("between the names", "at the end") else 1
    assert held(path, plan, step=step) == after
    if step is not None:
        assert shardstep.latest_step(path) == 3
    staging.sweep(path.parent if step is None else path)
    assert held(path, plan, step=step) == after
    assert not list(tmp_path.rglob("*shardstep-*"))


# -- several writers --------------------------------------------------------------------------------------------------


def test_a_live_writer_is_left_alone(tmp_path, plan, monkeypatch):
    """The other one finishes while the first is about to: the first is told, and what it finds stays."""
    listed, proceed, write = threading.Event(), threading.Event(), manifest.write

    def slow(directory, *args):
        monkeypatch.setattr(manifest, "write", write)
        listed.set()
        assert proceed.wait(30)
        write(directory, *args)

    monkeypatch.setattr(manifest, "write", slow)
    first = shardstep.save(tmp_path, small(1), step=3, wait=False)
    assert listed.wait(30)
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); import jax.numpy as jnp, shardstep\n"
        "shardstep.save(sys.argv[1], {'w': jnp.full((16, 8), 2.0), 'n': jnp.asarray(2, jnp.int32)}, step=3)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(ROOT / "src")], check=True, timeout=120)
    proceed.set()
    with pytest.raises(ShardstepError, match="written by somebody else in the meantime, and is left as it is"):
        first.wait()
    shardstep._src.checkpoint.saving._running.clear()
    assert held(tmp_path, plan) == 2
    assert [d.name for d in tmp_path.iterdir()] == ["3"]


def test_what_is_read_is_not_replaced_under_the_reader(tmp_path, plan):
    shardstep.save(tmp_path, small(1), step=3)
    refused = pytest.raises(ShardstepError, match="cannot be replaced: it has been read for 1 s")
    with locks.reading(tmp_path / "3"), refused:
        shardstep.save(tmp_path, small(2), step=3, overwrite=True, timeout=1)
    assert held(tmp_path, plan) == 1


def test_a_reader_beside_a_writer_that_keeps_one(tmp_path, plan, monkeypatch):
    """What was found is deleted before it is read: then there is a newer one, and that is read."""
    shardstep.save(tmp_path, small(1), step=1)
    look = directories.find

    def look_and_be_slow(root):
        found = look(root)
        monkeypatch.setattr(directories, "find", look)
        shardstep.save(tmp_path, small(2), step=2, keep=1)
        return found

    monkeypatch.setattr(directories, "find", look_and_be_slow)
    with pytest.warns(UserWarning, match="skipping the checkpoint .*1: "):
        assert held(tmp_path, plan) == 2
    (tmp_path / "2" / "default" / "_METADATA").unlink()
    for step in (None, 2):  # and it does not look for ever
        with pytest.raises(ShardstepError, match=r"no whole checkpoint in|2 is broken"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shardstep.restore(tmp_path, plan, step=step)


def test_a_reader_beside_a_writer_that_replaces(tmp_path, plan, monkeypatch):
    """The checkpoint has no name at the moment: it is found beside, and has its name again when it is read."""
    shardstep.save(tmp_path, small(1), step=3)
    beside = tmp_path / f"3{directories.STAGED}{directories.new_token()}"
    beside.mkdir()
    (tmp_path / "3").rename(beside / f"{directories.REPLACED}-1")
    look = directories.find

    def look_and_be_slow(root):
        found = look(root)
        if beside.exists():
            (beside / f"{directories.REPLACED}-1").rename(tmp_path / "3")
            beside.rmdir()
        return found

    monkeypatch.setattr(directories, "find", look_and_be_slow)
    assert held(tmp_path, plan, step=3) == 1


# -- interrupts and ends ----------------------------------------------------------------------------------------------


@pytest.fixture
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_handler")
def test_an_interrupt_while_a_save_is_waited_for(tmp_path, plan, monkeypatch):
    """The save goes on, and what comes next still waits for it."""
    opened, commit = threading.Event(), staging.OnDisk.commit
    monkeypatch.setattr(staging.OnDisk, "commit", lambda self: (opened.wait(60), commit(self))[1])
    saving = shardstep.save(tmp_path, small(1), step=1, wait=False)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        shardstep.finish()
    assert not saving.done
    threading.Timer(0.5, opened.set).start()
    shardstep.finish()
    assert saving.whole and held(tmp_path, plan) == 1


@pytest.mark.usefixtures("pythons_own_handler")
def test_an_interrupt_while_a_save_begins(tmp_path, plan, monkeypatch):
    """It is begun as a whole, and then goes on; a half of it could only be thrown away."""
    start = saving_module._Job.start

    def interrupted(self, tree):
        os.kill(os.getpid(), signal.SIGINT)
        start(self, tree)

    monkeypatch.setattr(saving_module._Job, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shardstep.save(tmp_path, small(1), step=1)
        time.sleep(5)  # it may be whole before the interrupt comes
    shardstep.finish()
    assert held(tmp_path, plan) == 1


@pytest.mark.parametrize("end", ["", "raise ValueError"])
def test_a_script_that_ends_while_it_saves(tmp_path, plan, end):
    """Python 3.12 starts no threads then: what is lost is said."""
    script = f"""
import sys, time; sys.path.insert(0, {str(ROOT / "src")!r})
import jax.numpy as jnp, shardstep
from shardstep._src.checkpoint import manifest
write = manifest.write
manifest.write = lambda *a: (time.sleep(1), write(*a))
shardstep.save({str(tmp_path)!r}, {{'w': jnp.full((16, 8), 2.0), 'n': jnp.asarray(2, jnp.int32)}}, step=3, wait=False)
{end}
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, env=environment)
    assert ran.returncode == (1 if end else 0), ran.stderr[-2000:]
    if sys.version_info < (3, 12):
        assert held(tmp_path, plan) == 2
    elif shardstep.latest_step(tmp_path) is None:
        assert "3 was not written: " in ran.stderr and "Call shardstep.finish() before the script ends" in ran.stderr


# -- clear errors -----------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense(tmp_path, plan):
    for path in ("", "   ", None, 3, b"run", "a\0b"):
        with pytest.raises(ShardstepError, match="needs the path of a directory"):
            shardstep.save(path, small(1))
        with pytest.raises(ShardstepError, match="needs the path of a directory"):
            shardstep.restore(path, plan)
    for step in (-1, 1.5, True, "3"):
        with pytest.raises(ShardstepError, match="number checkpoints with integers, 0 or more"):
            shardstep.save(tmp_path, small(1), step=step)
    with pytest.raises(ShardstepError, match=r"pass step.plan\(state, batch\)"):
        shardstep.restore(tmp_path, None)
    for timeout in (0, float("inf"), float("nan"), "1"):
        with pytest.raises(ShardstepError, match="use a number of seconds"):
            shardstep.save(tmp_path, small(1), timeout=timeout)
    for empty in (None, {}, "text", [jnp.tanh]):
        with pytest.raises(ShardstepError, match="there is nothing to save"):
            shardstep.save(tmp_path, empty)
    with pytest.raises(ShardstepError, match=r"state\['n'\] is a shape, not an array"):
        shardstep.save(tmp_path, jax.eval_shape(lambda: small(1)))
    with pytest.raises(ShardstepError, match=r"state\['n'\] is being traced"):
        jax.eval_shape(lambda s: shardstep.save(tmp_path, s), small(1))
    with pytest.raises(ShardstepError, match="gs:// or s3://"):
        shardstep.save("http://example.org/run", small(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "state",
    [{"a.b": 1.0, "a": {"b": 2.0}}, {"a": [1.0, 2.0], "a.0": 3.0}, {"x": 1.0, "x/": 2.0}],
)
def test_leaves_that_would_have_one_name(tmp_path, state):
    """Orbax writes one in place of the other, and says nothing."""
    with pytest.raises(ShardstepError, match="would have the same name in the checkpoint, "):
        shardstep.save(tmp_path, state)


def test_a_donated_state(tmp_path, plan):
    step = shardstep.shard(adam_step, mesh_of(8))
    state, _ = step(adam_state(), batch(0))
    step(state, batch(1))
    shardstep.save(tmp_path, small(1), step=3)
    with pytest.raises(ShardstepError, match=r"state\[0\]\['b'\] was donated to a step .*Options\(donate=False\)"):
        shardstep.save(tmp_path, state, step=3, overwrite=True)
    assert held(tmp_path, plan) == 1


def test_paths_that_are_no_directories(tmp_path, plan):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ShardstepError, match="file is a file"):
        shardstep.save(tmp_path / "file", small(1))
    with pytest.raises(ShardstepError, match="cannot be written: NotADirectoryError"):
        shardstep.save(tmp_path / "file" / "run", small(1), step=3)
    with pytest.raises(ShardstepError, match="no whole checkpoint in"):
        shardstep.restore(tmp_path / "file" / "run", plan)
    assert shardstep.latest_step(tmp_path / "file") is None


def test_a_directory_that_may_not_be_written_or_read(tmp_path, plan, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(staging.OnDisk, "begin", refuse)  # whoever runs this may be root
    with pytest.raises(ShardstepError, match="cannot be written: PermissionError"):
        shardstep.save(tmp_path, small(1), step=3)
    monkeypatch.setattr(directories, "find", refuse)
    for look in (lambda: shardstep.restore(tmp_path, plan), lambda: shardstep.latest_step(tmp_path)):
        with pytest.raises(ShardstepError, match="cannot be looked for: PermissionError"):
            look()


def test_a_link_to_a_directory(tmp_path, plan):
    shardstep.save(tmp_path / "a", small(1), step=3)
    os.symlink(tmp_path / "a", tmp_path / "link")
    shardstep.save(tmp_path / "link", small(2), step=4)
    assert held(tmp_path / "a", plan) == held(tmp_path / "link", plan) == 2
    os.symlink(tmp_path / "a" / "4", tmp_path / "final")
    with pytest.raises(ShardstepError, match="already holds a checkpoint"):
        shardstep.save(tmp_path / "final", small(3))
    assert held(tmp_path / "final", plan) == 2
    shardstep.save(tmp_path / "final", small(3), overwrite=True)  # in place of the link, not of what it leads to
    assert held(tmp_path / "final", plan) == 3 and held(tmp_path / "a", plan) == 2


def test_no_traceback_of_a_closed_event_loop(tmp_path):
    """Orbax closes its loop while TensorStore still reads: each of those reads then printed a traceback."""
    script = f"""
import sys; sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT / "tests")!r}]
import gc, pathlib, jax, jax.numpy as jnp; jax.config.update("jax_num_cpu_devices", 4)
import orbax.checkpoint as ocp, shardstep
from steps import mesh_of
state = {{f"w{{i}}": jnp.ones((64, 64)) for i in range(40)}}
path = pathlib.Path({str(tmp_path / "plain")!r})
with ocp.StandardCheckpointer() as checkpointer: checkpointer.save(path, state)
max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size).unlink()
step = shardstep.shard(lambda s, x: jax.tree.map(lambda w: w + jnp.mean(x), s), mesh_of(4))
plan = step.plan(state, jnp.ones((4, 2)))
for _ in range(3):
    try: shardstep.restore(path, plan)
    except shardstep.ShardstepError: print("refused")
gc.collect()
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, env=environment)
    assert ran.returncode == 0 and ran.stdout.count("refused") == 3, ran.stderr[-2000:]
    assert "Event loop is closed" not in ran.stderr and "never retrieved" not in ran.stderr, ran.stderr[-3000:]


def test_a_loop_that_is_closed_drops_what_comes_later():
    """TensorStore calls from threads of its own. A closed loop raised there, and what came of it was printed."""
    with event_loops.patient():
        loop = asyncio.new_event_loop()
    loop.close()
    assert loop.call_soon_threadsafe(print) is None
    plain = asyncio.new_event_loop()
    plain.close()
    with pytest.raises(RuntimeError, match="closed"):
        plain.call_soon_threadsafe(print)


def test_json_that_is_nested_too_deeply(tmp_path, plan):
    shardstep.save(tmp_path, small(1), step=1)
    shardstep.save(tmp_path, small(2), step=2)
    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "2" / "default" / manifest.NAME).write_text(deep)
    with pytest.warns(UserWarning, match="skipping the checkpoint .*2: its list of files"):
        assert held(tmp_path, plan) == 1
    (tmp_path / "2" / "default" / manifest.NAME).unlink()
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text(deep)
    (tmp_path / "2" / "default" / "_METADATA").write_text(json.dumps({"tree_metadata": {}})[:-1] + deep + "}")
    with pytest.warns(UserWarning, match="skipping the checkpoint .*2: it cannot be read"):
        assert held(tmp_path, plan) == 1
