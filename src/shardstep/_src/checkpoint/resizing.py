"""A live state for another plan: more devices or fewer, without a file."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from ..core.errors import ShardstepError
from ..core.padded import Padded
from ..planning.plan import Plan
from ..runtime.placing import fitted
from ..runtime.processes import lay_out
from .matching import Wanted, expect
from .saving import refuse_what_holds_nothing


def reshape(state: Any, plan: Plan) -> Any:
    """The state of one plan, laid out for another: what N devices hold, M take over, all in one process.

    Args:
        state: what a step takes; of several state arguments a tuple, or a dict by their names.
        plan: `step.plan(...)` of the step that goes on.

    Returns:
        The same tree with the same values. Go on with it alone: it may share memory with the old one.
    """
    if not isinstance(plan, Plan):
        raise ShardstepError(f"reshape lays a state out for a plan, and {type(plan).__name__} is none")
    refuse_what_holds_nothing(state)
    expected = expect(plan)
    trees = dict(expected.arguments)
    wanted = next(iter(trees.values())) if len(trees) == 1 else trees if isinstance(state, dict) else (*trees.values(),)
    have, _ = jax.tree_util.tree_flatten_with_path(state)
    structure: Any
    planned: Any
    structure, planned = jax.tree.structure(state), jax.tree.structure(wanted)
    if structure != planned:
        raise ShardstepError(f"the state is another tree than the plan's:\n  {structure}\n  {planned}")
    return jax.tree.unflatten(
        structure, [_moved(path, x, w) for (path, x), w in zip(have, jax.tree.leaves(wanted), strict=True)]
    )


def _moved(path: Any, leaf: Any, wanted: Any) -> Any:
    if not isinstance(wanted, Wanted):
        return leaf  # static, or a number that the step hands back as it came
    if tuple(jnp.shape(leaf)) != wanted.shape or jnp.result_type(leaf) != wanted.dtype:
        shown = f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        raise ShardstepError(f"state{keystr(path)} is {shown}, and the plan's is {wanted}")
    array = jnp.asarray(leaf) if isinstance(leaf, Padded) else leaf
    if wanted.held == wanted.shape:
        return lay_out([array], [wanted.sharding])[0]
    padded = fitted(jnp.asarray(array), wanted.shape, wanted.held)
    return Padded(lay_out([padded], [wanted.sharding])[0], wanted.shape)
