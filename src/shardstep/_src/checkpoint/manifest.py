"""Is a checkpoint whole? A list of its files with their sizes and hashes, written last, says so.

Orbax commits a checkpoint when everything is written: what is committed is complete as far as the storage kept its
word. The manifest finds what happens later: files that went missing, bytes that flipped. It proves nothing about where
a checkpoint comes from, so what is found in one is never trusted: no path leads out of its directory, and what is read
as a whole is small.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

from etils import epath

from ..core.progress import silent

NAME = "_SHARDSTEP"
_FORMAT = 1
# Orbax writes these while it commits, after the manifest or before; nothing is read from them.
_NOT_LISTED = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
_THREADS = 4  # hashing leaves Python's lock alone
_READ_WHOLE = 64 << 20  # bytes: the largest file of JSON that is read; 100,000 leaves take a third of it
_PIECE = 1 << 20


def write(directory: epath.Path, progress: Callable[[int], None] = silent) -> None:
    """List the files under `directory`. The list appears whole or not at all."""
    names = sorted(name for name in _files(directory) if PurePosixPath(name).name not in _NOT_LISTED)
    entries = dict(zip(names, _hash_all([directory / name for name in names], progress), strict=True))
    text = json.dumps({"format": _FORMAT, "files": entries}, indent=1)
    if "://" in os.fspath(directory):
        (directory / NAME).write_text(text)  # an object store shows nothing before it has all
        return
    partial = directory / f"{NAME}.partial"
    with open(partial, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, directory / NAME)


def verify(directory: epath.Path, share: tuple[int, int] = (0, 1), progress: Callable[[int], None] = silent) -> str:
    """What is wrong with the files under `directory`; empty if nothing is.

    With `share=(k, n)` every n-th file is read, from the k-th on: n processes read each file once between them.
    """
    try:
        entries = _entries(directory / NAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        return f"its list of files, {NAME}, cannot be read ({error})"
    if isinstance(entries, str):
        return entries
    for name, (size, _) in entries.items():
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
            return f"its list of files, {NAME}, names {name!r}, which is no file of the checkpoint"
        file = directory / name
        if not file.is_file():
            return f"the file {name} is missing"
        if (found := file.stat().length) != size:
            return f"the file {name} has {found} bytes where {size} were written"
    mine = sorted(entries)[share[0] :: share[1]]
    for name, (_, digest) in zip(mine, _hash_all([directory / name for name in mine], progress), strict=True):
        if digest != entries[name][1]:
            return f"the bytes of the file {name} have changed since they were written"
    return ""


def _entries(file: epath.Path) -> dict[str, tuple[int, str]] | str:
    if (size := file.stat().length) > _READ_WHOLE:
        raise ValueError(f"it has {size} bytes")
    listed: Any = json.loads(file.read_text())
    if (version := listed.get("format")) != _FORMAT:
        return f"its format is {str(version)[:50]!s}, and this version of shardstep reads {_FORMAT}"
    return {str(name): (int(size), str(digest)) for name, (size, digest) in listed["files"].items()}


def intrusion(directory: epath.Path) -> str:
    """What a checkpoint must not hold, whoever wrote it: links, pipes, and tables too large to be read as a whole."""
    if "://" in os.fspath(directory):
        names = [name for name in _files(directory) if _is_read_whole(name)]
    else:
        names = []
        for root, folders, files in os.walk(directory):
            for name in (*folders, *files):
                path = os.path.join(root, name)
                try:
                    shown, mode = os.path.relpath(path, directory), os.lstat(path).st_mode
                except FileNotFoundError:
                    continue  # somebody is deleting it
                if stat.S_ISLNK(mode):
                    return f"{shown} is a symbolic link: a checkpoint holds files of its own"
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # to read a pipe may take for ever
                    return f"{shown} is neither a file nor a directory"
            inside = [os.path.relpath(os.path.join(root, name), directory) for name in files]
            names += filter(_is_read_whole, inside)
    for name in names:
        if (size := (directory / name).stat().length) > _READ_WHOLE:
            return f"the file {name} has {size} bytes, more than a table of contents can have ({_READ_WHOLE})"
    return ""


def _is_read_whole(name: str) -> bool:
    """Orbax's and our own JSON: everything except the arrays."""
    path = PurePosixPath(name)
    return path.name.startswith("_") or path.name == ".zarray" or "array_metadatas" in path.parts


def total_bytes(directory: epath.Path) -> int:
    return sum((directory / name).stat().length for name in _files(directory))


def _files(directory: epath.Path) -> Iterator[str]:
    if "://" not in os.fspath(directory):
        for root, _, names in os.walk(directory):
            base = os.path.relpath(root, directory)
            yield from (PurePosixPath(base, name).as_posix() for name in names)
        return
    for path in directory.iterdir():
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _files(path))
        elif path.name:
            yield path.name


def _hash_all(files: list[epath.Path], progress: Callable[[int], None]) -> list[tuple[int, str]]:
    def one(file: epath.Path) -> tuple[int, str]:
        size, digest = 0, hashlib.sha256()
        with file.open("rb") as f:
            while piece := f.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        progress(size)
        return size, digest.hexdigest()

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, files))
