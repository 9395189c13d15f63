"""What the user's own shardings say.

shardstep takes the data axes of the mesh. How state lies along other axes (tensor parallelism by annotation) is the
user's: it is read from the arguments' NamedShardings, kept at rest, and left to XLA inside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .padded import Padded
from .program import Atom, Program, Var

Kept = tuple[tuple[str, ...], ...]  # for each dimension, the user's axes that split it; () if none does


def entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The names at each dimension of a spec."""
    return [tuple(e) if isinstance(e, tuple) else (e,) if isinstance(e, str) else () for e in spec]


def kept(leaf: Any, others: Collection[str]) -> Kept:
    """A leaf's layout along the user's own axes."""
    if not others:
        return ()
    sharding = getattr(leaf.data if isinstance(leaf, Padded) else leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return ()
    found = tuple(tuple(n for n in names if n in others) for names in entries(sharding.spec))
    return found if any(found) else ()


def joined(spec: PartitionSpec, also: Kept) -> PartitionSpec:
    """Both on one array; on a dimension that both cut, the data axes are the outer ones."""
    ours = entries(spec)
    length = max(len(ours), len(also))
    ours, theirs = ours + [()] * (length - len(ours)), list(also) + [()] * (length - len(also))
    names = [a + b for a, b in zip(ours, theirs, strict=True)]
    while names and not names[-1]:
        names.pop()
    return PartitionSpec(*(None if not n else n[0] if len(n) == 1 else n for n in names))


def show_kept(also: Kept) -> str:
    """`model on 1`."""
    return ", ".join(f"{'+'.join(names)} on {dim}" for dim, names in enumerate(also) if names)


def hint(sharding: Any) -> PartitionSpec | None:
    """What is left of a sharding that the step asks for, inside the rewritten step: the axes that XLA still manages."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh = jax.sharding.get_abstract_mesh()
    free = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
    left = [tuple(n for n in names if n in free) for names in entries(sharding.spec)]
    if not any(left):
        return None
    unconstrained = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(
        *(e if e is unconstrained else names or None for e, names in zip(sharding.spec, left, strict=True))
    )


def alike(program: Program, inputs: Sequence[Kept]) -> dict[Atom, Kept]:
    """The values that have some state's layout on the user's axes: those that are computed with it element by element.

    A gradient meets the moments, a new weight is made of the old one. It is only a hint for `in_parts`, so nothing is
    wrong where the chain breaks; XLA would then gather over the user's axes what is sent over ours.
    """
    found: dict[Atom, Kept] = {v: kept for v, kept in zip(program.inputs, inputs, strict=True) if kept}
    for equation in (*program.equations, *reversed(program.equations), *program.equations) if found else ():
        if equation.bodies or not equation.outputs:
            continue
        shape = equation.outputs[0].array.shape
        family = [a for a in (*equation.outputs, *equation.inputs) if a.array.shape == shape and isinstance(a, Var)]
        known = next((found[a] for a in family if a in found), None)
        if known is not None and len(family) > 1:
            for a in family:
                found.setdefault(a, known)
    return found


def by_axes(members: Sequence[Any], kept: Sequence[Kept]) -> list[tuple[Any, ...]]:
    """Leaves grouped by the user's axes that split them: what differs along an axis never mixes with what does not."""
    groups: dict[frozenset[str], list[Any]] = {}
    for member, mine in zip(members, kept, strict=True):
        groups.setdefault(frozenset(n for names in mine for n in names), []).append(member)
    return [tuple(group) for group in groups.values()]


def in_parts(
    act: Callable[..., Sequence[jax.Array]], arrays: Sequence[jax.Array], kept: Sequence[Kept]
) -> Sequence[jax.Array]:
    """Communicate over the data axes inside the step, each device with its parts along the user's axes.

    XLA manages those axes inside the step, and would gather along them what a reduce-scatter over ours is given.
    """
    names = {n for mine in kept for entry in mine for n in entry}
    if not names:
        return act(*arrays)
    specs = [PartitionSpec(*(entry or None for entry in mine)) for mine in kept]
    return jax.shard_map(lambda *xs: list(act(*xs)), in_specs=tuple(specs), out_specs=specs, axis_names=names)(*arrays)
