"""Checkpoints in object stores: real servers on this machine that speak S3 and Google Cloud Storage."""

from __future__ import annotations

import os

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
from steps import mesh_of
from stores import SECRET, serving

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint import manifest, object_stores
from shardstep._src.checkpoint.directories import root_of

pytest.importorskip("s3fs")
pytest.importorskip("gcsfs")


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request, tmp_path_factory):
    with serving(request.param, tmp_path_factory.mktemp(request.param) / "log") as environment:
        before = dict(os.environ)
        os.environ.update(environment)
        if request.param == "s3":
            fsspec.filesystem("s3").mkdir("bucket")
        yield f"{request.param}://bucket"
        os.environ.clear()
        os.environ.update(before)


def small(value):
    return {"w": jnp.full((17, 9), value, jnp.float32), "n": jnp.asarray(value, jnp.int32)}


def small_step(state, batch):
    return {"w": state["w"] + jnp.mean(batch), "n": state["n"] + 1}


def plan_of(replicas, **options):
    step = shardstep.shard(small_step, mesh_of(replicas), options=shardstep.Options(min_shard_bytes=0), **options)
    return step, step.plan(small(0), jnp.ones((16, 2)))


def held(path, plan, **kwargs):
    state = shardstep.restore(path, plan, **kwargs)
    (value,) = set(np.asarray(state["w"]).ravel())
    assert int(state["n"]) == value
    return int(value)


def listed(path):
    system, name = fsspec.url_to_fs(path)
    system.invalidate_cache()
    return [entry.rsplit("/", 1)[-1] for entry in system.ls(name, detail=False)]


def test_save_restore_replace_and_keep(bucket, capfd):
    path = f"{bucket}/run"
    step, plan = plan_of(8, weights="sharded")
    assert shardstep.latest_step(path) is None
    state = step.place(small(1), jnp.ones((16, 2)))[0]
    assert isinstance(state["w"], shardstep.Padded)  # 17 rows on 8 replicas: cropped in the store
    shardstep.save(path, state, step=1)
    assert held(path, plan_of(3)[1]) == 1
    with pytest.raises(ShardstepError, match="already holds a checkpoint"):
        shardstep.save(path, small(2), step=1)
    shardstep.save(path, small(2), step=1, overwrite=True, wait=False)
    shardstep.finish()
    assert held(path, plan) == 2 and shardstep.latest_step(path) == 1
    shardstep.save(path, small(3), step=2, keep=1)
    assert held(path, plan) == 3
    assert [name for name in listed(path) if not name.endswith(".claim")] == ["2"]
    system, name = fsspec.url_to_fs(path)
    everything = b"".join(system.cat_file(file) for file in system.find(name))
    assert SECRET.encode() not in everything and SECRET not in "".join(capfd.readouterr())


def test_what_is_damaged_or_unfinished_is_refused(bucket, monkeypatch):
    path = f"{bucket}/damaged"
    _, plan = plan_of(8)
    shardstep.save(path, small(1), step=1)
    monkeypatch.setattr(manifest, "write", lambda *_: (_ for _ in ()).throw(OSError("the store is gone")))
    monkeypatch.setattr(object_stores, "remove", lambda *_: None)  # and so is whoever would tidy up
    with pytest.raises(ShardstepError, match="was not written: the store is gone"):
        shardstep.save(path, small(2), step=2)
    monkeypatch.undo()
    assert shardstep.latest_step(path) == 1  # its last file is missing
    with pytest.raises(ShardstepError, match="it was cut off while it was written"):
        shardstep.restore(path, plan, step=2)
    shardstep.save(path, small(3), step=2)  # beside what was cut off
    assert held(path, plan) == 3
    shardstep.save(path, small(4), step=3)
    system, name = fsspec.url_to_fs(f"{path}/3")
    found = [entry for file, entry in system.find(name, detail=True).items() if "/d/" in file]  # arrays, not our list
    largest = max(found, key=lambda entry: entry["size"])["name"]
    data = bytearray(system.cat_file(largest))
    data[len(data) // 2] ^= 1
    system.pipe_file(largest, bytes(data))
    with pytest.warns(UserWarning, match="skipping the checkpoint .*3: the bytes of the file .* have changed"):
        assert held(path, plan) == 3


def test_two_writers_of_one_step(bucket):
    """Both find the name free: one gets it."""
    directory = root_of(f"{bucket}/race/7")
    assert object_stores.claim(directory, "one")
    assert object_stores.claimed_by(directory) == "one"
    shardstep.save(f"{bucket}/race", small(5), step=7)
    assert held(f"{bucket}/race", plan_of(8)[1]) == 5
    if bucket.startswith("s3"):  # the other emulator does not know conditions
        assert not any(name == "7" for name in listed(f"{bucket}/race"))  # the name was taken: beside it


def test_one_alone(bucket):
    shardstep.save(f"{bucket}/alone", small(6))
    shardstep.save(f"{bucket}/alone", small(7), overwrite=True)
    assert held(f"{bucket}/alone", plan_of(4)[1]) == 7
