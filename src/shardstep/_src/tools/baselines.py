"""The same step without shardstep: what a user would run instead, made from what was captured of the step.

Each is a jitted function of the step's array leaves, one after the other, that returns its array leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..api import PlannedStep, ShardedStep
from ..core.layout import Varying
from ..runtime import annotate


def flat(sharded: ShardedStep, program: PlannedStep) -> Callable[..., list[Any]]:
    """The user's own step, on leaves."""
    constants = {i for i, _ in program.captured.out_constants}

    def run(*leaves: Any) -> list[Any]:
        args, kwargs = program.captured.call.rebuild(leaves)
        results = jax.tree.leaves(sharded.step(*args, **kwargs))
        return [x for i, x in enumerate(results) if i not in constants]

    return run


def everywhere(program: PlannedStep, mesh: Mesh) -> list[PartitionSpec]:
    """Plain data parallelism: the examples are split, and nothing else is."""
    return _with_examples(program, mesh, [PartitionSpec()] * len(program.captured.paths))


def zero1(program: PlannedStep, mesh: Mesh) -> list[PartitionSpec]:
    """What one writes today: each moment split along its first dimension that the replicas divide."""

    def by_hand(role: str, shape: tuple[int, ...]) -> PartitionSpec:
        dims = [d for d, n in enumerate(shape) if n % mesh.size == 0] if role == "auxiliary" else []
        return PartitionSpec(*[None] * dims[0], tuple(mesh.axis_names)) if dims else PartitionSpec()

    return _with_examples(program, mesh, [by_hand(leaf.role, leaf.shape) for leaf in program.plan.leaves])


def _with_examples(program: PlannedStep, mesh: Mesh, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    made = list(specs)
    for i, dim in program.captured.batch.items():
        made[i] = PartitionSpec(*[None] * dim, tuple(mesh.axis_names))
    return made


def annotated(sharded: ShardedStep, program: PlannedStep, mesh: Mesh, specs: Sequence[PartitionSpec]) -> Any:
    """The step under `jax.jit`, its arguments laid out as given."""
    captured = program.captured
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return annotate.annotated(sharded.step, captured, shardings, tuple(captured.state))


def per_replica(sharded: ShardedStep, program: PlannedStep, donate: bool = False) -> Any:
    """A step that is written for one replica, under `shard_map`."""
    captured, run = program.captured, flat(sharded, program)
    assert captured.axis_name is not None
    mesh = Mesh(sharded.replicas.mesh.devices.reshape(-1), (captured.axis_name,))
    ins = everywhere(program, mesh)
    own = [any(isinstance(p, Varying) for p in layout) for layout in program.decided.outputs]
    outs = [PartitionSpec(captured.axis_name) if o else PartitionSpec() for o in own]

    each = captured.examples.each
    back = {captured.state[i] for i in each & captured.state.keys()}

    def one_replica(*leaves: Any) -> list[Any]:
        made = run(*(x[0] if i in each else x for i, x in enumerate(leaves)))
        rows = [o and (k in back or jnp.ndim(x) == 0) for k, (x, o) in enumerate(zip(made, own, strict=True))]
        return [jnp.asarray(x)[None] if row else x for x, row in zip(made, rows, strict=True)]

    mapped = jax.shard_map(one_replica, mesh=mesh, in_specs=tuple(ins), out_specs=outs, check_vma=False)
    return jax.jit(mapped, donate_argnums=tuple(captured.state) if donate else ())
