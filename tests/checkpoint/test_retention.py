"""Old checkpoints go; the newest whole one, those that are to stay, and those that somebody reads do not."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint import locks, staging
from shardstep._src.checkpoint.directories import Stored, root_of
from shardstep._src.checkpoint.retention import Retention

STATE = {"w": jnp.ones((4, 2))}


def steps(path):
    return sorted(int(d.name) for d in path.iterdir() if d.name.isdigit())


def superfluous(found, written, **rules):
    stored = [Stored(root_of(f"/run/{n}"), n, True) for n in found]
    return [
        s.step for s in Retention.of(**({"keep_every": None} | rules), step=written).superfluous(stored, at(written))
    ]


def at(n):
    return Stored(root_of(f"/run/{n}"), n, True)


def test_what_goes():
    assert superfluous([1, 2, 3, 4, 5], 5, keep=2) == [1, 2, 3]
    assert superfluous([1, 2, 3, 4, 5], 5, keep=1) == [1, 2, 3, 4]
    assert superfluous([1, 2, 3, 4, 5], 5, keep=9) == []
    assert superfluous([10, 15, 20, 25, 30], 30, keep=2, keep_every=20) == [10, 15]
    assert superfluous([1, 2, 8, 9], 3, keep=1) == [1, 2]  # set back: what lies ahead is neither counted nor touched


def test_deletion_after_each_save(tmp_path):
    for n in range(1, 6):
        shardstep.save(tmp_path, STATE, step=n, wait=n % 2 == 0, keep=2, keep_every=3)
    shardstep.finish()
    assert steps(tmp_path) == [3, 4, 5]
    assert {d.name for d in tmp_path.iterdir()} == {"3", "4", "5"}


def test_what_is_read_stays_until_the_next_time(tmp_path):
    shardstep.save(tmp_path, STATE, step=1)
    with locks.reading(tmp_path / "1"):
        shardstep.save(tmp_path, STATE, step=2, keep=1)
        assert steps(tmp_path) == [1, 2]
    shardstep.save(tmp_path, STATE, step=3, keep=1)
    assert steps(tmp_path) == [3]


def test_a_crash_between_and_within_deletions(tmp_path, monkeypatch):
    for n in (1, 2, 3):
        shardstep.save(tmp_path, STATE, step=n)
    monkeypatch.setattr(staging.shutil, "rmtree", lambda *_, **__: None)  # renamed, and then it died
    assert staging.remove(Stored(root_of(tmp_path / "1"), 1, True))
    monkeypatch.undo()
    assert shardstep.latest_step(tmp_path) == 3 and steps(tmp_path) == [2, 3]
    shardstep.save(tmp_path, STATE, step=4, keep=2)
    assert {d.name for d in tmp_path.iterdir()} == {"3", "4"}


@pytest.mark.parametrize(
    "rules", [{"keep": 0}, {"keep": True}, {"keep": 1.5}, {"keep_every": 2}, {"keep": 1, "step": None}]
)
def test_rules_that_make_no_sense(tmp_path, rules):
    with pytest.raises(ShardstepError, match=r"keep(_every)?="):
        shardstep.save(tmp_path, STATE, **({"step": 1} | rules))
