"""A mesh that reaches into other processes: global arrays of local values, and what all processes must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..capture.arguments import shape_of
from ..core import compat
from ..core.errors import ShardstepError

_TEXT_BYTES = 1 << 14
_DIGEST = 16  # bytes


def lay_out(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """`jax.device_put`, for a mesh that may reach into other processes.

    What a process holds by itself, on the host or on its own devices, is read as the whole value, the same on every
    process: each lays out its own blocks of it and nothing travels. (`jax.device_put` sends such values around to
    compare them, on every call.)
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(list(values), list(shardings))
    return [
        _blocks(x, sharding) if is_local(x) else jax.device_put(x, sharding)
        for x, sharding in zip(values, shardings, strict=True)
    ]


def is_local(x: Any) -> bool:
    """Does this process hold all of it?"""
    return getattr(x, "is_fully_addressable", True)


def whole(x: Any) -> Any:
    """The whole value, held by every process for itself: on the host, or a PRNG key on one device."""
    if _is_key(x):
        return jax.random.wrap_key_data(whole(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if is_local(x):
        return np.asarray(x)
    logical = jnp.asarray(x)  # of a padded array
    return np.asarray(multihost_utils.process_allgather(logical, tiled=True))


def _blocks(x: Any, sharding: NamedSharding) -> jax.Array:
    """This process's blocks of a value that it holds whole, as its part of a global array."""
    if _is_key(x):
        return jax.random.wrap_key_data(_blocks(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x, shape_of(x)[1])
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(shape_of(x)[1], jax.dtypes.prng_key)


def join(part: Any, path: str, dim: int, mesh: Mesh, names: tuple[str, ...]) -> jax.Array:
    """One array of the parts that the processes hold, one after the other along `dim` in the order of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * dim, names))
    devices = len(sharding.addressable_devices)
    host = np.asarray(part)
    if host.ndim <= dim or host.shape[dim] % devices:
        raise ShardstepError(
            f"this process's part of {path} has the shape {list(host.shape)}: its {devices} devices do not divide the"
            f" examples on dimension {dim}. Give each process a multiple of {devices} examples."
        )
    return jax.make_array_from_process_local_data(sharding, host)


# -- agreement ----------------------------------------------------------------------------------------------------


def check_agreement(leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Sequence[str]) -> None:
    """What counts as the whole value must be the same on every process. Compares hashes, across processes."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        return
    local = {path: x for path, x in zip(paths, leaves, strict=True) if not _is_abstract(x) and is_local(x)}
    if differs := _differing({path: _fingerprint(x) for path, x in local.items()}):
        raise ShardstepError(
            f"{differs} is not the same on all processes: an array that is not spread over the mesh counts as"
            " the whole value. Where each process holds its own part of the batch, join the parts with"
            " step.global_batch(part) or jax.make_array_from_process_local_data."
        )


def hold_the_same(values: dict[str, Any]) -> bool:
    """Is each of these values the same on every process? Their shapes must be."""
    if not all(_alike(_digest(*(f"{name}{shape_of(x)}".encode() for name, x in values.items())))):
        raise ShardstepError(
            f"the processes hold parts of the batch with different shapes (here: {_shapes(values)}): give each the same"
            " number of examples, or all of them the whole batch."
        )
    return all(_alike(b"".join(map(_fingerprint, values.values()))))


def _shapes(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(shape_of(x)[0])}" for name, x in values.items())


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)


def _fingerprint(x: Any) -> bytes:
    shape, dtype = shape_of(x)
    data = np.ascontiguousarray(jax.random.key_data(x) if _is_key(x) else x)
    return _digest(f"{dtype}{shape}".encode(), data.view(np.uint8).data)


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


def tell(word: str, text: str) -> None:
    """Say something once, to all processes that will `hear` it. From any thread: no device takes part."""
    if jax.process_count() > 1:
        compat.coordination_client().key_value_set(word, f"={text[:_TEXT_BYTES]}")


def hear(word: str, timeout: float) -> str:
    """What another process tells; waits for it."""
    return compat.coordination_client().blocking_key_value_get(word, int(timeout * 1000)).removeprefix("=")


def _differing(digests: dict[str, bytes]) -> str:
    """The name of the first digest that is not the same on every process; empty if all are."""
    if not all(_alike(_digest(*(name.encode() for name in digests)))):
        return "the structure of the arguments"  # not even the same names: their values cannot be compared one by one
    same = _alike(b"".join(digests.values()))
    return next((name for k, name in enumerate(digests) if not same[k]), "")


def _alike(digests: bytes) -> list[bool]:
    """Which of the digests, one after the other, are the same on every process?"""
    rows = multihost_utils.process_allgather(np.frombuffer(digests, np.uint8)).reshape(jax.process_count(), -1, _DIGEST)
    return list((rows == rows[0]).all(axis=(0, 2)))


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
        digest.update(b"\0")
    return digest.digest()


def _encode(text: str) -> np.ndarray:
    row = np.zeros(_TEXT_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
    row[: data.size] = data
    return row


def _decode(row: np.ndarray) -> str:
    return np.asarray(row, np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")
