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


def shortened(weights: Sequence[str], others: Iterable[str]) -> dict[str, str]:
    """A short name for each path: without what all weights begin with, and without the argument's name and place.

    `state[0]['layers']['wq']` is `layers.wq`, and `state[1][0].mu['layers']['wq']` is `mu.layers.wq`. Where two paths
    would share a name, both stay whole.
    """
    split = {path: dotted(path).split(".") for path in (*weights, *others)}
    columns = zip(*(split[path][:-1] for path in weights), strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    short = {path: ".".join(split[path][shared:]) for path in weights}
    for path, parts in split.items():
        if path not in short:
            inner = parts[1:]
            while len(inner) > 1 and inner[0].isdigit():
                inner = inner[1:]
            short[path] = ".".join(inner) or parts[0]
    uses: dict[str, int] = {}
    for name in short.values():
        uses[name] = uses.get(name, 0) + 1
    return {path: name if uses[name] == 1 else dotted(path) for path, name in short.items()}
