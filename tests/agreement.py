"""When two runs of a training program agree: `differences(start, ours, theirs)` lists the leaves that do not.

Integers, booleans and random keys must agree exactly. A floating-point leaf must agree to `tolerance` of its largest
value, which is what summing in another order costs. One kind of element cannot: an optimizer that divides by the
root of the second moment `nu` turns a gradient that is rounding noise into a full-size step. So a weight is compared
where its gradient is not numerically zero,

    sqrt(nu) >= 1e-3 max sqrt(nu)        (`nu` is the leaf of the same shape under the same path, e.g. opt.nu["dense"]["w"])

and elsewhere must only have stayed within reach: no further apart than two opposite steps of the leaf's longest way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

F32 = 1e-5
NUMERICALLY_ZERO = 1e-3


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
    allowed = np.full(a.shape, tolerance * np.abs(b).max(initial=0.0))
    if strength is not None:
        reach = 2 * np.abs(b - numbers(origin)).max(initial=0.0)
        allowed = np.where(strength < NUMERICALLY_ZERO, np.maximum(allowed, reach), allowed)
    if (apart <= allowed).all():
        return ""
    worst = apart.max() / max(np.abs(b).max(), np.finfo(float).tiny)
    return f"{(~(apart <= allowed)).sum()} of {a.size} elements are up to {worst:.2g} of the largest value apart"


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
        strength = np.sqrt(nu / max(nu.max(initial=0.0), np.finfo(float).tiny))
        for i, (path, leaf) in enumerate(named):
            moment = position(path, "nu") is not None or position(path, "mu") is not None
            if tail and not moment and path[-len(tail) :] == tail and np.shape(leaf) == nu.shape:
                found[i] = np.minimum(found.get(i, strength), strength)
    return found


def position(path: Any, name: str) -> int | None:
    return next((i for i, key in enumerate(path) if getattr(key, "name", None) == name), None)
