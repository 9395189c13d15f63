"""Read a training step: trace it, find what is state, what is batch, and what each state leaf is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..core.errors import ShardstepError
from ..core.program import Program, flatten
from ..core.user_shardings import Kept, kept
from ..rules.effects import REFUSED
from .arguments import Argument, Call, Constant, Signature, abstract
from .batch import Batch, check_divisible, check_not_empty, infer_batch, named_batch
from .find_state import match_state
from .simplification import simplify
from .tracing import trace, trace_guessing


@dataclass(frozen=True, eq=False)
class Captured:
    """A step as data: its program, and what its inputs and outputs are."""

    program: Program
    call: Call  # its leaves are shapes
    arguments: tuple[Argument, ...]
    paths: tuple[str, ...]  # of the inputs
    out_tree: Any
    out_constants: tuple[tuple[int, Constant], ...]  # leaves of the output that are not arrays
    state: dict[int, int]  # input -> the output that replaces it
    batch: dict[int, int]  # input -> the dimension that holds the examples
    axis_name: str | None
    kept: tuple[Kept, ...]  # for each input, how it lies over the axes of the mesh that are the user's
    weak: frozenset[int]  # state that a jitted step would return weakly typed, as it came (a Python number)

    @property
    def frozen(self) -> set[int]:
        """State that is returned unchanged."""
        inputs, outputs = self.program.inputs, self.program.outputs
        return {i for i, o in self.state.items() if outputs[o] is inputs[i]}

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The step's return value, from its array leaves."""
        leaves = list(arrays)
        for i, constant in self.out_constants:
            leaves.insert(i, constant.value)
        return jax.tree.unflatten(self.out_tree, leaves)


def capture(
    step: Callable[..., Any],
    signature: Signature,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    batch: Batch,
    data_axes: tuple[str, ...],
    replicas: int,
    axis_name: str | None,
    mesh: Mesh | None = None,
    others: Collection[str] = (),
) -> Captured:
    """Trace a step from the shapes of its arguments."""
    call = signature.take_apart(args, kwargs)
    try:
        return _capture(step, signature, call, batch, data_axes, replicas, axis_name, mesh, others)
    except jax.errors.ConcretizationTypeError:
        # numbers that steer Python control flow are static, as eqx.filter_jit has them
        call = signature.take_apart(args, kwargs, numbers_static=True)
        return _capture(step, signature, call, batch, data_axes, replicas, axis_name, mesh, others)


def _capture(
    step: Callable[..., Any],
    signature: Signature,
    call: Call,
    batch: Batch,
    data_axes: tuple[str, ...],
    replicas: int,
    axis_name: str | None,
    mesh: Mesh | None,
    others: Collection[str],
) -> Captured:
    arguments, paths = signature.describe(call)
    examples = named_batch(call, arguments, batch)
    if axis_name is None:
        traced = trace(step, call, mesh=mesh)
    elif examples is not None:
        check_divisible(call, paths, examples, replicas)
        traced = trace(step, call, axis_name, replicas, examples)
    else:
        traced = trace_guessing(step, call, arguments, axis_name, replicas)
    program = simplify(flatten(traced.jaxpr))
    state = match_state(call, arguments, paths, traced, program)
    if examples is None:
        examples = infer_batch(call, arguments, state, batch, data_axes)
        if axis_name is not None:
            check_divisible(call, paths, examples, replicas)
            traced = trace(step, call, axis_name, replicas, examples)
            program = simplify(flatten(traced.jaxpr))
    state = {i: o for i, o in state.items() if i not in examples}
    check_not_empty(call, paths, examples)
    return Captured(
        program=program,
        call=replace(call, leaves=tuple(map(abstract, call.leaves))),  # a step keeps nobody's arrays alive
        arguments=tuple(arguments),
        paths=tuple(paths),
        out_tree=traced.out_tree,
        out_constants=traced.out_constants,
        state=state,
        batch=examples,
        axis_name=axis_name,
        kept=tuple(kept(leaf, others) for leaf in call.leaves),
        weak=frozenset(i for i, o in state.items() if traced.out_shapes[o].weak_type),
    )


# -- what cannot be rewritten -----------------------------------------------------------------------------------------


def uses_axis(program: Program, axis_name: str) -> bool:
    """Does any equation speak of this axis?"""

    def mentions(value: Any) -> bool:
        return value == axis_name or (isinstance(value, tuple) and axis_name in value)

    return any(mentions(e.params.get("axes")) or mentions(e.params.get("axis_name")) for e in program.walk())


def refuse(program: Program) -> None:
    """Say clearly what cannot be rewritten."""
    for equation in program.walk():
        if equation.primitive in REFUSED:
            raise ShardstepError(f"{equation.line}: {REFUSED[equation.primitive]}.")
        refs = [e for e in equation.effects if "Ref" in type(e).__name__ or "Write" in type(e).__name__]
        if refs:
            raise ShardstepError(
                f"{equation.line}: the step reads or writes a mutable array (jax.Ref). Pass its value in and return"
                " the new one instead."
            )
        if any("Ordered" in type(e).__name__ for e in equation.effects):
            raise ShardstepError(
                f"{equation.line}: {equation.primitive} asks for ordered effects, which JAX has on one device only."
                " Leave ordered=True out: it still happens once, on the first replica."
            )
