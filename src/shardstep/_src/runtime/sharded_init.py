"""State that is born in its layout: no device ever holds more of it than its own part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..capture.arguments import Constant, Signature, is_array
from ..core.errors import ShardstepError
from .placing import fitted, returned

if TYPE_CHECKING:
    from ..planning.plan import Argument, Leaf, Plan


@dataclass(frozen=True, eq=False)
class Birth:
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


def prepare(plan: Plan, create_state: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Birth:
    """Trace `create_state` on shapes alone, find the plan's leaf for each of its results, and compile it for those."""
    call = Signature.of(create_state, (), ()).take_apart(args, kwargs, numbers_static=True)  # sizes, mostly
    found: dict[str, Any] = {}

    def flat(*leaves: Any) -> list[Any]:
        given, named = call.rebuild(leaves)
        out, found["tree"] = jax.tree.flatten(create_state(*given, **named))
        found["constants"] = [(i, Constant(x)) for i, x in enumerate(out) if not _is_value(x)]
        return [x for x in out if _is_value(x)]

    shapes = jax.eval_shape(flat, *call.leaves)
    leaves = _planned(plan, found["tree"], {i for i, _ in found["constants"]}, shapes)
    shardings = [plan.sharding(leaf) for leaf in leaves]

    def laid_out(*given: Any) -> list[Any]:
        return [fitted(_strong(x), leaf.shape, leaf.held) for x, leaf in zip(flat(*given), leaves, strict=True)]

    def finish(arrays: list[Any]) -> Any:
        merged = list(arrays)
        for i, constant in found["constants"]:
            merged.insert(i, constant.value)
        return jax.tree.unflatten(found["tree"], merged)

    lowered = jax.jit(laid_out, out_shardings=shardings).lower(*call.leaves)
    return Birth(lowered, call.leaves, tuple(leaves), finish)


def _strong(x: Any) -> jax.Array:
    """A step returns its state strongly typed, so it is born so: Flax starts counting steps from a Python 0."""
    x = jnp.asarray(x)
    return x.astype(x.dtype) if x.aval.weak_type else x


def _is_value(x: Any) -> bool:
    return is_array(x) or isinstance(x, bool | int | float | complex)


def _planned(plan: Plan, tree: Any, constants: set[int], shapes: list[Any]) -> list[Leaf]:
    """The plan's leaf for each array that `create_state` returns: one argument of the step, or several as a tuple."""
    numbered = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
    arrays = (i for i in range(tree.num_leaves) if i not in constants)
    shape_of = dict(zip(arrays, shapes, strict=True))
    arguments = plan.arguments()
    if (found := _match(numbered, arguments, shape_of)) is not None:
        return found
    if isinstance(numbered, tuple | list):
        parts = [_match(part, arguments, shape_of) for part in numbered]
        if all(part is not None for part in parts):
            return [leaf for part in parts for leaf in part or ()]
    raise ShardstepError(
        "create_state must return the step's state: one of its arguments, or a tuple of several, with the structure and"
        f" shapes that the plan was made for (arguments: {', '.join(a.name for a in arguments)}). It returned"
        f" {_summary(numbered, shape_of)}."
    )


def _match(numbered: Any, arguments: list[Argument], shapes: dict[int, Any]) -> list[Leaf] | None:
    places, tree = jax.tree.flatten(numbered)
    for argument in arguments:
        if tree != argument.tree:
            continue
        pairs = [(shapes.get(place), leaf) for place, leaf in zip(places, argument.leaves, strict=True)]
        if all(
            leaf is None or (shape is not None and (shape.shape, str(shape.dtype)) == (leaf.shape, leaf.dtype))
            for shape, leaf in pairs
        ):
            return [leaf for _, leaf in pairs if leaf is not None]
    return None


def _summary(numbered: Any, shapes: dict[int, Any]) -> str:
    listed = [
        f"{jax.tree_util.keystr(path)} {shapes[i].dtype}{list(shapes[i].shape)}"
        for path, i in jax.tree_util.tree_leaves_with_path(numbered)
        if i in shapes
    ]
    return ", ".join(listed[:6]) + (f", ... ({len(listed)} arrays)" if len(listed) > 6 else "")
