"""What a machine's compiler and memory do that a layout must know of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """Facts of the backend, the same along every axis. The defaults are those of a GPU."""

    widens: bool = False  # are sums of 16-bit floats formed in float32, as XLA's own all-reduce does on CPU?
    multiplies_wide: bool = False  # are 16-bit operands of products copied to float32?
    tiled: bool = False  # does memory come in tiles, as on TPU?
    message_bytes: int = 0  # larger blocks are scattered in pieces (see ring_scatter.py); 0: whole
    outermost: bool = False  # do collectives cut the outermost dimension only, as XLA's do on CPU?
    in_memory: bool = False  # do the replicas share one memory, so that there is no wire to overlap anything with?
    merges: bool = False  # is what is computed again, behind a barrier (`jax.checkpoint`), merged with the first time?
    indexes: bool = False  # does the gradient of max-pooling look up by indices, an array of them for each dimension?
