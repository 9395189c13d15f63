"""State at rest: laying arrays out on the mesh."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..capture.arguments import shape_of
from ..core.errors import ShardstepError
from ..core.meshes import untyped
from ..core.padded import Padded
from .processes import is_local, lay_out


@dataclass(frozen=True)
class Resting:
    """How a leaf is held at rest: over which devices, and in an array of which shape, if not its own."""

    path: str
    sharding: NamedSharding
    held: tuple[int, ...] | None = None


def place(leaves: Sequence[Any], rests: Sequence[Resting], donated: Container[int] = ()) -> list[Any]:
    """The arrays that hold the leaves at rest. What is already in place is passed on.

    Of what is not and will be donated, a copy is laid out: `jax.device_put` may share memory with its argument (even
    when told not to), and donating that memory would take the user's own array away.
    """
    leaves = [_arrays_alike(x, rest) for x, rest in zip(leaves, rests, strict=True)]
    placed, moving = list(leaves), []
    seen = Counter(map(id, leaves))
    for i, (x, rest) in enumerate(zip(leaves, rests, strict=True)):
        if not _in_place(x, rest.sharding):
            _check_devices(x, rest)
            moving.append(i)
        elif i in donated and seen[id(x)] > 1:
            placed[i] = jnp.copy(x)  # the same array elsewhere among the arguments: only a copy may be given away
    if moving:
        untied = [untyped(leaves[i], rests[i].sharding.mesh) for i in moving]
        sources = [_own(x) if i in donated else _strong(x) for i, x in zip(moving, untied, strict=True)]
        for i, x in zip(moving, lay_out(sources, [rests[i].sharding for i in moving]), strict=True):
            placed[i] = x
    return placed


def _arrays_alike(x: Any, rest: Resting) -> Any:
    """The leaf as an array of the shape that it has at rest."""
    if isinstance(x, Padded) and x.data.shape == rest.held:
        return x.data
    if rest.held is None and not isinstance(x, Padded):
        return x
    held = rest.held or x.shape
    if isinstance(x, jax.core.Tracer):  # on no device yet
        return fitted(x, x.shape, held)
    _check_devices(x.data if isinstance(x, Padded) else x, rest)
    array = untyped(x.data if isinstance(x, Padded) else x, rest.sharding.mesh)
    if isinstance(array, jax.Array) and _computes_on(array, rest.sharding):
        return _fit(array, x.shape, held, rest.sharding)
    return np.pad(np.asarray(x), [(0, new - old) for old, new in zip(x.shape, held, strict=True)])


def _computes_on(array: jax.Array, sharding: NamedSharding) -> bool:
    """Can one program take the array as it is and return one with this sharding?"""
    if is_local(array) and not sharding.is_fully_addressable:
        return False
    return not array.committed or array.sharding.device_set == sharding.device_set


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _fit(x: jax.Array, shape: tuple[int, ...], held: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(fitted(x, shape, held), sharding)


def fitted(x: jax.Array, shape: tuple[int, ...], held: tuple[int, ...], afresh: bool = False) -> jax.Array:
    """Crop to `shape`, zero-pad to `held`; what has that shape keeps its padding, unless `afresh`."""
    if x.shape == held and not afresh:
        return x
    return jnp.pad(x[tuple(map(slice, shape))], [(0, new - old) for old, new in zip(shape, held, strict=True)])


def returned(x: jax.Array, shape: tuple[int, ...]) -> Any:
    """A padded array as its user sees it."""
    return x[tuple(map(slice, shape))] if isinstance(x, jax.core.Tracer) else Padded(x, shape)


def _in_place(x: Any, sharding: NamedSharding) -> bool:
    if isinstance(x, jax.core.Tracer):
        return True  # the sharded step is itself being traced (eval_shape, jit): the outer program lays it out
    if not isinstance(x, jax.Array) or x.is_deleted() or x.aval.weak_type:
        return False
    return x.sharding == sharding or (x.committed and x.sharding.is_equivalent_to(sharding, x.ndim))


def _own(x: Any) -> Any:
    return jnp.copy(_strong(x)) if isinstance(x, jax.Array) else _strong(x)


def _strong(x: Any) -> Any:
    """Without JAX's weak type, which Python numbers have: the traced program has settled all types."""
    if isinstance(x, jax.Array):
        return x.astype(x.dtype) if x.aval.weak_type and not x.is_deleted() else x
    return np.asarray(x, shape_of(x)[1]) if np.isscalar(x) else x


def _check_devices(x: Any, rest: Resting) -> None:
    path, sharding = rest.path, rest.sharding
    if isinstance(x, jax.Array) and x.is_deleted():
        raise ShardstepError(
            f"{path} was donated to an earlier call and is gone: use the state that the call returned, or pass"
            " options=Options(donate=False)"
        )
    if isinstance(x, jax.Array) and x.committed and not x.sharding.device_set & sharding.device_set:
        raise ShardstepError(
            f"{path} is on {_devices(x.sharding.device_set)}, but the mesh has {_devices(sharding.device_set)}: give a"
            " mesh with the devices that hold the state, or move the state with jax.device_put"
        )


def _devices(devices: set[Any]) -> str:
    listed = sorted(devices, key=lambda d: d.id)
    shown = ", ".join(str(d) for d in listed[:4])
    return shown if len(listed) <= 4 else f"{shown}, ... ({len(listed)} devices)"


def logical(state: Any) -> Any:
    """The state as a plain pytree of full-shape arrays: `Padded` leaves become ordinary arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, Padded) else x, state)
