"""Read a checkpoint into the layouts of a plan: the newest that is whole, or the one that is asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ..core.errors import ShardstepError
from ..core.progress import bar
from ..planning.plan import Plan
from ..runtime import processes
from . import directories, locks, object_stores
from .directories import Stored
from .event_loops import patient
from .matching import Expected, Match, expect
from .saving import bytes_under, checked_step, finish

_CANDIDATES = 100  # no more are tried


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
    return _restore(path, plan, step)[1]


def restore_newest(path: str | os.PathLike[str], plan: Plan) -> tuple[int | None, Any]:
    """As `restore`, with the number of the checkpoint that was the newest whole one."""
    return _restore(path, plan, None)


def _restore(path: str | os.PathLike[str], plan: Plan, step: int | None) -> tuple[int | None, Any]:
    if not isinstance(plan, Plan):
        raise ShardstepError(
            f"restore reads into the layouts of a plan, and {type(plan).__name__} is none:"
            " pass step.plan(state, batch), where shapes (jax.eval_shape) will do for the state"
        )
    root, step = directories.root_of(path), checked_step(step)
    expected = expect(plan)
    if str(root).startswith("s3://"):
        object_stores.enable_s3()
    finish()
    tried: set[epath.Path] = set()
    while candidate := _next(root, step, tried):
        problem, state = _try(candidate, expected)
        if not problem:
            return candidate.step, state
        tried.add(candidate.directory)
        if step is not None and _next(root, step, tried) is None:
            raise ShardstepError(f"the checkpoint {candidate.directory} is broken: {problem}")
        if step is None and processes.is_first():
            warnings.warn(f"skipping the checkpoint {candidate.directory}: {problem}", stacklevel=3)
    raise ShardstepError(
        f"no whole checkpoint in {root}" if step is None else f"no checkpoint of step {step} in {root}"
    )


def _next(root: epath.Path, step: int | None, tried: set[epath.Path]) -> Stored | None:
    """The newest that was not tried; with a step, the one of that number that counts.

    It is looked for again each time: a run that goes on replaces and deletes what was there.
    """
    if len(tried) >= _CANDIDATES:
        return None

    def look() -> str:
        found = _find(root) if step is None else [s for s in _find(root) if s.step == step][:1]
        left = (s for s in found if s.directory not in tried)
        return next((f"{'' if s.step is None else s.step} {int(s.committed)} {s.directory}" for s in left), "")

    if not (line := _listed(look)):
        return None
    number, committed, where = line.split(" ", 2)
    return Stored(epath.Path(where), int(number) if number else None, committed == "1")


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The number of the newest committed checkpoint under `path`, or None. `restore` may find that it is broken."""
    root = directories.root_of(path)
    agreed = _listed(lambda: next((str(s.step) for s in _find(root) if s.committed and s.step is not None), ""))
    return int(agreed) if agreed else None


def _listed(look: Callable[[], str]) -> str:
    """What the first process sees, on all of them: a network file system may show others an older state."""
    found, problem = "", ""
    if processes.is_first():
        try:
            found = look()
        except (OSError, ImportError) as error:
            problem = f"checkpoints cannot be looked for: {type(error).__name__}: {error}"
    if problem := processes.from_first(problem):
        raise ShardstepError(problem)
    return processes.from_first(found)


def _find(root: epath.Path) -> list[Stored]:
    return directories.find(root)


def _try(candidate: Stored, expected: Expected) -> tuple[str, Any]:
    """(what is wrong, the state). All processes reach the same conclusion."""
    local = None if directories.is_remote(candidate.directory) else Path(os.fspath(candidate.directory))
    with locks.reading(local):
        return _try_locked(candidate, expected)


def _try_locked(candidate: Stored, expected: Expected) -> tuple[str, Any]:
    share = (jax.process_index(), jax.process_count())
    with bar(f"checking {candidate.directory.name}", bytes_under(candidate.directory)) as advance:
        problem, found = _caught(lambda: candidate.problem(share, advance))
        if problem := problem or processes.first_of(found):
            return problem, None
    tree = candidate.tree
    assert tree is not None
    with patient():
        problem, metadata = _caught(lambda: ocp.PyTreeCheckpointHandler().metadata(tree).tree)
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


def _read(tree: epath.Path, match: Match) -> Any:
    """The arrays, block by block into their layouts, in Orbax's view of the tree."""
    with bar(f"reading {tree.name}", match.nbytes), patient():
        return ocp.PyTreeCheckpointHandler().restore(
            tree, args=ocp.args.PyTreeRestore(item=match.item, restore_args=match.restore_args)
        )
