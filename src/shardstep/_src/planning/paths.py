"""Paths of leaves as people write them: `layers.3.mlp.kernel`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from jax.tree_util import KeyPath, keystr


def dotted(path: KeyPath | str) -> str:
    """`.params['layers'][3]` as `params.layers.3`."""
    text = path if isinstance(path, str) else keystr(path)
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", text).strip(".") or "the result"


def within(weights: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Where each weight is in the tree of weights: its path without what all of them begin with."""
    split = {path: dotted(path).split(".") for path in weights}
    columns = zip(*(parts[:-1] for parts in split.values()), strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    return {path: tuple(parts[shared:]) for path, parts in split.items()}


def shortened(weights: Sequence[str], others: Iterable[str]) -> dict[str, str]:
    """A short name for each path: without what all weights begin with, and without the argument's name and place.

    `state[0]['layers']['wq']` is `layers.wq`, and `state[1][0].mu['layers']['wq']` is `mu.layers.wq`. Where two paths
    would share a name, or nothing but numbers would be left, they stay whole.
    """
    short = {path: ".".join(parts) for path, parts in within(weights).items()}
    for path in others:
        first, *inner = dotted(path).split(".")
        while len(inner) > 1 and inner[0].isdigit():
            inner = inner[1:]
        short[path] = ".".join(inner) or first
    uses: dict[str, int] = {}
    for name in short.values():
        uses[name] = uses.get(name, 0) + 1
    return {
        path: name if uses[name] == 1 and not name.replace(".", "").isdigit() else dotted(path)
        for path, name in short.items()
    }


_NUMBER = r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])"


def starred(path: str) -> str:
    """The path with a star for each number that stands alone: the same leaf of every layer."""
    return re.sub(_NUMBER, "*", path)


def common(paths: Sequence[str]) -> str:
    """One name for paths that differ in numbers: `opt_state.0.mu.layers.*.wq`, with stars where they differ."""
    numbers = zip(*(re.findall(_NUMBER, path) for path in paths), strict=True)
    shown = iter([first if all(n == first for n in rest) else "*" for first, *rest in numbers])
    return re.sub(_NUMBER, lambda _: next(shown), paths[0])
