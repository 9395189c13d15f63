"""Ctrl-C while a step runs must not cost the new state: the old one has been donated by then.

An exception that Python raises inside the call, or before the caller has taken hold of the results, would lose both. So
the interrupt waits: it is raised when the next call begins, before anything is donated, or a moment after this one
has returned, whichever comes first. In other threads, and where the program has a handler of its own, nothing changes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MOMENT = 0.05  # seconds: for the caller to take hold of the results

_waiting = False


def _wait(*_: Any) -> None:
    global _waiting
    _waiting = True


def raise_waiting() -> None:
    """The interrupt that came during the last call, if one did."""
    global _waiting
    if _waiting and threading.current_thread() is threading.main_thread():
        _waiting = False
        raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """A block that Ctrl-C does not end."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _waiting:
            later = threading.Timer(_MOMENT, _again)
            later.daemon = True
            later.start()


def _again() -> None:
    global _waiting
    if _waiting:
        _waiting = False
        os.kill(os.getpid(), signal.SIGINT)
