"""What a user may set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of `shardstep.shard`.

    Attributes:
        min_shard_bytes: smaller state leaves rest replicated: splitting them saves nothing and costs a message.
        topology: read the devices as this machine, for example `"v5e:4x4"`; by default, as what they are. To plan for a
            machine from another one, and to test.
        donate: reuse the memory of the old state for the new, as `jax.jit(..., donate_argnums=...)` does.
        check: let JAX's type system (`check_vma`) certify that what is called replicated is replicated.
    """

    min_shard_bytes: int = 16 * 1024
    topology: str | None = None
    donate: bool = True
    check: bool = True
