"""Meshes whose shardings are part of the types (Explicit axes, as `jax.make_mesh` gives them), and those without.

Ordinary code on arrays of an Explicit mesh raises sharding errors, so the rewritten step runs on an Auto copy of the
user's mesh. Here is what it takes to step over the border: contexts and arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding


def auto(mesh: Any) -> Any:
    """The same mesh with Auto axes: ordinary code on arrays of an Explicit mesh raises sharding errors."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return mesh.update_axis_types(dict(zip(mesh.axis_names, types, strict=True)))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def explicit(mesh: Mesh) -> AbstractMesh | None:
    """The mesh whose shardings are part of the types: that of the context, or else the step's own."""
    for found in (jax.sharding.get_abstract_mesh(), mesh.abstract_mesh):
        if AxisType.Explicit in found.axis_types:
            return found
    return None


def around() -> Mesh | None:
    """The mesh that `jax.set_mesh` has set, if any."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()


def typed_copy(mesh: Mesh, user_mesh: Mesh) -> Mesh | None:
    """Our mesh with the user's Explicit axes, if there are any and both meshes have the same axes."""
    theirs = explicit(user_mesh)
    if theirs is None or dict(theirs.shape) != dict(mesh.shape):
        return None
    return Mesh(mesh.devices, mesh.axis_names, axis_types=theirs.axis_types)


@contextlib.contextmanager
def within(mesh: AbstractMesh, always: bool = False) -> Iterator[None]:
    """Under this mesh where `jax.set_mesh` has another one around us, whose types do not mix with ours (or always)."""
    outside = jax.sharding.get_abstract_mesh()
    if outside == mesh or (outside.empty and not always):
        yield
    else:
        with jax.sharding.use_abstract_mesh(mesh):
            yield


def untyped(x: Any, mesh: Any) -> Any:
    """An array of an Explicit mesh on its Auto copy, where its sharding is no part of its type."""
    sharding = x.sharding if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else None
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types or x.is_deleted():
        return x
    same = dict(sharding.mesh.shape) == dict(mesh.shape) and sharding.device_set == set(mesh.devices.flat)
    return jax.device_put(x, NamedSharding(mesh, sharding.spec)) if same else x


@contextlib.contextmanager
def untied(x: jax.Array) -> Iterator[jax.Array]:
    """The same array where ordinary code may be run on it."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        yield x
        return
    mesh = auto(sharding.mesh)
    with within(mesh.abstract_mesh):
        yield untyped(x, mesh)
