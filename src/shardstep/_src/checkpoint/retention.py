"""Which checkpoints stay: the newest few, and every so many steps one for good."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ShardstepError
from . import directories, staging
from .directories import Stored


@dataclass(frozen=True)
class Retention:
    """What is kept of numbered checkpoints. None: all of them."""

    keep: int | None = None
    keep_every: int | None = None

    @classmethod
    def of(cls, keep: Any, keep_every: Any, step: int | None) -> Retention:
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ShardstepError(f"{name}={value!r}: use a number of checkpoints or steps, 1 or more")
        if keep_every is not None and keep is None:
            raise ShardstepError(f"keep_every={keep_every} adds to what keep= keeps: pass keep= too")
        if keep is not None and step is None:
            raise ShardstepError(f"keep={keep} is for numbered checkpoints: pass step= too")
        return cls(keep, keep_every)

    def apply(self, written: Stored) -> None:
        """Delete what is no longer wanted. `written` has just been committed: it is whole, and stays.

        Checkpoints with higher numbers are of a run that was set back. They are not counted, and not touched. What
        somebody reads stays until the next time.
        """
        if self.keep is None:
            return
        root = written.directory.parent
        if not directories.is_remote(root):
            staging.sweep(Path(os.fspath(root)))
        for stored in self.superfluous(directories.find(root), written):
            staging.remove(stored)

    def superfluous(self, found: list[Stored], written: Stored) -> list[Stored]:
        """Of what was found, what goes; the oldest first, so that a crash in between leaves the newest."""
        assert self.keep is not None and written.step is not None
        earlier = [s for s in found if s.committed and s.rank >= 0 and s.step is not None and s.step < written.step]
        steps = sorted({s.step for s in earlier if s.step is not None}, reverse=True)
        kept = {*steps[: self.keep - 1], *(n for n in steps if self.keep_every and n % self.keep_every == 0)}
        return sorted((s for s in earlier if s.step not in kept), key=lambda s: s.step or 0)
