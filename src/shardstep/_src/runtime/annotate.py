"""The "annotate" engine: plain `jax.jit` with the planned shardings; XLA partitions the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..capture.step import Captured


def annotated(
    step: Callable[..., Any], captured: Captured, resting: Sequence[NamedSharding], donated: tuple[int, ...]
) -> Any:
    """The step as the user wrote it, on arrays: state keeps its layout at rest, and XLA lays out everything else."""
    constants = {i for i, _ in captured.out_constants}
    leaving: list[NamedSharding | None] = [None] * len(captured.program.outputs)
    for i, o in captured.state.items():
        leaving[o] = resting[i]

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = captured.call.rebuild(leaves)
        results = jax.tree.leaves(step(*args, **kwargs))
        return [x for i, x in enumerate(results) if i not in constants]

    return jax.jit(flat, in_shardings=tuple(resting), out_shardings=leaving, donate_argnums=donated)
