"""When two runs of a training program agree: `differences(start, ours, theirs)` lists the leaves that do not.

Integers, booleans and random keys must agree exactly. A floating-point leaf must agree to `tolerance` of its largest
value, which is what summing in another order costs. An optimizer that divides by the root of a second moment cannot
keep that: the gradient, too, agrees to `tolerance` of *its* largest value, and the division makes a full-size step of
whatever it is given, rounding noise included. With `way` the longest way that any element of a weight has gone,

    |step's error| = way |gradient's error| / sqrt(nu) <= way tolerance max sqrt(nu) / sqrt(nu)

so a weight may be off by `tolerance` of its largest value or by that, whichever is more, and by no more than `2 way`
(two opposite steps) where its gradient is numerically zero. `nu` is the leaf of the same shape under the same path:
`opt.nu["dense"]["w"]` belongs to `params["dense"]["w"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

F32 = 1e-5
TINY = np.finfo(float).tiny


def assert_agree(start: Any, ours: Any, theirs: Any, tolerance: float = F32) -> None:
    found = list(differences(start, ours, theirs, tolerance))
    assert not found, "\n".join(found)


def differences(start: Any, ours: Any, theirs: Any, tolerance: float = F32) -> Iterator[str]:
    """The leaves of `ours` that are not those of `theirs`, two states that came of `start`."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    named = tree_leaves_with_path(theirs)
    strengths = gradient_strengths(named)
    leaves = zip(named, jax.tree.leaves(start), jax.tree.leaves(ours), strict=True)
    for i, ((path, b), origin, a) in enumerate(leaves):
        if reason := difference(a, b, origin, strengths.get(i), tolerance):
            yield f"{keystr(path)}: {reason}"


def difference(ours: Any, theirs: Any, origin: Any, strength: np.ndarray | None, tolerance: float) -> str:
    """Why one leaf differs; nothing if it does not."""
    if not isinstance(theirs, jax.Array):  # an Equinox module's functions
        return "" if ours == theirs else f"{ours} is not {theirs}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{list(ours.shape)} is not {theirs.dtype}{list(theirs.shape)}"
    a, b = numbers(ours), numbers(theirs)
    if not jnp.issubdtype(theirs.dtype, jnp.inexact):
        return "" if (a == b).all() else f"{(a != b).sum()} of {a.size} elements differ"
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = np.abs(b).max(initial=0.0)
    allowed = np.full(a.shape, tolerance * largest)
    if strength is not None:
        way = np.abs(b - numbers(origin)).max(initial=0.0)
        allowed = np.maximum(allowed, way * np.minimum(tolerance / np.maximum(strength, TINY), 2))
    wrong = ~(apart <= allowed)
    if not wrong.any():
        return ""
    return f"{wrong.sum()} of {a.size} elements are up to {apart[wrong].max() / max(largest, TINY):.2g} of the largest value apart"


def numbers(leaf: Any) -> np.ndarray:
    """The values of a leaf, wide enough to subtract."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    x = np.asarray(leaf)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def gradient_strengths(named: list[tuple[Any, Any]]) -> dict[int, np.ndarray]:
    """For each weight that has a second moment: sqrt(nu) over its largest value. Where two moments fit, the weaker."""
    moments = [(path[at + 1 :], numbers(nu)) for path, nu in named if (at := position(path, "nu")) is not None]
    found: dict[int, np.ndarray] = {}
    for tail, nu in moments:
        strength = np.sqrt(nu / max(nu.max(initial=0.0), TINY))
        for i, (path, leaf) in enumerate(named):
            moment = position(path, "nu") is not None or position(path, "mu") is not None
            if tail and not moment and path[-len(tail) :] == tail and np.shape(leaf) == nu.shape:
                found[i] = np.minimum(found.get(i, strength), strength)
    return found


def position(path: Any, name: str) -> int | None:
    return next((i for i, key in enumerate(path) if getattr(key, "name", None) == name), None)
