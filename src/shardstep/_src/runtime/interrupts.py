"""Ctrl-C while a step runs must not cost the new state: the old one has been donated by then.

An exception that Python raises inside the call, or before the caller has taken hold of the results, would lose both. So
the interrupt waits: it is raised when the next call begins, before anything is donated, or a moment after this one
has returned, whichever comes first. A program's first call is compiled first, which takes long: there the interrupt
waits only if the arguments are gone. A handler that does so takes the place of Python's own when a step is called in
the main thread; at all other times it does what Python's does. A handler that the program has set is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

_MOMENT = 0.05  # seconds: for the caller to take hold of the results

_waiting: list[bool] = []  # at most one; whoever takes it out raises it, so that it is raised once
_calls = 0  # that run in the main thread, one inside the other
_returned = 0.0  # when the last one did
_needed: Sequence[jax.Array] | None = None  # the call may be interrupted while it still has these


def _handle(number: int, frame: Any) -> None:
    if _loses_nothing():
        signal.default_int_handler(number, frame)
    _waiting[:] = [True]
    if not _calls:
        _raise_later()


def _loses_nothing() -> bool:
    if not _calls:
        return time.monotonic() - _returned > _MOMENT
    return _needed is not None and not any(x.is_deleted() for x in _needed)


def _take() -> bool:
    try:
        return _waiting.pop()
    except IndexError:
        return False


def raise_waiting() -> None:
    """The interrupt that came during the last call, if one did."""
    if _waiting and threading.current_thread() is threading.main_thread() and _take():
        raise KeyboardInterrupt


@contextmanager
def deferred(needed: Sequence[Any] | None = None) -> Iterator[None]:
    """A block that Ctrl-C does not end; with `needed`, arrays, it does for as long as none of them was given away."""
    global _calls, _returned, _needed
    if threading.current_thread() is not threading.main_thread() or not _installed():
        yield
        return
    _needed = None if _calls or needed is None else [x for x in needed if not isinstance(x, jax.core.Tracer)]
    _calls += 1
    try:
        yield
    finally:
        _needed = None
        _returned = time.monotonic()
        _calls -= 1
        if _waiting:
            _raise_later()


def _installed() -> bool:
    current = signal.getsignal(signal.SIGINT)
    if current is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
    return current in (_handle, signal.default_int_handler)


def _raise_later() -> None:
    later = threading.Timer(2 * _MOMENT, _again)
    later.daemon = True
    later.start()


def _again() -> None:
    if _take():
        os.kill(os.getpid(), signal.SIGINT)
