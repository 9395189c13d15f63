"""Where checkpoints are stored: a directory of numbered steps, as Orbax's CheckpointManager has it, or one alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.progress import silent
from . import manifest

ITEM = "default"  # what CheckpointManager calls the one tree that it saves
TREE = "_METADATA"  # Orbax writes it beside the arrays of a tree
STEP = "_CHECKPOINT_METADATA"  # and this at the top of what it commits
MARK = "shardstep"  # in Orbax's metadata: this checkpoint was written with a manifest
WRITING = ".orbax-checkpoint-tmp"  # Orbax's ending for what is not committed yet

_NUMBERED = re.compile(r"(?:.*_)?(\d+)")


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk, whole or not."""

    directory: Path
    step: int | None  # None: it is the path itself
    committed: bool  # does it have its final name?

    @property
    def tree(self) -> Path | None:
        """The directory that holds the arrays."""
        if (self.directory / TREE).is_file():
            return self.directory
        inner = [d for d in (self.directory / ITEM, *sorted(self.directory.glob("*"))) if (d / TREE).is_file()]
        return inner[0] if inner else None

    @property
    def writing(self) -> Path:
        """Where Orbax keeps it until it is committed."""
        return self.directory.with_name(self.directory.name + WRITING)

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
        tree = self.tree
        if tree is None:
            return f"it holds no tree: the file {TREE} is missing"
        if (tree / manifest.NAME).is_file():
            return manifest.verify(tree, share, progress)
        return f"its list of files, {manifest.NAME}, is missing" if self._is_ours() else ""

    def _is_ours(self) -> bool:
        try:
            metadata = json.loads((self.directory / STEP).read_text())
        except (OSError, ValueError):
            return False
        return MARK in (metadata.get("custom_metadata") or {})


def at(path: Path, step: int | None) -> Stored:
    """Where a checkpoint is to be written."""
    return Stored(path if step is None else path / str(step), step, True)


def find(path: Path) -> list[Stored]:
    """What is stored under `path`, newest first; what was cut off is among it."""
    alone = Stored(path, None, True)
    if not path.is_dir():
        cut = Stored(alone.writing, None, False)
        return [cut] if cut.directory.is_dir() else []
    if alone.tree == path:
        return [alone]
    found = []
    for directory in path.iterdir():
        name = directory.name.partition(WRITING)[0]
        if directory.is_dir() and (number := _NUMBERED.fullmatch(name)):
            found.append(Stored(directory, int(number[1]), len(name) == len(directory.name)))
    if not found and alone.tree is not None:
        return [alone]  # one step of a CheckpointManager, named by itself
    return sorted(found, key=lambda s: (s.step, s.committed), reverse=True)
