"""How a checkpoint gets its place: it is written beside, finished, and only then takes the place of another.

At every moment a whole checkpoint can be found, whatever dies when. Of several writers of one checkpoint, one gets the
name; the others are told so.
"""

from __future__ import annotations

import abc
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from ..core.errors import ShardstepError
from ..runtime import processes
from . import directories, locks, object_stores
from .directories import COMMIT, REMOVED, REPLACED, STAGED, Stored

_NAMED, _BESIDE = "n", "b"  # the last letter of a token in a store
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class Request:
    """What `save` was asked for."""

    target: Stored
    overwrite: bool
    timeout: float  # seconds to wait for others


class Writing(abc.ABC):
    """A checkpoint on its way. The first process speaks for all of them."""

    directory: epath.Path  # where Orbax is to write it

    def __init__(self, request: Request, token: str):
        self.request = request
        self.target = request.target
        self.token = token

    @abc.abstractmethod
    def begin(self) -> None:
        """Claim a place to write; on the first process alone."""

    @abc.abstractmethod
    def commit(self) -> epath.Path:
        """It is whole: give it its place. On the first process alone."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """It will not be finished: leave nothing behind."""


def begin(request: Request) -> Writing:
    """Claim a place to write, on all processes; raises if the checkpoint cannot be written there."""
    refused, token = "", ""
    if processes.is_first():
        try:
            if not (refused := _occupied(request)):
                token = _token(request)
                writing = _writing(request, token)
                writing.begin()
        except (OSError, ImportError) as error:
            refused = f"{request.target.directory} cannot be written: {_said(error)}"
    refused, token = processes.from_first(f"{refused}\n{token}").rsplit("\n", 1)
    if refused:
        raise ShardstepError(refused)
    if str(request.target.directory).startswith("s3://"):
        object_stores.enable_s3()
    return writing if processes.is_first() else _writing(request, token)


def refuse_what_cannot_be_written(root: epath.Path) -> None:
    """Long before the first checkpoint is to be written under it; on all processes."""
    refused = ""
    if processes.is_first() and not directories.is_remote(root):
        try:
            Path(os.fspath(root)).mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK | os.X_OK):
                refused = f"{root} cannot be written: there is no permission, or its file system is read-only"
        except OSError as error:
            refused = f"{root} cannot be written: {_said(error)}"
    if refused := processes.from_first(refused):
        raise ShardstepError(refused)


def _writing(request: Request, token: str) -> Writing:
    return (InStore if directories.is_remote(request.target.directory) else OnDisk)(request, token)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _occupied(request: Request) -> str:
    """Why this checkpoint cannot be written here; empty if it can."""
    target = request.target
    directory = target.directory
    if not directory.exists():
        return ""
    if not directory.is_dir():
        return f"{directory} is a file: pass the path of a directory"
    if not any(directory.iterdir()):
        return ""
    if not target.is_checkpoint and not directories.is_remote(directory):
        return f"{directory} holds something that is no checkpoint: pass another path, or number checkpoints with step="
    if request.overwrite or target.problem():
        return ""
    return f"{directory} already holds a checkpoint: pass another step=, or overwrite=True"


# -- on a file system -------------------------------------------------------------------------------------------------


class OnDisk(Writing):
    """In a directory of its own, whose lock it holds; a rename gives it its name."""

    def __init__(self, request: Request, token: str):
        super().__init__(request, token)
        self._final = Path(os.fspath(self.target.directory))
        self._staging = Path(os.fspath(directories.staged(self.target.directory, token)))
        self.directory = epath.Path(self._staging / self._final.name)
        self._lock: locks.Lock | None = None

    def begin(self) -> None:
        self._staging.parent.mkdir(parents=True, exist_ok=True)
        sweep(self._staging.parent)
        self._staging.mkdir()
        self._lock = locks.take(self._staging)

    def commit(self) -> epath.Path:
        tries = 0
        while not self._named():
            tries += 1
            self._make_way(tries)
        self._leave()
        return self.target.directory

    def _named(self) -> bool:
        try:
            os.rename(self.directory, self._final)  # replaces an empty directory, and nothing else
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        return True

    def _make_way(self, tries: int) -> None:
        """Put what has the name beside the new one, if it may be replaced. Nobody must be reading it."""
        if not self.request.overwrite and not self.target.problem():
            raise ShardstepError(
                f"{self._final} was written by somebody else in the meantime, and is left as it is: let one run write"
                " to a directory, or pass another step= or overwrite=True"
            )
        try:
            lock = locks.wait(self._final, self.request.timeout)
            if lock is None:
                raise ShardstepError(
                    f"{self._final} cannot be replaced: it has been read for {self.request.timeout:g} s"
                )
            os.rename(self._final, self._staging / f"{REPLACED}-{tries}")
            lock.release()
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(self._final) and not self._final.is_dir():
                raise
            # another one, which replaces it too, was quicker

    def abandon(self) -> None:
        if self._lock is not None:  # otherwise it is not ours
            self._leave()

    def _leave(self) -> None:
        for path in self._staging.iterdir():
            _remove(path)
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _remove(path: Path) -> bool:
    """Delete a directory that nobody reads; a link alone, not what it leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    lock = locks.take(path)
    if lock is None:
        return False
    shutil.rmtree(path, ignore_errors=True)
    lock.release()
    return True


