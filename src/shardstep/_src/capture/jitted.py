"""What is donated, and what a step that is jitted already says of that and of how its arguments are laid out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..core import compat
from ..core.errors import ShardstepError
from .arguments import Argument, Call, abstract, as_tuple


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


@dataclass(frozen=True)
class Donate:
    """The arguments that the user gives away, by position and by name, as for `jax.jit`."""

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]

    @classmethod
    def of(cls, argnums: Any, argnames: Any, step: Callable[..., Any]) -> Donate | None:
        """None: nothing was said. Positions may count from the end."""
        if argnums is None and argnames is None:
            return None
        given, named = as_tuple(argnums, int), as_tuple(argnames, str)
        try:
            parameters = list(inspect.signature(step).parameters.values())
        except (TypeError, ValueError):  # nothing to compare with
            return cls(given, named)
        open_ended = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        names, count = [p.name for p in parameters], len(parameters)
        for i in given:
            if not -count <= i < count and not open_ended:
                raise ShardstepError(f"donate_argnums={i} is out of range: the step takes {count} arguments")
        for name in named:
            if name not in names and not open_ended:
                raise ShardstepError(f"donate_argnames={name!r}: the step's arguments are {', '.join(names)}")
        return cls(tuple(i + count if i < 0 else i for i in given), named)

    def leaves(self, arguments: Sequence[Argument], state: Collection[int]) -> tuple[int, ...]:
        """Of the named arguments the state: nothing else has a result that could use its memory."""
        given = [a for a in arguments if a.position in self.argnums or a.name in self.argnames]
        return tuple(i for i in state if any(a.start <= i < a.stop for a in given))
