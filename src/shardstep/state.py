"""State at rest: laying arrays out on the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .arguments import shape_of
from .errors import ShardstepError


def place(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Sequence[str], donated: Container[int] = ()
) -> list[Any]:
    """Lay arrays out. What is already in place is passed on.

    Of what is not and will be donated, a copy is laid out: `jax.device_put` may share memory with its argument (even
    when told not to), and donating that memory would take the user's own array away.
    """
    placed, moving = list(leaves), []
    held = Counter(map(id, leaves))
    for i, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if not _in_place(x, sharding):
            _check_devices(x, sharding, paths[i])
            moving.append(i)
        elif i in donated and held[id(x)] > 1:
            placed[i] = jnp.copy(x)  # the same array elsewhere among the arguments: only a copy may be given away
    if moving:
        sources = [_own(leaves[i]) if i in donated else _strong(leaves[i]) for i in moving]
        for i, x in zip(moving, jax.device_put(sources, [shardings[i] for i in moving]), strict=True):
            placed[i] = x
    return placed


def _in_place(x: Any, sharding: NamedSharding) -> bool:
    if isinstance(x, jax.core.Tracer):
        return True  # the sharded step is itself being traced (eval_shape, jit): whoever runs it lays it out
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


def _check_devices(x: Any, sharding: NamedSharding, path: str) -> None:
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
    """The state as a plain pytree of full-shape arrays."""
    return state
