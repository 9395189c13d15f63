"""Checkpoints that know no layout, on Orbax.

A checkpoint holds the state as its logical arrays, in Orbax's own format: each replica writes the blocks that it holds,
and each reads the blocks that its plan gives it, so what N replicas wrote any M can read. Nothing of the layout is
kept. Plain Orbax reads what is written here, and what plain Orbax wrote from an unsharded run is read here.
"""

from __future__ import annotations

import operator
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
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
from ..planning.plan import Plan
from ..runtime import processes
from ..runtime.processes import is_local
from . import directories, manifest
from .directories import ITEM, MARK, Stored
from .matching import Expected, Match, expect

_POLL = 0.2  # seconds


# -- save ---------------------------------------------------------------------------------------------------------


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, checkpointer: ocp.AsyncCheckpointer, target: Stored, nbytes: int):
        self.directory = target.directory
        self._writing = target.writing
        self._checkpointer = checkpointer
        self._nbytes = nbytes
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._finish, name="shardstep-save", daemon=False)
        self._thread.start()

    def _finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
        except BaseException as error:
            self._error = error
        finally:
            self._checkpointer.close()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is whole on disk; raises if it could not be written."""
        with bar(f"writing {self.directory.name}", self._nbytes) as advance:
            shown = 0
            while advance is not silent and not self.done:
                self._thread.join(_POLL)
                written = _bytes_under(self._writing)
                advance(max(written - shown, 0))
                shown = max(written, shown)
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise ShardstepError(f"the checkpoint {self.directory} was not written: {error}") from error


_running: list[Saving] = []  # at most one: saves do not overtake each other


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    timeout: float = 600.0,
) -> Saving:
    """Write the state to a checkpoint.

    Args:
        path: a directory. With `step` it holds numbered checkpoints, laid out as Orbax's `CheckpointManager` does;
            without, it becomes one checkpoint, as `StandardCheckpointer` writes it.
        state: any pytree; leaves that are not arrays or numbers are left out (`restore` takes them from the plan).
        step: the number of the checkpoint.
        wait: return when it is on disk. With False, return as soon as the state may be donated or changed: the rest
            happens in the background, `.wait()` on the result says how it ended, and the next `save` waits for it.
        overwrite: replace a whole checkpoint of this number. A broken one is always replaced.
        timeout: seconds that processes wait for each other to have written their parts.

    In a run of many processes all of them call it, with the same arguments and a path that all of them see.
    """
    finish()
    target = directories.at(_local_path(path), None if step is None else operator.index(step))
    _make_way(target, overwrite)
    tree, cropped = _to_file(state)
    args: Any = ocp.args.StandardSave(tree)
    handler: Any = ocp.StandardCheckpointHandler()
    if step is not None:
        args, handler = ocp.args.Composite(**{ITEM: args}), ocp.CompositeCheckpointHandler()
    options = ocp.options.AsyncOptions(
        timeout_secs=int(timeout), post_finalization_callback=lambda: _seal(target, cropped)
    )
    checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
    checkpointer.save(target.directory, args=args, custom_metadata={MARK: 1})
    saving = Saving(checkpointer, target, sum(x.nbytes for x in jax.tree.leaves(tree) if is_array(x)))
    _running.append(saving)
    if wait:
        finish()
    return saving


def _local_path(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ShardstepError(f"{path} is not a directory of a file system; object stores are not supported")
    return Path(os.path.abspath(path))


def finish() -> None:
    """Wait for the save that runs in the background, if one does."""
    while _running:
        _running.pop().wait()


def _make_way(target: Stored, overwrite: bool) -> None:
    """Remove what a run that was killed left behind. What is whole is only replaced when asked to."""
    refused = ""
    if processes.is_first():
        refused = _occupied(target, overwrite)
        if not refused:
            shutil.rmtree(target.writing, ignore_errors=True)
            if target.directory.exists():
                shutil.rmtree(target.directory)
    if refused := processes.from_first(refused):
        raise ShardstepError(refused)


def _occupied(target: Stored, overwrite: bool) -> str:
    """Why this checkpoint cannot be written here; empty if it can."""
    directory = target.directory
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return ""
    if not target.is_checkpoint:
        return f"{directory} holds something that is no checkpoint: pass another path, or number checkpoints with step="
    if overwrite or target.problem():
        return ""
    return f"{directory} already holds a checkpoint: pass another step=, or overwrite=True"


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


def _seal(target: Stored, cropped: dict[str, tuple[int, ...]]) -> None:
    """Last of all, before Orbax gives the checkpoint its name; on the first process alone."""
    tree = Stored(target.writing, target.step, False).tree
    if tree is None:
        raise FileNotFoundError(f"{target.writing} holds no {directories.TREE}")
    (tree / "_sharding").unlink(missing_ok=True)  # a layout has no place in the file
    for name, shape in cropped.items():
        _crop(tree, name, shape)
    manifest.write(tree)


def _crop(tree: Path, name: str, shape: tuple[int, ...]) -> None:
    """Remove an array's padding in place. Each replica has written its block; this only changes the bounds."""
    files = {"driver": "file", "path": f"{tree}/"}
    arrays = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": arrays}).result()
    opened.resize(exclusive_max=shape).result()


