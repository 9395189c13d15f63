"""Orbax closes its event loop as soon as one array cannot be read, while TensorStore still reads the others.

Each of those then finds the loop closed and prints a traceback. A loop made here finishes what was begun before it
closes, and what comes later still is dropped: nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patient() -> Iterator[None]:
    """Event loops that are made in this block wait for their tasks when they are closed, and are silent afterwards."""
    make = asyncio.new_event_loop

    def make_patient() -> asyncio.AbstractEventLoop:
        loop = make()
        close, call = loop.close, loop.call_soon_threadsafe

        def call_unless_closed(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except RuntimeError:
                if not loop.is_closed():
                    raise
            return None

        def finish_and_close() -> None:
            if not loop.is_closed() and not loop.is_running() and (left := asyncio.all_tasks(loop)):
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            close()

        loop.close = finish_and_close  # type: ignore[method-assign]
        loop.call_soon_threadsafe = call_unless_closed  # type: ignore[method-assign,assignment]
        return loop

    asyncio.new_event_loop = make_patient
    try:
        yield
    finally:
        asyncio.new_event_loop = make
