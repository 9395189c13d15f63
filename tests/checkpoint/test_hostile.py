"""A checkpoint from somebody else: it runs no code, reads nothing outside its directory, and fills no memory."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from steps import mesh_of

import shardstep
from shardstep import ShardstepError
from shardstep._src.checkpoint import manifest


def state():
    return {"w": jnp.ones((16, 8)), "n": jnp.asarray(1, jnp.int32)}


def step(state, batch):
    return {"w": state["w"] + jnp.mean(batch), "n": state["n"] + 1}


@pytest.fixture(scope="module")
def plan():
    return shardstep.shard(step, mesh_of(8)).plan(state(), jnp.ones((16, 2)))


@pytest.fixture
def saved(tmp_path):
    shardstep.save(tmp_path / "run", state(), step=1)
    return tmp_path / "run" / "1" / "default"


def entries(tree):
    return json.loads((tree / manifest.NAME).read_text())["files"]


def relist(tree, **changes):
    (tree / manifest.NAME).write_text(json.dumps({"format": 1, "files": entries(tree)} | changes))


def refused(tree, plan, why):
    with pytest.raises(ShardstepError, match=why):
        shardstep.restore(tree.parent.parent, plan, step=1)


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname", "a/../../../../secret", "..", "", "a\\..\\b"])
def test_a_list_that_names_files_elsewhere(saved, plan, tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    relist(saved, files=entries(saved) | {name: [6, "0" * 64]})
    refused(saved, plan, "which is no file of the checkpoint")


@pytest.mark.parametrize("what", ["file", "directory"])
def test_links_inside_a_checkpoint(saved, plan, tmp_path, what):
    victim = saved / "_METADATA" if what == "file" else saved / "d"
    victim.rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", victim)
    refused(saved, plan, "is a symbolic link: a checkpoint holds files of its own")
    (saved / manifest.NAME).unlink()  # as plain Orbax writes it, without hashes
    (saved.parent / "_CHECKPOINT_METADATA").unlink()
    refused(saved, plan, "is a symbolic link")


@pytest.mark.parametrize("name", [manifest.NAME, "_METADATA", "d/more"])
def test_pipes_inside_a_checkpoint(saved, plan, name):
    """To read one takes until somebody writes to it, and that may be for ever."""
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)

    def write():
        while True:  # a pipe that is read all the same ends
            open(saved / name, "w").close()

    threading.Thread(target=write, daemon=True).start()
    refused(saved, plan, "is neither a file nor a directory")


def test_a_number_that_is_a_link(tmp_path, plan):
    shardstep.save(tmp_path / "other", state(), step=7)
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "other" / "7", tmp_path / "run" / "1")
    with pytest.raises(ShardstepError, match="it is a symbolic link: name what it leads to"):
        shardstep.restore(tmp_path / "run", plan, step=1)


def test_tables_that_do_not_fit_into_memory(saved, plan):
    """Sparse files of a terabyte: their size is looked at before they are opened."""
    for name in (manifest.NAME, "_METADATA"):
        original = (saved / name).read_bytes()
        os.truncate(saved / name, 1 << 40)
        refused(saved, plan, "bytes, more than a table of contents can have")
        (saved / name).write_bytes(original)
    assert shardstep.restore(saved.parent.parent, plan)


@pytest.mark.parametrize(
    "listed",
    [
        [],
        {"format": 1, "files": []},
        {"format": 1, "files": {"_METADATA": "x"}},
        {"format": 1, "files": {"_METADATA": [1e400, None]}},
        {"format": {"a": 1}, "files": {}},
    ],
)
def test_lists_of_another_form(saved, plan, listed):
    (saved / manifest.NAME).write_text(json.dumps(listed))
    refused(saved, plan, "its list of files, _SHARDSTEP, cannot be read|its format is")


def test_chunks_that_do_not_fit_into_memory(tmp_path, plan):
    """The array has the shape that the plan wants; one chunk of it would have a terabyte."""
    shardstep.save(tmp_path / "run", state(), step=1)
    tree = tmp_path / "run" / "1" / "default"
    base = {"driver": "file", "path": f"{tree}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}
    metadata = {"shape": [16, 8], "chunks": [1 << 20, 1 << 18], "dtype": "<f4", "fill_value": 0.0}
    tensorstore.open(spec | {"metadata": metadata}, create=True, delete_existing=True).result()
    manifest.write(shardstep._src.checkpoint.directories.root_of(tree))
    refused(tree, plan, "w.* is stored in chunks of")


def test_pickles_are_never_loaded(saved, plan, tmp_path, monkeypatch):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.save(saved / "n.npy", np.array([Bomb()], object), allow_pickle=True)
    for name in ("w", "w.npy", "msgpack", "default.pkl", "_sharding", "checkpoint"):
        (saved / name).write_bytes(pickle.dumps(Bomb()))
        with contextlib.suppress(ShardstepError):  # Orbax takes the last two for its own, and cannot read them
            shardstep.restore(saved.parent.parent, plan, step=1)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((saved / "w").read_bytes())
    assert (tmp_path / "exploded").exists()  # it would have


def test_names_are_escaped_in_the_report(tmp_path):
    name = "<script>alert('&\"')</script>"

    def evil(state, batch):
        return {name: state[name] + jnp.mean(batch)}

    plan = shardstep.shard(evil, mesh_of(8)).plan({name: jnp.ones((16, 8))}, jnp.ones((16, 2)))
    plan.to_html(tmp_path / "report.html", title=name, notes=[name])
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text and "alert(" in text