def sweep(parent: Path) -> None:
    """Clean up after runs that died. What they had finished gets its name first; what is being written stays."""
    for directory in sorted(parent.iterdir()):
        name, staged, _ = directory.name.partition(STAGED)
        if directory.is_symlink() or not (staged or REMOVED in directory.name) or not directory.is_dir():
            continue
        try:
            lock = locks.take(directory)
        except FileNotFoundError:  # its writer has just finished
            continue
        if lock is None:
            continue
        if locks.is_dead(directory, lock):
            if staged:
                _rescue(directory, parent / name)
            if all([_remove(path) for path in directory.iterdir()]):
                shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def _rescue(staging: Path, final: Path) -> None:
    """A writer died between its last file and the name, or between two names."""
    inside = [s for s in directories.within(epath.Path(staging), None) if s.committed and not s.problem()]
    if inside and not final.exists():
        os.rename(max(inside, key=lambda s: s.rank).directory, final)


def remove(stored: Stored) -> bool:
    """Delete a checkpoint: it is there, or it is not. False: somebody reads it."""
    if directories.is_remote(stored.directory):
        object_stores.remove(stored.directory, COMMIT)
        return True
    directory = Path(os.fspath(stored.directory))
    if directory.is_symlink():
        return False  # not ours
    lock = locks.take(directory)
    if lock is None:
        return False
    gone = directory.with_name(f"{directory.name}{REMOVED}{directories.new_token()}")
    os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)
    lock.release()
    return True


# -- in an object store ------------------------------------------------------------------------------------------------


class InStore(Writing):
    """Under its own name if that is free, else under one that nobody has. The last file makes it whole."""

    def __init__(self, request: Request, token: str):
        super().__init__(request, token)
        self.directory = self.target.directory
        if not token.endswith(_NAMED):
            self.directory = directories.staged(self.target.directory, token)

    def begin(self) -> None:
        for stored in self._beside():
            made = stored.directory.name.partition(STAGED)[2] or object_stores.claimed_by(stored.directory)
            if not stored.committed and directories.age(made) > locks.OLD:
                object_stores.remove(stored.directory, COMMIT)

    def commit(self) -> epath.Path:
        others = [s for s in self._beside() if s.step == self.target.step and s.directory != self.directory]
        if not self.request.overwrite and any(s.committed and not s.problem() for s in others):
            raise ShardstepError(
                f"{self.target.directory} was written by somebody else in the meantime, and is left as it is: let one"
                " run write to a directory, or pass another step= or overwrite=True"
            )
        for stored in others:
            if stored.committed:
                object_stores.remove(stored.directory, COMMIT)
        return self.directory

    def abandon(self) -> None:
        if processes.is_first():
            object_stores.remove(self.directory, COMMIT)

    def _beside(self) -> list[Stored]:
        root = self.target.directory
        return directories.find(root if self.target.step is None else root.parent)


def _token(request: Request) -> str:
    """A name of one's own. In a store it says whether the checkpoint could have its own name as well."""
    token = directories.new_token()
    directory = request.target.directory
    if not directories.is_remote(directory):
        return token
    free = not directory.exists() and object_stores.claim(directory, token + _NAMED)
    return token + (_NAMED if free else _BESIDE)
