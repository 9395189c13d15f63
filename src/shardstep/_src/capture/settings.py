"""What `shard` was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from jax.sharding import Mesh

from ..core.errors import ShardstepError
from ..core.options import Options
from .arguments import Signature, as_tuple
from .batch import Batch
from .jitted import Donate


class Keywords(TypedDict, total=False):
    """What `shard` takes by name; its docstring says what each is for."""

    axis: str | Sequence[str] | None
    batch_argnums: int | Sequence[int] | None
    batch_argnames: str | Sequence[str] | None
    batch_axis: int | Sequence[int | None]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    axis_name: str | None
    weights: str
    group: int | None
    options: Options | None


@dataclass(frozen=True, eq=False)
class Settings:
    """What `shard` was asked for, step, mesh and axis apart."""

    batch_argnums: int | Sequence[int] | None
    batch_argnames: str | Sequence[str] | None
    batch_axis: int | Sequence[int | None]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    axis_name: str | None
    weights: str
    group: int | None
    options: Options

    @property
    def batch(self) -> Batch:
        return Batch(
            None if self.batch_argnums is None else as_tuple(self.batch_argnums, int),
            None if self.batch_argnames is None else as_tuple(self.batch_argnames, str),
            self.batch_axis if isinstance(self.batch_axis, int) else tuple(self.batch_axis),
        )

    def signature(self, step: Callable[..., Any]) -> Signature:
        return Signature.of(step, self.static_argnums, self.static_argnames)

    def donate(self, step: Callable[..., Any]) -> Donate | None:
        return Donate.of(self.donate_argnums, self.donate_argnames, step)

    def chosen(self) -> dict[str, Any]:
        """What differs from what `shard` does by itself."""
        usual = {"batch_axis": 0, "static_argnums": (), "static_argnames": (), "weights": "auto", "options": Options()}
        return {name: value for name, value in self.keywords().items() if value != usual.get(name)}

    def keywords(self) -> dict[str, Any]:
        """To ask `shard` for the same once more."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def check_asked(step: Any, mesh: Any, settings: Settings) -> None:
    """Fail at once, in the user's terms, where the arguments of `shard` cannot be meant."""
    if isinstance(step, Mesh):
        raise ShardstepError(
            "the first argument of shard is the training step, and a mesh was given: shardstep.shard(step, mesh), or"
            " @shardstep.shard(mesh=mesh) as a decorator"
        )
    if step is not None and not callable(step):
        raise ShardstepError(
            f"shard({step!r}): the first argument is the training step, a function (state, batch) -> (state, metrics);"
            f" {_a(step)} was given"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        hint = f"jax.make_mesh(({mesh},), ('data',))" if isinstance(mesh, int) else "jax.make_mesh((8,), ('data',))"
        raise ShardstepError(f"mesh={mesh!r}: the mesh is a jax.sharding.Mesh, for example {hint}; or leave it out")
    if not isinstance(settings.options, Options):
        given = settings.options
        how = (
            f"Options({', '.join(f'{k}={v!r}' for k, v in given.items())})"
            if isinstance(given, dict)
            else "Options(...)"
        )
        raise ShardstepError(f"options={given!r} is {_a(given)}: use options=shardstep.{how}")
    if settings.weights not in ("auto", "replicated", "sharded"):
        raise ShardstepError(f"weights={settings.weights!r}: choose 'replicated', 'sharded' or 'auto'")
    if settings.axis_name is None and None in settings.batch.axes:
        raise ShardstepError(
            "batch_axis=None is for values of which each replica has its own, as under pmap, and that takes a step that"
            " is written for one replica: set axis_name. A step for the whole batch has one value."
        )
    named = as_tuple(settings.donate_argnums, int) + as_tuple(settings.donate_argnames, str)
    if named and not settings.options.donate:
        raise ShardstepError(
            f"Options(donate=False) keeps the old state, but {', '.join(map(repr, named))} is to be donated: drop one"
        )


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
