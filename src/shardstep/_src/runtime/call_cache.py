"""A training loop hands back the state that it was given: recognise it, and do not look at every leaf again.

A compiled program makes its results with the same type and sharding *objects*, call after call. So a leaf that carries
the same objects as a leaf that was found in place is in place too, and comparing identities is cheap: that is how a
call with a thousand leaves costs about what `jax.jit` itself takes for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..capture.arguments import Call, signature_of
from ..core.padded import Padded
from ..core.user_shardings import kept


@dataclass(frozen=True, eq=False)
class CallCache:
    """A call whose state came laid out as it is at rest."""

    call: Call  # without its leaves: nothing is kept alive
    context: Any  # the Explicit mesh around the call, if any
    axes: Collection[str]  # of the mesh, those that are the user's
    padded: dict[int, tuple[int, ...]]  # leaves that padding surrounds, with their logical shape
    state: list[tuple[int, Any, Any, Any]]  # each array of the state: its type, its aval, its sharding
    others: dict[int, Any]  # what a program depends on of the other leaves: the batch, a key, a learning rate

    @classmethod
    def of(
        cls, call: Call, context: Any, axes: Collection[str], arrays: Sequence[Any], state: Collection[int]
    ) -> CallCache | None:
        """The call to remember, given the arrays that it ran on; None if state had to be laid out first."""
        padded = {i: call.leaves[i].shape for i in state if isinstance(call.leaves[i], Padded)}
        leaves = [leaf.data if i in padded else leaf for i, leaf in enumerate(call.leaves)]
        if any(leaves[i] is not arrays[i] for i in state):
            return None
        if any(isinstance(leaves[i], jax.core.Tracer) for i in state):
            return None
        known = [(i, type(leaves[i]), leaves[i].aval, leaves[i].sharding) for i in state]
        others = {i: (signature_of(x), kept(x, axes)) for i, x in enumerate(leaves) if i not in state}
        return cls(replace(call, leaves=()), context, axes, padded, known, others)

    def recognise(self, call: Call, context: Any) -> list[Any] | None:
        """The leaves of a call of the same kind, the state's as the arrays that hold it. None: look at each of them."""
        if context != self.context or not call.is_like(self.call):
            return None
        leaves: list[Any] = list(call.leaves)
        for i, shape in self.padded.items():
            if not isinstance(leaves[i], Padded) or leaves[i].shape != shape:
                return None
            leaves[i] = leaves[i].data
        for i, kind, aval, sharding in self.state:  # the loop that every call pays for
            x = leaves[i]
            if type(x) is not kind or x.aval is not aval or x.sharding is not sharding or x.is_deleted():
                return None
        if any((signature_of(leaves[i]), kept(leaves[i], self.axes)) != known for i, known in self.others.items()):
            return None
        return leaves if len(set(map(id, leaves))) == len(leaves) else None  # what comes twice cannot be given away
