"""Who is at work in a directory? Locks that a process loses when it dies, so that nothing has to be cleaned up.

They lie on the directories themselves (`flock`): a reader needs no right to write, and a rename takes its lock along.
Some network file systems have none. There, nobody waits for anybody, and nothing counts as dead that is not old.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

OLD = 24 * 3600  # seconds: what nobody has touched for so long is dead, where there are no locks
_POLL = 0.05  # seconds


class Lock:
    """A lock on a directory, until it is released or the process ends."""

    def __init__(self, fd: int | None):
        self._fd = fd

    @property
    def certain(self) -> bool:
        """Does the file system have locks?"""
        return self._fd is not None

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def take(directory: str | os.PathLike[str], shared: bool = False) -> Lock | None:
    """The lock, at once; None: somebody else has it."""
    if fcntl is None:
        return Lock(None)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        return Lock(None)
    return Lock(fd)


def wait(directory: str | os.PathLike[str], seconds: float) -> Lock | None:
    """The exclusive lock, as soon as it is free; None: it was not free in time."""
    until = time.monotonic() + seconds
    while (lock := take(directory)) is None and time.monotonic() < until:
        time.sleep(_POLL)
    return lock


@contextmanager
def reading(directory: Path | None) -> Iterator[None]:
    """What is being read is not removed. A writer that is just moving it is given the time to."""
    lock = None
    while directory is not None and lock is None:
        try:
            lock = take(directory, shared=True)
            if lock is not None and lock.certain and not _still_there(lock, directory):
                lock.release()  # it was replaced between the opening and the lock
                lock = None
        except OSError:
            break  # whoever reads it will say what is wrong
        if lock is None:
            time.sleep(_POLL)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _still_there(lock: Lock, directory: Path) -> bool:
    assert lock._fd is not None
    held, named = os.fstat(lock._fd), os.stat(directory)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def is_dead(directory: Path, lock: Lock) -> bool:
    """Has its writer died? Whoever asks holds its lock."""
    return lock.certain or time.time() - os.stat(directory).st_mtime > OLD
