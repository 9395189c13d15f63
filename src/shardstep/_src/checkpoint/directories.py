"""Where checkpoints are stored: a directory of numbered steps, as Orbax's CheckpointManager has it, or one alone.

While `3` is written, it lies in `3.shardstep-TOKEN`, and whoever writes it holds the lock of that directory. The token
is its own, so that writers never meet. Beside the new checkpoint lies the one that it replaces, for as long as
neither has the name. A checkpoint that is removed is called `3.removed-TOKEN` first: it is there, or it is not.

An object store knows no renaming and no locks. There `3.shardstep-TOKEN` is the checkpoint itself, wherever `3` was
taken, and what a commit marker was written to, last of all, is whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from etils import epath

from ..core.errors import ShardstepError
from ..core.progress import silent
from . import manifest, object_stores

ITEM = "default"  # what CheckpointManager calls the one tree that it saves
TREE = "_METADATA"  # Orbax writes it beside the arrays of a tree
STEP = "_CHECKPOINT_METADATA"  # and this at the top of what it commits
COMMIT = "commit_success.txt"  # and this last, where it cannot rename
MARK = "shardstep"  # in Orbax's metadata: this checkpoint was written with a manifest
WRITING = ".orbax-checkpoint-tmp"  # Orbax's ending for what is not committed yet
STAGED = ".shardstep-"  # ours
REMOVED = ".removed-"
REPLACED = "replaced"  # in a directory that is staged: what was there before

_NUMBERED = re.compile(r"(?:.*_)?(\d+)")
_SCHEMES = ("gs://", "s3://")


@dataclass(frozen=True)
class Stored:
    """A checkpoint in its place, whole or not."""

    directory: epath.Path
    step: int | None  # None: it is the path itself
    committed: bool  # did its writer come to the end?
    rank: int = 0  # of several of one step, the highest counts

    @property
    def tree(self) -> epath.Path | None:
        """The directory that holds the arrays."""
        for directory in (self.directory, self.directory / ITEM):
            if (directory / TREE).is_file():
                return directory
        inner = [d for d in _directories(self.directory) if (d / TREE).is_file()]
        return inner[0] if inner else None

    @property
    def is_checkpoint(self) -> bool:
        """Has Orbax written here, whole or not? Nothing else may ever be replaced."""
        return (self.directory / TREE).is_file() or (self.directory / STEP).is_file()

    def problem(self, share: tuple[int, int] = (0, 1), progress: Callable[[int], None] = silent) -> str:
        """Why it is not whole; empty if it is, as far as can be told without reading it as a tree.

        What plain Orbax wrote has no manifest: that it was committed must do.
        """
        if not self.committed:
            return "it was cut off while it was written"
        if self.step is not None and not is_remote(self.directory) and os.path.islink(self.directory):
            return f"it is a symbolic link: name what it leads to, {os.path.realpath(self.directory)}, as the path"
        tree = self.tree
        if tree is None:
            return f"it holds no tree: the file {TREE} is missing"
        if problem := manifest.intrusion(self.directory):
            return problem
        if (tree / manifest.NAME).is_file():
            return manifest.verify(tree, share, progress)
        return f"its list of files, {manifest.NAME}, is missing" if self._is_ours() else ""

    @property
    def is_sealed(self) -> bool:
        """Was the list of its files written, which is written last?"""
        tree = self.tree
        return tree is not None and (tree / manifest.NAME).is_file()

    def _is_ours(self) -> bool:
        try:
            if not (self.directory / STEP).is_file():
                return False
            metadata = json.loads((self.directory / STEP).read_text())
            return MARK in (metadata.get("custom_metadata") or {})
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):
            return False


def root_of(path: str | os.PathLike[str]) -> epath.Path:
    """What the user calls the directory, as an absolute path or the address of an object store."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ShardstepError(f"a checkpoint needs the path of a directory, and {path!r} is none")
    if text.startswith(_SCHEMES):
        return epath.Path(text.rstrip("/"))
    if "://" in text:
        raise ShardstepError(f"{text}: use the path of a directory, or the address of an object store, gs:// or s3://")
    return epath.Path(os.path.abspath(text))


