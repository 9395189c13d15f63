"""State that is created in its layout: no device ever holds more of it than its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..capture.arguments import Constant, Signature, is_array
from ..core import trees
from ..core.errors import ShardstepError
from .placing import fitted, returned


class Leaf(Protocol):
    """A planned leaf of the state: its own shape, and that of the array which holds it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def held(self) -> tuple[int, ...]: ...


class Argument(Protocol):
    """A planned argument of the step."""

    @property
    def name(self) -> str: ...

    @property
    def tree(self) -> Any: ...

    @property
    def leaves(self) -> Sequence[Leaf | None]: ...


class Layouts(Protocol):
    """What a plan says of the state: how each of its leaves is laid out."""

    def arguments(self) -> Sequence[Argument]: ...

    def sharding(self, leaf: Any) -> NamedSharding: ...


@dataclass(frozen=True, eq=False)
class CompiledInit:
    """`create_state`, compiled so that its results come out as the plan has them."""

    lowered: jax.stages.Lowered
    inputs: tuple[Any, ...]
    leaves: tuple[Leaf, ...]  # of the array results
    finish: Callable[[list[Any]], Any]  # from arrays to what `create_state` returns

    def run(self) -> Any:
        arrays = self.lowered.compile()(*self.inputs)
        return self.finish(
            [
                returned(x, leaf.shape) if x.shape != leaf.shape else x
                for x, leaf in zip(arrays, self.leaves, strict=True)
            ]
        )


def prepare(
    plan: Layouts, create_state: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CompiledInit:
    """Trace `create_state` on shapes alone, find the plan's leaf for each of its results, and compile it for those."""
    call = Signature.of(create_state, (), ()).take_apart(args, kwargs)
    call = call.fixed(call.numbers)  # sizes, mostly
    found: dict[str, Any] = {}

    def flat(*leaves: Any) -> list[Any]:
        given, named = call.rebuild(leaves)
        with_paths, found["tree"] = jax.tree_util.tree_flatten_with_path(create_state(*given, **named))
        found["paths"], out = [path for path, _ in with_paths], [x for _, x in with_paths]
        found["constants"] = [(i, Constant(x)) for i, x in enumerate(out) if not _is_value(x)]
        found["values"] = [x for x in out if _is_value(x)]
        return found["values"]

    shapes = jax.eval_shape(flat, *call.leaves)
    # a number that is a constant of the step stays the number it is: as an array it could be trained
    numbers = {k: x for k, x in enumerate(found["values"]) if not is_array(x)}
    planned = _planned(plan, found, shapes)
    leaves = [leaf for leaf in planned if leaf is not None]
    shardings = [plan.sharding(leaf) for leaf in leaves]

    def laid_out(*given: Any) -> list[Any]:
        pairs = zip(flat(*given), planned, strict=True)
        return [fitted(_strong(x), leaf.shape, leaf.held) for x, leaf in pairs if leaf is not None]

    def finish(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [numbers[k] if leaf is None else next(rest) for k, leaf in enumerate(planned)]
        for i, constant in found["constants"]:
            merged.insert(i, constant.value)
        return jax.tree.unflatten(found["tree"], merged)

    lowered = jax.jit(laid_out, out_shardings=shardings).lower(*call.leaves)
    return CompiledInit(lowered, call.leaves, tuple(leaves), finish)


def _strong(x: Any) -> jax.Array:
    """A step returns its state strongly typed, so it is created so: Flax starts counting steps from a Python 0."""
    x = jnp.asarray(x)
    return x.astype(x.dtype) if x.aval.weak_type else x


def _is_value(x: Any) -> bool:
    return is_array(x) or isinstance(x, bool | int | float | complex)


def _planned(plan: Layouts, found: dict[str, Any], shapes: list[Any]) -> list[Leaf | None]:
    """The plan's leaf for each value that `create_state` returns (None: a constant number): one argument, or
    several as a tuple."""
    tree, constants = found["tree"], {i for i, _ in found["constants"]}
    values = iter(shapes)
    places = [None if i in constants else next(values) for i in range(tree.num_leaves)]
    arguments = plan.arguments()
    if (matched := _match(tree, places, arguments)) is not None:
        return matched
    if tree.node_data() and issubclass(tree.node_data()[0], tuple | list):
        parts = [_match(*child, arguments) for child in trees.children(tree, places)]
        if all(part is not None for part in parts):
            return [leaf for part in parts for leaf in part or ()]
    raise ShardstepError(
        "create_state must return the step's state: one of its arguments, or a tuple of several, with the structure and"
        f" shapes that the plan was made for (arguments: {', '.join(a.name for a in arguments)}). It returned"
        f" {_summary(found['paths'], places)}."
    )


def _match(tree: Any, shapes: Sequence[Any], arguments: Sequence[Argument]) -> list[Leaf | None] | None:
    for argument in arguments:
        if tree != argument.tree:
            continue
        pairs = list(zip(shapes, argument.leaves, strict=True))
        if all(
            (shape is None or shape.shape == ())
            if leaf is None
            else (shape is not None and (shape.shape, str(shape.dtype)) == (leaf.shape, leaf.dtype))
            for shape, leaf in pairs
        ):
            return [leaf for shape, leaf in pairs if shape is not None]
    return None


def _summary(paths: Sequence[Any], shapes: Sequence[Any]) -> str:
    listed = [
        f"{jax.tree_util.keystr(path)} {shape.dtype}{list(shape.shape)}"
        for path, shape in zip(paths, shapes, strict=True)
        if shape is not None
    ]
    return ", ".join(listed[:6]) + (f", ... ({len(listed)} arrays)" if len(listed) > 6 else "")
