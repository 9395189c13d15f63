"""The contract between the interpreter and its rules.

A rule is a pure function on placements and shapes. It touches no arrays and emits no collectives:

    rule(site, placements) -> Decision | list[Decision] | None

`site` is one equation as one mesh axis sees it, `placements` says how its operands are placed along that axis.
A rule answers with the placement each operand must have and the placement each result then has; where
several answers are right it offers them all, and the interpreter takes the one that moves the fewest
bytes. `None` means "I cannot do this split": the interpreter gathers the operands and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core.errors import ShardstepError
from ..core.layout import PARTIAL, REPLICATED, Array, Partial, Placement, Split, divides, local_shape
from ..core.program import Emit
from ..core.schedule import Visit

Primitive = Any


@dataclass(frozen=True)
class Site:
    """One equation as one mesh axis sees it: shapes are already local along the axes before it."""

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    n: int
    wants: tuple[Split | None, ...] = ()  # what the readers of each result would like; only a hint

    def __getattr__(self, name: str) -> Any:
        """`site.dimension_numbers` reads the equation's parameter of that name."""
        try:
            return self.params[name]
        except KeyError:
            raise AttributeError(f"{self.primitive} has no parameter {name!r}") from None

    def divides(self, operand: int, split: Split) -> bool:
        return divides(self.inputs[operand].shape, split, self.n)

    def local(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        return local_shape(tuple(shape), placement, self.n)

    def with_params(self, **changes: Any) -> dict[str, Any]:
        return {**self.params, **changes}


@dataclass(frozen=True)
class Block:
    """Where a replica's block of a value sits in the whole: `offsets[d]` is its first index."""

    shape: tuple[int, ...]  # of the whole value
    local: tuple[int, ...]  # of the block
    offsets: tuple[Any, ...]  # 0 or a traced int32, one per dimension


@dataclass(frozen=True)
class Local:
    """What an `emit` function may use: the equation for local blocks, and where the blocks sit."""

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    axes: tuple[str, ...] = ()  # the mesh axes that this runs on

    def bind(self, *arrays: jax.Array, **changes: Any) -> list[jax.Array]:
        out = self.primitive.bind(*arrays, **{**self.params, **changes})
        return list(out) if self.primitive.multiple_results else [out]


@dataclass(frozen=True)
class Decision:
    """How an equation runs along one axis.

    `params` are the equation's parameters for local shapes (None: unchanged). `emit(local, *arrays)`
    replaces binding the primitive where a local block needs to know its place in the whole. `fill` names, for each
    operand, the reduction that mixes the elements of a padded dimension: the padding is then overwritten with what
    leaves that reduction unchanged (0 for a sum). Without it, padding passes through and means nothing.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    params: Mapping[str, Any] | None = None
    emit: Emit | None = None
    apart: bool = False  # each result depends on its own operand alone, so their layouts may differ
    fill: tuple[str | None, ...] = ()
    visit: Visit | None = None

    @property
    def seen(self) -> tuple[Placement, ...]:
        """The placements in which readers see the results first."""
        return self.visit.homes if self.visit and self.visit.homes else self.results


Rule = Callable[[Site, tuple[Placement, ...]], Decision | Sequence[Decision] | None]

_RULES: dict[Primitive, Rule] = {}
_SPEAKS_OF_REPLICAS: set[Primitive] = set()
_MINDS_PADDING: set[Primitive] = set()


def register_rule(primitive: Primitive, rule: Rule, *, padding: bool = False) -> None:
    """Teach shardstep a primitive: `rule(site, placements)` as described in `docs/writing-a-rule.md`.

    With `padding`, the rule is also asked about padded splits (`Split.extent`) and must say what to `fill`; without,
    such operands are gathered.
    """
    _RULES[primitive] = rule
    (_MINDS_PADDING.add if padding else _MINDS_PADDING.discard)(primitive)


def register(rule: Rule, *primitives: Primitive, per_replica: bool = False) -> None:
    """One line per family: the rule, then every primitive that obeys it.

    `per_replica` rules are those of collectives: they give `Varying` operands a meaning of their own. Unlike
    `register_rule`, this refuses what would silently lose a rule: a missing primitive, or one that has a rule already.
    """
    for primitive in primitives:
        if primitive is None:
            raise ShardstepError(f"{rule} is registered for a primitive that this JAX does not have")
        if primitive in _RULES:
            raise ShardstepError(f"{primitive} has two rules: {rule} and {_RULES[primitive]}")
        register_rule(primitive, rule, padding=True)
        if per_replica:
            _SPEAKS_OF_REPLICAS.add(primitive)


def registered() -> tuple[Primitive, ...]:
    """Every primitive that has a rule."""
    return tuple(_RULES)


def rule_for(primitive: Primitive) -> Rule | None:
    return _RULES.get(primitive)


def minds_padding(primitive: Primitive) -> bool:
    return primitive in _MINDS_PADDING


def speaks_of_replicas(primitive: Primitive) -> bool:
    return primitive in _SPEAKS_OF_REPLICAS


def replicate(site: Site) -> Decision:
    """Every replica does all of it: always right."""
    return Decision((REPLICATED,) * len(site.inputs), (REPLICATED,) * len(site.outputs))


def splits(placements: Sequence[Placement]) -> list[Split]:
    """The distinct splits among the operands, those of the batch first: when the two meet, the state yields."""
    batch_first = sorted((p for p in placements if isinstance(p, Split)), key=lambda split: not split.batch)
    return list(dict.fromkeys(batch_first))  # the first of those that are equal


def neutral(op: str, dtype: Any) -> Any:
    """What may take part in a reduction without changing it."""
    if op == "add":
        return np.zeros((), dtype)
    if dtype == np.bool_:
        return np.asarray(op == "min")
    if jnp.issubdtype(dtype, np.inexact):
        return np.asarray(-np.inf if op == "max" else np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max, dtype)


def filled(x: jax.Array, block: Block, placements: Sequence[Placement], op: str | None) -> jax.Array:
    """A replica's block with what stands in its padding replaced by the neutral element of `op`."""
    if op is None:
        return x
    for d in {p.dim for p in placements if isinstance(p, Split) and p.extent}:
        place = lax.broadcasted_iota(np.int32, block.local, d) + block.offsets[d]
        x = jnp.where(place < block.shape[d], x, neutral(op, x.dtype))
    return x


def partials(placements: Sequence[Placement]) -> list[Partial]:
    return list(dict.fromkeys(p for p in placements if isinstance(p, Partial)))


__all__ = [
    "PARTIAL",
    "REPLICATED",
    "Block",
    "Decision",
    "Local",
    "Placement",
    "Rule",
    "Site",
    "Split",
    "Partial",
    "filled",
    "minds_padding",
    "partials",
    "register",
    "register_rule",
    "registered",
    "replicate",
    "rule_for",
    "speaks_of_replicas",
    "splits",
]
