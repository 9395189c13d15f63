"""The passes that a step goes through, in order, each with the result it left.

    with passes.recording() as trace:
        sharded.plan(state, batch)
    print(trace)

A pass calls `passes.leave(name, result)`. Nothing is kept unless somebody is recording.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Pass:
    """The name of a pass and what it made: a program, a schedule, or what it says about each leaf."""

    name: str
    result: Any

    def __str__(self) -> str:
        made = self.result
        lines = [f"{key}: {value}" for key, value in made.items()] if isinstance(made, Mapping) else [str(made)]
        return "\n".join([f"== {self.name}", *lines])


@dataclass(frozen=True)
class Trace:
    """All passes so far. Where a plan was tried in several ways, the later passes occur once for each."""

    passes: list[Pass] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.passes)

    def __str__(self) -> str:
        shown = [str(p) for p in self.passes]
        for i in range(len(shown) - 1, 0, -1):
            if str(self.passes[i].result) == str(self.passes[i - 1].result):
                shown[i] = f"== {self.passes[i].name}\nas before"
        return "\n\n".join(shown)


_TRACE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("shardstep_passes", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Keep the result of every pass that runs inside the `with` block."""
    trace = Trace()
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)


def leave(name: str, result: Result) -> Result:
    """Record the result of a pass, if somebody is recording; and return it."""
    trace = _TRACE.get()
    if trace is not None:
        trace.passes.append(Pass(name, result))
    return result