def _bytes_under(directory: Path) -> int:
    try:
        return manifest.total_bytes(directory)
    except OSError:  # files come and go while it is written
        return 0


# -- restore ------------------------------------------------------------------------------------------------------


def restore(path: str | os.PathLike[str], plan: Plan, *, step: int | None = None) -> Any:
    """Read a checkpoint into the layouts of a plan: each device reads its own blocks.

    Args:
        path: what was given to `save`, or any directory that Orbax wrote a checkpoint or numbered checkpoints to.
        plan: `step.plan(...)` of the training that goes on, for any number of replicas.
        step: the number of the checkpoint; the newest whole one if None. Broken ones are skipped, with a warning.

    Returns:
        The state as the step takes it. Where several arguments are state, they come in the container that was saved: a
        tuple, or a dict by the arguments' names.

    Raises:
        ShardstepError: there is no whole checkpoint, or it holds another tree than the plan's.
    """
    finish()
    root = _local_path(path)
    expected = expect(plan)
    for candidate in _candidates(root, step):
        problem, state = _try(candidate, expected)
        if not problem:
            return state
        if step is not None:
            raise ShardstepError(f"the checkpoint {candidate.directory} is broken: {problem}")
        if processes.is_first():
            warnings.warn(f"skipping the checkpoint {candidate.directory}: {problem}", stacklevel=2)
    raise ShardstepError(
        f"no whole checkpoint in {root}" if step is None else f"no checkpoint of step {step} in {root}"
    )


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The number of the newest committed checkpoint under `path`, or None. `restore` may find that it is broken."""
    root = _local_path(path)
    found = next((str(s.step) for s in directories.find(root) if s.committed and s.step is not None), "")
    agreed = processes.from_first(found)
    return int(agreed) if agreed else None


def _candidates(root: Path, step: int | None) -> list[Stored]:
    """As the first process sees them: a network file system may show others an older state."""
    found = [s for s in directories.find(root) if step is None or s.step == step]
    if step is not None:
        found = found[:1]
    names = processes.from_first("\n".join(s.directory.name for s in found[:100])).splitlines()
    by_name = {s.directory.name: s for s in found}
    missing = Stored(root, step, False)
    return [by_name.get(name, missing) for name in names]


def _try(candidate: Stored, expected: Expected) -> tuple[str, Any]:
    """(what is wrong, the state). All processes reach the same conclusion."""
    share = (jax.process_index(), jax.process_count())
    with bar(f"checking {candidate.directory.name}", _bytes_under(candidate.directory)) as advance:
        if problem := processes.first_of(candidate.problem(share, advance)):
            return problem, None
    tree = candidate.tree
    assert tree is not None
    problem, metadata = _caught(lambda: ocp.PyTreeCheckpointHandler().metadata(epath.Path(tree)).tree)
    if problem:
        return problem, None
    match = expected.match(metadata, str(candidate.directory))
    problem, restored = _caught(lambda: _read(tree, match))
    return problem, None if problem else match.rebuild(restored)


def _caught(read: Callable[[], Any]) -> tuple[str, Any]:
    """Whatever a damaged file makes Orbax or TensorStore raise; running out of memory is not the file's fault."""
    result, problem = None, ""
    try:
        result = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        problem = f"it cannot be read: {_innermost(error)}"
    return processes.first_of(problem), result


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error)[:500]}"


def _read(tree: Path, match: Match) -> Any:
    """The arrays, block by block into their layouts, in Orbax's view of the tree."""
    with bar(f"reading {tree.name}", match.nbytes):
        return ocp.PyTreeCheckpointHandler().restore(
            epath.Path(tree), args=ocp.args.PyTreeRestore(item=match.item, restore_args=match.restore_args)
        )
