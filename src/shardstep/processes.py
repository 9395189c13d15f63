"""What several processes must agree on. Alone, a process agrees with itself at no cost."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

_TEXT_BYTES = 1 << 14


def is_first() -> bool:
    """Of all processes, is this the one that speaks for them?"""
    return jax.process_index() == 0


def from_first(text: str) -> str:
    """The first process's text, on every process."""
    if jax.process_count() == 1:
        return text
    return _decode(multihost_utils.broadcast_one_to_all(_encode(text)))


def first_of(text: str) -> str:
    """The first text that is not empty, of any process: how one process's trouble becomes everybody's."""
    if jax.process_count() == 1:
        return text
    rows = multihost_utils.process_allgather(_encode(text)).reshape(-1, _TEXT_BYTES)
    return next(filter(None, map(_decode, rows)), "")


def _encode(text: str) -> np.ndarray:
    row = np.zeros(_TEXT_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    row[: data.size] = data
    return row


def _decode(row: np.ndarray) -> str:
    return np.asarray(row, np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")
