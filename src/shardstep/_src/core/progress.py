"""A bar for what takes long: on a terminal, for large states, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LARGE = 256 << 20  # bytes: below, it is over before a bar can be read


def silent(nbytes: int) -> None:
    """Where there is nobody to tell."""


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` bytes are done; the value is a function to say that some more are."""
    console = Console(stderr=True)
    if not console.is_terminal or total < LARGE or jax.process_index() != 0:
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
