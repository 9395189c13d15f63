"""Checkpoints on Orbax, independent of layout.

A checkpoint holds the state as its logical arrays, in Orbax's own format: each replica writes the blocks that it holds,
and each reads the blocks that its plan gives it, so what N replicas wrote any M can read. Nothing of the layout is
kept. Plain Orbax reads what is written here, and what plain Orbax wrote from an unsharded run is read here.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from ..capture.arguments import is_array
from ..core.errors import ShardstepError
from ..core.padded import Padded
from ..core.progress import bar, silent
from ..runtime import interrupts, processes
from ..runtime.processes import is_local
from . import directories, manifest, object_stores, staging
from .directories import ITEM, MARK, Stored
from .retention import Retention
from .staging import Request, Writing

_POLL = 0.2  # seconds


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, job: _Job):
        self.directory = job.writing.target.directory
        self._job = job
        self._error: BaseException | None = None
        self.whole = False  # is it in its place?
        self._begun, self._ended = time.monotonic(), 0.0
        self._over = threading.Event()  # a thread whose `join` was interrupted says that it has ended, and has not
        threading.Thread(target=self._finish, name="shardstep-save", daemon=False).start()

    def _finish(self) -> None:
        try:
            self._job.finish()
            self.whole = True
        except BaseException as error:
            self._error = error
        self._ended = time.monotonic()
        self._over.set()

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far, since the state was copied."""
        return (self._ended or time.monotonic()) - self._begun

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Returns when the checkpoint is whole in its place; raises if it could not be written."""
        with bar(f"writing {self.directory.name}", self._job.nbytes) as advance:
            shown = 0
            while advance is not silent and not self.done:
                self._over.wait(_POLL)
                written = bytes_under(self._job.writing.directory.parent)
                advance(max(written - shown, 0))
                shown = max(written, shown)
            self._over.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise ShardstepError(f"the checkpoint {self.directory} was not written: {error}") from error


class _Job:
    """What is left to do once the state may be donated. Runs in a thread of its own, on every process."""

    def __init__(
        self,
        checkpointer: ocp.AsyncCheckpointer,
        writing: Writing,
        cropped: dict[str, tuple[int, ...]],
        retention: Retention,
    ):
        self.writing = writing
        self.nbytes = 0
        self._checkpointer = checkpointer
        self._cropped = cropped
        self._retention = retention

    def start(self, tree: Any) -> None:
        """Copy the state to the host: returns when it may be donated."""
        self.nbytes = sum(x.nbytes for x in jax.tree.leaves(tree) if is_array(x))
        args: Any = ocp.args.PyTreeSave(tree)
        if self.writing.target.step is not None:
            args = ocp.args.Composite(**{ITEM: args})
        try:
            self._checkpointer.save(self.writing.directory, args=args, custom_metadata={MARK: 1})
        except BaseException as error:
            self.writing.abandon()
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            where = self.writing.target.directory
            raise ShardstepError(f"the checkpoint {where} was not written: {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
        except BaseException:
            self.writing.abandon()
            raise
        finally:
            self._checkpointer.close()
        self._agree(self._commit)

    def _commit(self) -> None:
        try:
            _seal(self.writing, self._cropped)
            self.writing.commit()
        except BaseException:
            self.writing.abandon()
            raise
        self._retention.apply(self.writing.target)

    def _agree(self, commit: Any) -> None:
        """The first process commits; how that ended, all processes hear."""
        word = f"shardstep/save/{self.writing.token}"
        if not processes.is_first():
            if problem := processes.hear(word, self.writing.request.timeout):
                raise ShardstepError(problem)
            return
        problem = "the first process failed"
        try:
            commit()
            problem = ""
        except Exception as error:
            problem = str(error)
            raise
        finally:
            processes.tell(word, problem)


_running: list[Saving] = []  # at most one: saves do not overtake each other


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    timeout: float = 600.0,
    keep: int | None = None,
    keep_every: int | None = None,
) -> Saving:
    """Write the state to a checkpoint.

    Args:
        path: a directory. With `step` it holds numbered checkpoints, laid out as Orbax's `CheckpointManager` does;
            without, it becomes one checkpoint, as `StandardCheckpointer` writes it.
        state: any pytree; leaves that are not arrays or numbers are left out (`restore` takes them from the plan).
        step: the number of the checkpoint.
        wait: return when it is on disk. With False, return as soon as the state may be donated or changed: the rest
            happens in the background, `.wait()` on the result says how it ended, and the next `save` waits for it.
        overwrite: replace a whole checkpoint of this number, once the new one is whole. Broken ones always are.
        timeout: seconds that processes wait for each other to have written their parts.
        keep: how many numbered checkpoints to keep, this one included; older ones are deleted when this one is whole.
        keep_every: keep those whose number this divides, besides.

    In a run of many processes all of them call it, with the same arguments and a path that all of them see.
    """
    root, step = directories.root_of(path), checked_step(step)
    if not isinstance(timeout, int | float) or not 1 <= timeout < float("inf"):
        raise ShardstepError(f"save(timeout={timeout!r}): use a number of seconds, 1 or more")
    retention = Retention.of(keep, keep_every, step)
    refuse_what_holds_nothing(state)
    tree, cropped = _to_file(state)
    _refuse_names_that_meet(state, tree)
    finish()
    writing = staging.begin(Request(directories.at(root, step), overwrite, timeout))
    job = _Job(_checkpointer(writing), writing, cropped, retention)
    with interrupts.deferred():  # half begun, it would be lost
        job.start(tree)
        saving = Saving(job)
        _running.append(saving)
    if wait:
        finish()
    return saving


def _checkpointer(writing: Writing) -> ocp.AsyncCheckpointer:
    remote = directories.is_remote(writing.directory)
    mark = ocp.path.atomicity.CommitFileTemporaryPath if remote else None  # no renaming in a store
    # zstd takes 8 % off trained float32 weights, and four fifths of a save's CPU time, which steps would miss
    handler: Any = ocp.PyTreeCheckpointHandler(use_compression=False)
    if writing.target.step is not None:
        options = ocp.CompositeOptions(temporary_path_class=mark)
        handler = ocp.CompositeCheckpointHandler(composite_options=options, **{ITEM: handler})
    patience = ocp.options.AsyncOptions(timeout_secs=int(writing.request.timeout))
    return ocp.AsyncCheckpointer(handler, async_options=patience, temporary_path_class=mark)


def checked_step(step: Any) -> int | None:
    """The number of a checkpoint, if it is one."""
    if step is None:
        return None
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ShardstepError(f"step={step!r}: number checkpoints with integers, 0 or more")
    return number


def refuse_what_holds_nothing(state: Any) -> None:
    """What was given away cannot be written; what is not there yet cannot either."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ShardstepError(f"state{keystr(path)} is a shape, not an array: pass the state itself")
        if isinstance(leaf, jax.core.Tracer):
            raise ShardstepError(f"state{keystr(path)} is being traced: call this outside of jit, with what it returns")
        if isinstance(leaf, jax.Array | Padded) and leaf.is_deleted():
            raise ShardstepError(
                f"state{keystr(path)} was donated to a step and holds nothing any more: save what the step returned, or"
                " keep the old state with shardstep.Options(donate=False)"
            )


