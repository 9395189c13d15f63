"""Run the plain and the sharded program side by side and say what differed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api import PlannedStep, ShardedStep, shard
from ..capture.step import Captured
from ..runtime.processes import whole
from . import baselines


@dataclass(frozen=True)
class Difference:
    """How far one output leaf is from the plain run's after all steps."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool  # bit for bit
    absolute: float  # largest difference
    relative: float  # of the leaf's largest value


@dataclass(frozen=True)
class Check:
    """What `check` found, leaf by leaf."""

    steps: int
    replicas: int
    leaves: tuple[Difference, ...]
    wire: str = ""  # `Options.wire`, if set
    wire_error: float = 0.0  # what that changed: see `_lost_on_the_wire`

    @property
    def lossy(self) -> str:
        """What a lossy wire did to the numbers, in words; empty without one."""
        if not self.wire:
            return ""
        after = f"{self.steps} step" + "s" * (self.steps > 1)
        return (
            f"wire={self.wire!r} loses precision: after {after} it moved a leaf by up to {self.wire_error:.2%} of its"
            " norm, compared with the same run on an exact wire"
        )

    @property
    def exact(self) -> bool:
        return all(leaf.exact for leaf in self.leaves)

    @property
    def relative(self) -> float:
        """The largest relative difference of any leaf."""
        return max((leaf.relative for leaf in self.leaves), default=0.0)

    def within(self, tolerance: float) -> bool:
        """Floating-point leaves within the tolerance; all other leaves exact."""
        return all(leaf.exact or leaf.relative <= tolerance for leaf in self.leaves)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps on {self.replicas} replicas against the plain program"]
        lines += [f"  {self.lossy}"] * bool(self.lossy)
        for leaf in sorted(self.leaves, key=lambda leaf: -leaf.relative):
            what = (
                "exact" if leaf.exact else f"differs by {leaf.absolute:.3g} ({leaf.relative:.3g} of its largest value)"
            )
            lines.append(f"  {leaf.path}  {leaf.dtype}{list(leaf.shape)}  {what}")
        return "\n".join(lines)


def check(step: Callable[..., Any], *args: Any, steps: int = 3, **kwargs: Any) -> Check:
    """Run `step` plain and sharded for some steps from the same arguments and compare every output leaf.

    `step` is a `ShardedStep` or a plain step, which is then sharded over all devices. The arguments are not consumed.
    """
    sharded = step if isinstance(step, ShardedStep) else shard(step)
    program, call = sharded.program(args, kwargs)
    plain = _plain(sharded, program)
    theirs = list(call.leaves)
    for _ in range(steps):
        reference = plain(theirs)
        theirs = _advance(program.captured, theirs, reference)
    out = _run(program, call.leaves, steps)
    wire, lost = sharded.options.wire or "", 0.0
    if wire:
        settings = replace(
            sharded.settings, weights=program.decided.weights, options=replace(sharded.options, wire=None)
        )
        exact, _ = ShardedStep(sharded.step, sharded.replicas, settings).program(args, kwargs)
        lost = _lost_on_the_wire(out, _run(exact, call.leaves, steps))
    paths = [p + jax.tree_util.keystr(path) for p, path in _paths(program.captured)]
    arrays = [leaf for leaf in out if hasattr(leaf, "dtype")]
    compared = (_compare(p, a, b) for p, a, b in zip(paths, arrays, reference, strict=True))
    return Check(steps, sharded.replicas.count, tuple(compared), wire, lost)


def _run(program: PlannedStep, leaves: Sequence[Any], steps: int) -> list[Any]:
    """What the sharded step returns in the end."""
    held = [_copy(x) for x in leaves]  # what is in place already would be donated
    out: list[Any] = []
    for _ in range(steps):
        out = jax.tree.leaves(program(program.place(held)))
        held = _advance(program.captured, held, out)
    return out


def _lost_on_the_wire(ours: list[Any], exact: list[Any]) -> float:
    """The largest distance between two leaves, as a share of the leaf's norm.

    (Not of its largest element: an optimizer that normalises updates turns rounding into whole updates where a gradient
    is next to nothing.)
    """
    distances = [0.0]
    for a, b in zip(ours, exact, strict=True):
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating):
            x, y = (whole(v).astype(np.float64) for v in (a, b))
            norm = float(np.linalg.norm(y))
            distances.append(float(np.linalg.norm(x - y)) / norm if norm else 0.0)
    return max(distances)


def _plain(sharded: ShardedStep, program: PlannedStep) -> Callable[[list[Any]], list[Any]]:
    """The step as the user would run it without shardstep: `jit`, or `shard_map` for a per-replica step."""
    per_replica = program.captured.axis_name is not None
    run = baselines.per_replica(sharded, program) if per_replica else jax.jit(baselines.flat(sharded, program))
    return lambda leaves: run(*map(whole, leaves))


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else copy.copy(x)


def _is_data(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _advance(captured: Captured, inputs: list[Any], outputs: list[Any]) -> list[Any]:
    """The next step's arguments: new state, same everything else."""
    arrays = [x for x in outputs if hasattr(x, "dtype")]
    return [arrays[captured.state[i]] if i in captured.state else x for i, x in enumerate(inputs)]


def _paths(captured: Captured) -> list[tuple[str, Any]]:
    constants = {i for i, _ in captured.out_constants}
    return [("output", path) for i, path in enumerate(captured.out_paths) if i not in constants]


def _compare(path: str, ours: Any, theirs: Any) -> Difference:
    if not _is_data(ours):
        ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
    dtype = str(ours.dtype)
    a, b = whole(ours), whole(theirs)
    exact = a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if exact:
        return Difference(path, a.shape, dtype, True, 0.0, 0.0)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return Difference(path, a.shape, dtype, False, float("inf"), float("inf"))
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    absolute = float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
    largest = float(np.max(np.abs(b), initial=0.0))
    return Difference(path, a.shape, dtype, False, absolute, absolute / largest if largest else absolute)
