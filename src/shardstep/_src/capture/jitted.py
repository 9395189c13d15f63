"""What a step that is jitted already says of its arguments: what it donates, and how they are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..core import compat
from .arguments import Call, abstract


@dataclass(frozen=True, eq=False)
class Jitted:
    """Of each input of a jitted step: is it donated, and the sharding that was asked for, if any."""

    donated: frozenset[int]
    shardings: dict[int, NamedSharding]

    @classmethod
    def of(cls, jaxpr: Any) -> Jitted | None:
        """Read from the program, whoever jitted the step: it is one call of a jitted function. None: it is not."""
        jaxpr, _ = compat.open_jaxpr(jaxpr)
        if len(jaxpr.eqns) != 1 or "donated_invars" not in (params := jaxpr.eqns[0].params):
            return None
        positions = {v: i for i, v in enumerate(jaxpr.invars)}
        inputs = [positions.get(v) if not hasattr(v, "val") else None for v in jaxpr.eqns[0].invars]
        donated = {i for i, given in zip(inputs, params["donated_invars"], strict=True) if given and i is not None}
        asked = zip(inputs, params["in_shardings"], strict=True)
        shardings = {i: s for i, s in asked if i is not None and isinstance(s, NamedSharding)}
        return cls(frozenset(donated), shardings)

    def laid_out(self, call: Call) -> Call:
        """The call with the jit's own shardings, where arrays have none that say anything."""
        return replace(call, leaves=tuple(map(self._leaf, range(len(call.leaves)), call.leaves)))

    def _leaf(self, i: int, leaf: Any) -> Any:
        if i not in self.shardings or isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        shape = abstract(leaf)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=self.shardings[i])


def donated(jitted: Jitted | None, state: Sequence[int]) -> tuple[int, ...]:
    """The state that may be given away: what the jitted step donates, or all of it if that is not said."""
    said = jitted is not None and jitted.donated
    return tuple(i for i in state if not said or i in said)
