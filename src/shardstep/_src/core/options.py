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
        min_shard_bytes: smaller state leaves rest replicated: splitting them saves nothing and costs a message.
            None: as the cost model says for the machine, at least 16 KiB.
        bucket_bytes: tensors up to this size travel together, at most so many bytes in one collective; larger ones
            travel alone. 0: every tensor alone. None: what was measured for the platform (`fusing.BUCKET_BYTES`).
        reduce_dtype: the dtype in which gradients are added up over the replicas, `jnp.float32` or `jnp.bfloat16`, say.
            None: the dtype they are produced in. Scalars, and statistics that the forward pass reads, keep theirs.
        gather_dtype: the dtype in which weights that rest sharded are gathered for the forward pass. None: the dtype
            that the forward pass reads. What the state itself holds is never rounded.
        topology: read the devices as this machine, for example `"v5e:4x4"`; by default, as what they are. To plan for a
            machine from another one, and to test.
        donate: reuse the memory of the old state for the new, as `jax.jit(..., donate_argnums=...)` does.
        check: let JAX's type system (`check_vma`) certify that what is called replicated is replicated.
        engine: `"rewrite"` rewrites the step; `"annotate"` leaves it as it is and only tells XLA how the state rests;
            `"auto"` rewrites unless that would send more than the replicated step does.
    """

    min_shard_bytes: int | None = None
    bucket_bytes: int | None = None
    reduce_dtype: Any = None
    gather_dtype: Any = None
    topology: str | None = None
    donate: bool = True
    check: bool = True
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("min_shard_bytes", "bucket_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
                raise ShardstepError(f"Options({name}={value!r}): give a number of bytes, 0 or more")
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
        raise ShardstepError(f"Options({name}={value!r}) is not a dtype: give jnp.bfloat16, say") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ShardstepError(
            f"Options({name}={value!r}): give a floating-point dtype, jnp.bfloat16 or jnp.float32, say"
        )
    return dtype
