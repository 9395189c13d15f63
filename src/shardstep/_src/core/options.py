"""What a user may set."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
import numpy as np

from .errors import ShardstepError

ENGINES = ("auto", "rewrite", "annotate")


@dataclass(frozen=True, repr=False)
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
        reduce: `"float32"`: gradients that travel in 16 bits are added in float32, and the sum is rounded once. This
            sends no more bytes: the replicas exchange their terms, and each adds those of its own part.
        wire: `"int8"`: large gradients travel in 8 bits, and so do weights that rest sharded, in blocks of 128 elements
            with a scale each. This changes the numbers: see how much with `shardstep.check`.
        deterministic: sums over the examples and over the replicas are formed in an order that does not depend on the
            number of replicas. Sums are not put off, so that more may be sent: the plan says how much.
        topology: read the devices as this machine, for example `"v5e:4x4"`; by default, as what they are. To plan for a
            machine from another one, and to test.
        memory: bytes that a device may use. A plan must fit: with `weights="auto"`, weights rest so that it does, if
            that is possible. None: what the device says it has (`memory_stats()["bytes_limit"]`), or what the named
            topology has; on CPU, no limit.
        layers: where layers that are stacked and scanned are gathered, if their weights rest sharded. `"each"`: one by
            one, inside the loop, again in the backward pass; least memory. `"once"`: all of them, in front of the loop;
            fewest bytes sent. None: one by one, unless `weights="auto"` finds that all of them fit and are faster.
            Inside microbatches, `"each"` gathers layers and scatters their gradients in every microbatch; None does so
            only where `memory` is too little for all weights and gradients at once.
        offload: let optimizer state rest in the host's memory (`pinned_host`), from where it streams through the update
            leaf by leaf. True: all of it that is sharded. False: none. None: if nothing else fits. On CPU a device's
            memory is the host's, and nothing is moved.
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
    reduce: str | None = None
    wire: str | None = None
    deterministic: bool = False
    topology: str | None = None
    memory: int | None = None
    layers: str | None = None
    offload: bool | None = None
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
        for name, known in (("reduce", "float32"), ("wire", "int8")):
            if getattr(self, name) not in (None, known):
                raise ShardstepError(f"Options({name}={getattr(self, name)!r}): use {known!r} or None")
        self._check_wire()
        if self.layers not in ("each", "once", None):
            raise ShardstepError(f"Options(layers={self.layers!r}): use 'each', 'once', or None")
        if self.offload not in (True, False, None):
            raise ShardstepError(f"Options(offload={self.offload!r}): use True, False, or None (if nothing else fits)")
        if self.engine not in ENGINES:
            raise ShardstepError(f"Options(engine={self.engine!r}): choose one of {', '.join(map(repr, ENGINES))}")

    def _check_wire(self) -> None:
        """What travels in one way cannot travel in another."""
        if self.deterministic:
            for name in ("reduce", "reduce_dtype", "wire"):
                if (value := getattr(self, name)) is not None:
                    raise ShardstepError(
                        f"Options(deterministic=True, {name}={str(value)!r}): what is rounded on the way depends on the"
                        f" number of replicas. Leave out {name}."
                    )
        if self.wire is not None:
            for name in ("reduce", "reduce_dtype", "gather_dtype"):
                if (value := getattr(self, name)) is not None:
                    raise ShardstepError(
                        f"Options(wire={self.wire!r}, {name}={str(value)!r}): on an 8-bit wire gradients are added in"
                        f" float32, and nothing travels in another dtype. Leave out {name}."
                    )
        if self.engine == "annotate" and (asked := beyond_xla(self)):
            raise ShardstepError(
                f"Options({asked}, engine='annotate'): XLA's collectives do not do that. Leave engine='rewrite'."
            )

    def __repr__(self) -> str:
        """What differs from the defaults."""
        chosen = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Options({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in chosen)})"


def beyond_xla(options: Options) -> str:
    """What is asked of the wire that XLA's own collectives cannot do; empty if nothing is."""
    for name in ("reduce", "wire"):
        if (value := getattr(options, name)) is not None:
            return f"{name}={value!r}"
    return "deterministic=True" if options.deterministic else ""


def moves_weights(options: Options) -> bool:
    """Is it said how weights or their gradients travel? Then they do, and no examples travel instead."""
    asked = (options.reduce_dtype, options.gather_dtype, options.reduce, options.wire)
    return options.deterministic or any(a is not None for a in asked)


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
