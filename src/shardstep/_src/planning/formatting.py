"""Bytes, counts, durations and arrays as a reader wants to see them."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def count(number: float) -> str:
    """12, 3.4k, 65.1M, 1.2G, 3.0T."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