def age(token: str) -> float:
    """How many seconds ago a token was made; 0 if it is none."""
    try:
        return time.time() - int(token[:16], 16) / 1e9
    except ValueError:
        return 0.0


def is_remote(path: epath.Path) -> bool:
    """Is it in an object store?"""
    return os.fspath(path).startswith(_SCHEMES)


def new_token() -> str:
    """A name of one's own; later ones sort after earlier ones."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def at(root: epath.Path, step: int | None) -> Stored:
    """Where a checkpoint is to be in the end."""
    directory = root if step is None else root / str(step)
    if is_remote(root):
        object_stores.refresh(root)
    return _in_store(directory, step) if is_remote(root) else Stored(directory, step, True)


def staged(directory: epath.Path, token: str) -> epath.Path:
    return directory.with_name(f"{directory.name}{STAGED}{token}")


def find(root: epath.Path) -> list[Stored]:
    """What is stored under `root`, newest first; what was cut off is among it."""
    return sorted(_remote(root) if is_remote(root) else _local(root), key=_order, reverse=True)


def _order(stored: Stored) -> tuple[int, bool, int, str]:
    return stored.step or 0, stored.committed, stored.rank, stored.directory.name


def _local(root: epath.Path) -> list[Stored]:
    beside = _named_after(root, root.parent)
    if not root.is_dir():
        return beside
    alone = Stored(root, None, True)
    if alone.tree == root:
        return [alone, *beside]
    found = []
    for directory in _directories(root):
        name, staging, _ = directory.name.partition(STAGED)
        name = name.partition(WRITING)[0]
        if not (number := _NUMBERED.fullmatch(name)):
            continue
        step = int(number[1])
        if staging:
            found += within(directory, step)
        else:
            found.append(Stored(directory, step, name == directory.name))
    if not found and alone.tree is not None:
        return [alone]  # one step of a CheckpointManager, named by itself
    return found or beside


def _named_after(root: epath.Path, parent: epath.Path) -> list[Stored]:
    """What was being written to be `root` itself."""
    if not parent.is_dir():
        return []
    found = []
    for directory in _directories(parent):
        if directory.name.startswith(root.name + STAGED):
            found += within(directory, None)
        elif directory.name == root.name + WRITING:
            found.append(Stored(directory, None, False))
    return found


def within(staging: epath.Path, step: int | None) -> list[Stored]:
    """What lies in a directory that is, or was, being written: the new one and the one that it replaces."""
    found = []
    for directory in _directories(staging):
        before = directory.name.startswith(REPLACED)
        stored = Stored(directory, step, True, rank=-2 if before else -1)
        whole = WRITING not in directory.name and (before or stored.is_sealed)
        found.append(stored if whole else Stored(directory, step, False))
    return found or [Stored(staging, step, False)]


def _remote(root: epath.Path) -> list[Stored]:
    object_stores.refresh(root)
    if (root / TREE).is_file():
        found = [root]
    else:
        found = [d for d in _directories(root) if REMOVED not in d.name] if root.is_dir() else []
    beside = [d for d in _directories(root.parent) if d.name.startswith(root.name + STAGED)] if not found else []
    result = []
    for directory in found + beside:
        name, again, _ = directory.name.partition(STAGED)
        number = _NUMBERED.fullmatch(name)
        step = int(number[1]) if number and directory not in (root, *beside) else None
        if step is None and directory in found and directory != root:
            continue
        result.append(_in_store(directory, step, rank=1 if again else 0))
    return result


def _in_store(directory: epath.Path, step: int | None, rank: int = 0) -> Stored:
    """Whole is what has all its marks: Orbax's, and the list of files if we wrote it."""
    stored = Stored(directory, step, True, rank)
    whole = (directory / COMMIT).is_file() and (stored.is_sealed or not stored._is_ours())
    return stored if whole else Stored(directory, step, False, rank)


def _directories(directory: epath.Path) -> list[epath.Path]:
    try:
        return sorted((d for d in directory.iterdir() if d.is_dir()), key=lambda d: d.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
