"""Which arguments are state: those that come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..core.errors import ShardstepError
from ..core.program import Program
from .arguments import Argument, Call, Constant, shape_of
from .tracing import Traced


@dataclass(frozen=True, eq=False)
class _Node:
    """A subtree: its structure with static leaves, and the array leaves in it."""

    treedef: Any
    constants: tuple[Constant, ...]
    leaves: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    @property
    def bare(self) -> bool:
        return len(self.leaves) == 1 and not self.constants

    def same_structure(self, other: _Node) -> bool:
        return self.treedef == other.treedef and self.constants == other.constants


def match_state(
    call: Call, arguments: list[Argument], paths: list[str], traced: Traced, program: Program
) -> dict[int, int]:
    """State is what comes back: the arguments whose structure, shapes and dtypes stand among the outputs.

    One bare array may look like an output by chance (a learning rate and the loss are both scalars): it is state only
    if the output depends on it.
    """
    inputs = [shape_of(leaf) for leaf in call.leaves]
    outputs = [(tuple(s.shape), s.dtype) for s in traced.out_shapes]
    candidates = list(_input_nodes(call, inputs))
    waiting = list(range(len(candidates)))
    state: dict[int, int] = {}
    unmatched: list[_Node] = []

    def visit(tree: Any) -> None:
        node = _node(tree, outputs)
        for c in waiting:
            wanted = candidates[c]
            if not (node.leaves and wanted.same_structure(node) and wanted.shapes == node.shapes):
                continue
            if not wanted.bare or depends(program, wanted.leaves[0], node.leaves[0]):
                state.update(zip(wanted.leaves, node.leaves, strict=True))
                waiting.remove(c)
                return
        unmatched.append(node)
        for child in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree):
            if child is not tree and not isinstance(child, Constant):
                visit(child)

    visit(_output_tree(traced))
    _check_changed(state, [candidates[c] for c in waiting], unmatched, paths, inputs, outputs)
    if not any(_large(inputs[i]) for i in state):
        listed = ", ".join(a.name for a in arguments)
        raise ShardstepError(
            "no state found: no argument comes back among the outputs with the same structure, shapes and dtypes"
            f" (arguments: {listed}). A training step returns its new state, e.g. `return state, loss`."
        )
    return state


def depends(program: Program, i: int, o: int) -> bool:
    """Is output o computed from input i (or input i itself)?"""
    reached = {program.inputs[i]}
    for equation in program.equations:
        if any(a in reached for a in equation.inputs):
            reached.update(equation.outputs)
    return program.outputs[o] in reached


def _large(shape: tuple[tuple[int, ...], Any]) -> bool:
    """A scalar that has the shape of the loss is no proof of state."""
    return len(shape[0]) > 0


def _input_nodes(call: Call, shapes: Sequence[Any]) -> Iterator[_Node]:
    arrays, constants = iter(range(len(call.leaves))), iter(call.statics)
    marked = [next(arrays) if traced else next(constants) for traced in call.traced]
    args, kwargs = jax.tree.unflatten(call.treedef, marked)
    for argument in [*args, *(kwargs[k] for k in sorted(kwargs))]:
        yield _node(argument, shapes)


def _output_tree(traced: Traced) -> Any:
    leaves: list[Any] = list(range(len(traced.out_shapes)))
    for i, constant in traced.out_constants:
        leaves.insert(i, constant)
    return jax.tree.unflatten(traced.out_tree, leaves)


def _node(tree: Any, shapes: Sequence[Any]) -> _Node:
    leaves, treedef = jax.tree.flatten(tree)
    arrays = tuple(x for x in leaves if not isinstance(x, Constant))
    constants = tuple(x for x in leaves if isinstance(x, Constant))
    return _Node(treedef, constants, arrays, tuple(shapes[i] for i in arrays))


def _check_changed(
    state: dict[int, int],
    arguments: Sequence[_Node],
    outputs: Sequence[_Node],
    paths: Sequence[str],
    before: Sequence[Any],
    after: Sequence[Any],
) -> None:
    """An argument that comes back changed in shape or dtype is a mistake in the step, not a batch."""
    for node in arguments:
        for other in outputs:
            if not node.same_structure(other) or not node.leaves:
                continue
            same = [a == b for a, b in zip(node.shapes, other.shapes, strict=True)]
            alike = any(same) if len(same) > 1 else not state and _large(node.shapes[0]) and _like(node, other)
            if alike:
                i, o = next((i, o) for i, o, s in zip(node.leaves, other.leaves, same, strict=True) if not s)
                raise ShardstepError(
                    f"the state leaf {paths[i]} comes in as {_text(before[i])} but goes out as {_text(after[o])}: a"
                    " step must return its state with the shapes and dtypes it came with. Cast or reshape it there."
                )


def _like(node: _Node, other: _Node) -> bool:
    """One array in, one array out: the same weight if shape or dtype is kept."""
    (a, _), (b, _) = node.shapes[0], other.shapes[0]
    return a == b or (len(a) == len(b) and bool(np.prod(a) == np.prod(b)))


def _text(shape: tuple[tuple[int, ...], Any]) -> str:
    return f"{np.dtype(shape[1]).name if isinstance(shape[1], np.dtype) else shape[1]}[{','.join(map(str, shape[0]))}]"
