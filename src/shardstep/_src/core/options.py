"""What a user may set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .errors import ShardstepError

ENGINES = ("auto", "rewrite", "annotate")


@dataclass(frozen=True)
class Options:
    """Settings of `shardstep.shard`.

    Attributes:
        min_shard_bytes: smaller state leaves stay replicated: splitting them saves little and costs a message.
            None: as the cost model says for the machine, at least 16 KiB.
        bucket_bytes: tensors up to this size are sent together, at most this many bytes per collective; larger ones
            are sent alone. 0: every tensor alone. None: what was measured for the platform.
        reduce_dtype: the dtype in which gradients are summed over the replicas, such as `jnp.bfloat16`.
            None: the dtype they are produced in. Scalars, and statistics that the forward pass reads, keep theirs.
        gather_dtype: the dtype in which weights that rest sharded are gathered for the forward pass. None: the dtype
            that the forward pass reads. What the state itself holds is never rounded.
        topology: read the devices as this machine, for example `"v5e:4x4"`; by default, as what they are. To plan for a
            machine from another one, and to test.
        memory: bytes that a device may use. A plan must fit: with `weights="auto"`, weights rest so that it does, if
            that is possible. None: what the device says it has (`memory_stats()["bytes_limit"]`), or what the named
            topology has; on CPU, no limit.
        donate: reuse the memory of the old state for the new, as `jax.jit(..., donate_argnums=...)` does.
            A jitted step that names what it donates is obeyed.
        check: let JAX's type system (`check_vma`) certify that what is called replicated is replicated.
        engine: `"rewrite"` rewrites the step; `"annotate"` leaves it as it is and only tells XLA the state's layout;
            `"auto"` rewrites unless that would send more than the replicated step does.
    """

    min_shard_bytes: int | None = None
    bucket_bytes: int | None = None
    reduce_dtype: Any = None
    gather_dtype: Any = None
    topology: str | None = None
    memory: int | None = None
    donate: bool = True
    check: bool = True
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("min_shard_bytes", "bucket_bytes", "memory"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
                raise ShardstepError(f"Options({name}={value!r}): use a number of bytes, 0 or more")
        for name in ("reduce_dtype", "gather_dtype"):
            object.__setattr__(self, name, _floating(name, getattr(self, name)))
        if self.engine not in ENGINES:
            raise ShardstepError(f"Options(engine={self.engine!r}): choose one of {', '.join(map(repr, ENGINES))}")


def _floating(name: str, value: Any) -> Any:
    """A dtype to travel in, or None."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise ShardstepError(f"Options({name}={value!r}) is not a dtype: use jnp.bfloat16, for example") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ShardstepError(
            f"Options({name}={value!r}): use a floating-point dtype such as jnp.bfloat16 or jnp.float32"
        )
    return dtype
