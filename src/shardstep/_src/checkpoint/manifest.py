"""Is a checkpoint whole? A list of its files with their sizes and hashes, written last, says so.

Orbax gives a checkpoint its name in one rename, when everything is written: what has its name is complete as far as the
file system kept its word. The manifest finds what happens later: files that went missing, bytes that flipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core.progress import silent

NAME = "_SHARDSTEP"
_FORMAT = 1
# Orbax writes these while it commits, after the manifest; nothing is read from them.
_NOT_LISTED = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
_THREADS = 4  # hashing leaves Python's lock alone


def write(directory: Path, progress: Callable[[int], None] = silent) -> None:
    """List the files under `directory`. The list takes its place in one rename."""
    names = sorted(_files(directory))
    entries = dict(zip(names, _hash_all([directory / name for name in names], progress), strict=True))
    text = json.dumps({"format": _FORMAT, "files": entries}, indent=1)
    partial = directory / f"{NAME}.partial"
    with open(partial, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, directory / NAME)


def verify(directory: Path, share: tuple[int, int] = (0, 1), progress: Callable[[int], None] = silent) -> str:
    """What is wrong with the files under `directory`; empty if nothing is.

    With `share=(k, n)` every n-th file is read, from the k-th on: n processes read each file once between them.
    """
    try:
        listed = json.loads((directory / NAME).read_text())
        entries = {str(name): (int(size), str(digest)) for name, (size, digest) in listed["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its list of files, {NAME}, cannot be read ({error})"
    if listed.get("format") != _FORMAT:
        return f"its format is {listed.get('format')!r}, and this version of shardstep reads {_FORMAT}"
    for name, (size, _) in entries.items():
        file = directory / name
        if not file.is_file():
            return f"the file {name} is missing"
        if file.stat().st_size != size:
            return f"the file {name} has {file.stat().st_size} bytes where {size} were written"
    mine = sorted(entries)[share[0] :: share[1]]
    for name, (_, digest) in zip(mine, _hash_all([directory / name for name in mine], progress), strict=True):
        if digest != entries[name][1]:
            return f"the bytes of the file {name} have changed since they were written"
    return ""


def total_bytes(directory: Path) -> int:
    return sum((directory / name).stat().st_size for name in _files(directory))


def _files(directory: Path) -> Iterable[str]:
    for root, _, names in os.walk(directory):
        for name in names:
            if name not in _NOT_LISTED:
                yield (Path(root) / name).relative_to(directory).as_posix()


def _hash_all(files: list[Path], progress: Callable[[int], None]) -> list[tuple[int, str]]:
    def one(file: Path) -> tuple[int, str]:
        size = file.stat().st_size
        with open(file, "rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        progress(size)
        return size, digest

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, files))