def _refuse_names_that_meet(state: Any, tree: Any) -> None:
    """Orbax joins the keys of a leaf by dots: of two leaves with one name, it would write one in place of the other."""
    seen: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = keystr(path, simple=True, separator=".").rstrip("/")
        if name in seen:
            raise ShardstepError(
                f"state{seen[name]} and state{keystr(path)} would have the same name in the checkpoint, {name}: rename"
                " one of their keys"
            )
        seen[name] = keystr(path)
    if not seen and not any(is_array(leaf) for leaf in jax.tree.leaves(state)):
        raise ShardstepError("the state holds no array and no number: there is nothing to save")


def finish() -> None:
    """Wait for the save that runs in the background, if one does."""
    while _running:
        saving = _running[-1]
        try:
            saving.wait()
        finally:
            if saving.done and saving in _running:  # else the waiting was interrupted, and the save goes on
                _running.remove(saving)


def _finish_at_exit() -> None:
    """A script that ends, or dies of an error, does not lose in silence what it has begun to save."""
    try:
        finish()
    except Exception as error:
        print(f"shardstep: {error}. Call shardstep.finish() before the script ends.", file=sys.stderr, flush=True)


# `atexit` comes too late: by then no thread pool takes work any more. (From Python 3.12 on, none does from the moment
# that the script has ended. There, what is left to start is lost, and this says so.)
getattr(threading, "_register_atexit", atexit.register)(_finish_at_exit)


def _to_file(state: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The state as Orbax is to write it, and the logical shapes of the arrays that must be cropped to them."""
    if jax.tree_util.all_leaves([state]):
        state = (state,)  # Orbax writes trees, not lone arrays
    cropped: dict[str, tuple[int, ...]] = {}

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Padded):
            cropped[keystr(path, simple=True, separator=".")] = leaf.shape
            leaf = leaf.data
        if not is_array(leaf):
            if isinstance(leaf, bool | complex):
                return np.asarray(leaf)
            return leaf if isinstance(leaf, int | float) else None
        if np.size(leaf) == 0:
            return None  # nothing to write, and Orbax refuses to
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)  # a copy: the caller may change it while it is written
        # what a process of several holds by itself is the same on all of them: Orbax takes it as one global array
        return processes.lay_out([leaf], [_everywhere()])[0] if jax.process_count() > 1 and is_local(leaf) else leaf

    return jax.tree_util.tree_map_with_path(one, state), cropped


def _everywhere() -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("devices",)), PartitionSpec())


def _seal(writing: Writing, cropped: dict[str, tuple[int, ...]]) -> None:
    """Last of all, before the checkpoint gets its name; on the first process alone."""
    if directories.is_remote(writing.directory):
        object_stores.refresh(writing.directory)
    tree = Stored(writing.directory, writing.target.step, True).tree
    if tree is None:
        raise FileNotFoundError(f"{writing.directory} holds no {directories.TREE}")
    (tree / "_sharding").unlink(missing_ok=True)  # a layout has no place in the file
    for name, shape in cropped.items():
        _crop(tree, name, shape)
    manifest.write(tree)


def _crop(tree: epath.Path, name: str, shape: tuple[int, ...]) -> None:
    """Remove an array's padding in place. Each replica has written its block; this only changes the bounds."""
    arrays = {"driver": "ocdbt", "base": object_stores.kvstore(tree), "path": f"{name}/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": arrays}).result()
    opened.resize(exclusive_max=shape).result()


def bytes_under(directory: epath.Path) -> int:
    try:
        return manifest.total_bytes(directory)
    except OSError:  # files come and go while it is written
        return 0
