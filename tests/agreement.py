"""When two runs of a training program agree: `differences(states, ours)` lists the leaves that do not.

`states` are the plain run's, from the start to the last, which `ours` is compared with. Integers, booleans and random
keys must agree exactly. A floating-point leaf must agree to `tolerance` of its largest value, which is what summing in
another order costs. An optimizer that divides by the root of a second moment `nu` cannot keep that: the gradient, too,
agrees to `tolerance` of *its* largest value only, and the division makes a full-size step of whatever it is given,
rounding noise included. With `way` the longest way that any element of a weight has gone,

    |error of a step| = way |error of the gradient| / sqrt(nu) <= way tolerance max sqrt(nu) / sqrt(nu)

so a weight may be off by `tolerance` of its largest value or by that, whichever is more, and by no more than `2 way`
(two opposite steps) where a gradient was numerically zero. `nu` is the leaf of the same shape under the same path
(`opt.nu["dense"]["w"]` belongs to `params["dense"]["w"]`), read after every step: a later gradient hides an early zero.
A leaf that is stored in bf16 may also have been rounded the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

F32 = 1e-5
TINY = np.finfo(float).tiny


def assert_agree(states: Sequence[Any], ours: Any, tolerance: float = F32) -> None:
    found = list(differences(states, ours, tolerance))
    assert not found, "\n".join(found)


def differences(states: Sequence[Any], ours: Any, tolerance: float = F32) -> Iterator[str]:
    """The leaves of `ours` that are not those of the last of the plain run's states."""
    start, theirs = states[0], states[-1]
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    strengths = weakest_gradients(states[1:])
    leaves = zip(tree_leaves_with_path(theirs), jax.tree.leaves(start), jax.tree.leaves(ours), strict=True)
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
    allowed = np.maximum(tolerance * largest, float(jnp.finfo(theirs.dtype).eps) * np.abs(b))
    if strength is not None:
        way = np.abs(b - numbers(origin)).max(initial=0.0)
        allowed = np.maximum(allowed, way * np.minimum(tolerance / np.maximum(strength, TINY), 2))
    wrong = ~(apart <= allowed)  # a NaN on one side only is wrong
    if not wrong.any():
        return ""
    worst = apart[wrong].max() / max(largest, TINY)
    return f"{wrong.sum()} of {a.size} elements are up to {worst:.2g} of the largest value apart"


def numbers(leaf: Any) -> np.ndarray:
    """The values of a leaf, wide enough to subtract."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    x = np.asarray(leaf)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x


# --- which weights were divided by what ------------------------------------------------------------------------------


def weakest_gradients(states: Sequence[Any]) -> dict[int, np.ndarray]:
    """For each weight that has a second moment, by its leaf: the least sqrt(nu) / max sqrt(nu) after any step."""
    named = [tree_leaves_with_path(state) for state in states]
    found: dict[int, np.ndarray] = {}
    for moment, weight in pairs(named[-1]):
        for leaves in named:
            nu = np.abs(numbers(leaves[moment][1]))
            if (largest := nu.max(initial=0.0)) > 0:  # not yet any gradient
                found[weight] = np.minimum(found.get(weight, 1.0), np.sqrt(nu / largest))
    return found


def pairs(named: Sequence[tuple[Any, Any]]) -> Iterator[tuple[int, int]]:
    """(leaf of a second moment, leaf of a weight that goes by the same path). Where several fit, all of them."""
    for i, (path, nu) in enumerate(named):
        at = [k for k, key in enumerate(path) if getattr(key, "name", None) == "nu"]
        tail = path[at[-1] + 1 :] if at else ()
        for j, (other, weight) in enumerate(named):
            moment = any(getattr(key, "name", None) in ("mu", "nu") for key in other)
            if tail and not moment and other[-len(tail) :] == tail and np.shape(weight) == nu.shape:
                yield i, j
