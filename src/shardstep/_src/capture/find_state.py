"""Which arguments are state: those that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ShardstepError
from ..core.program import Program
from .arguments import NUMBERS, Argument, Call, Constant, shape_of
from .tracing import Traced

Shape = tuple[tuple[int, ...], Any]


@dataclass(frozen=True, eq=False)
class _Node:
    """A subtree: its structure, and for each leaf its constant or the shape and number of its array."""

    treedef: Any
    leaves: tuple[Constant | int, ...]
    shapes: tuple[Shape | None, ...]
    start: int  # of its leaves in the whole tree

    @property
    def arrays(self) -> list[int]:
        return [x for x in self.leaves if isinstance(x, int)]

    @property
    def bare(self) -> bool:
        return len(self.leaves) == len(self.arrays) == 1

    def same_structure(self, other: _Node) -> bool:
        """The same but for arrays and numbers."""
        if len(self.leaves) != len(other.leaves) or self.treedef != other.treedef:
            return False
        return all(map(_alike, self.leaves, other.leaves))

    def same_shapes(self, other: _Node) -> bool:
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(a == b if a and b else (a or b or ((),))[0] == () for a, b in pairs)

    def paired(self, other: _Node) -> list[tuple[int, int]]:
        """The arrays that stand in the same places."""
        pairs = zip(self.leaves, other.leaves, strict=True)
        return [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]


def _alike(a: Constant | int, b: Constant | int) -> bool:
    if all(isinstance(x, int) or isinstance(x.value, NUMBERS) for x in (a, b)):
        return True  # arrays and numbers: shapes are compared elsewhere
    return not isinstance(a, int) and not isinstance(b, int) and a == b


@dataclass(frozen=True, eq=False)
class Matching:
    """What comes back of the arguments."""

    state: dict[int, int]  # array among the inputs -> array among the outputs
    places: dict[int, int]  # leaf of the arguments' tree -> leaf of the result's, array or not


def match_state(call: Call, arguments: list[Argument], paths: list[str], traced: Traced, program: Program) -> Matching:
    """State is what comes back: the arguments whose structure, shapes and dtypes stand among the outputs.

    One bare array may look like an output by chance (a learning rate and the loss are both scalars): it is state only
    if the output depends on it.
    """
    inputs = [shape_of(leaf) for leaf in call.leaves]
    outputs = [(tuple(s.shape), s.dtype) for s in traced.out_shapes]
    waiting = _input_nodes(call, inputs)
    state: dict[int, int] = {}
    places: dict[int, int] = {}
    unmatched: list[_Node] = []
    visiting = [_node(traced.out_tree, traced.out_leaves, outputs, 0)]
    while visiting:
        node = visiting.pop()
        for wanted in waiting if node.leaves else ():
            if not (wanted.same_structure(node) and wanted.same_shapes(node)):
                continue
            if wanted.bare and (not node.bare or not depends(program, wanted.arrays[0], node.arrays[0])):
                continue
            state.update(wanted.paired(node))
            places.update(zip(_range(wanted), _range(node), strict=True))
            waiting.remove(wanted)
            break
        else:
            unmatched.append(node)
            visiting += reversed(_children(node))
    _check_changed(state, waiting, unmatched, paths, inputs, outputs)
    if not any(_large(inputs[i]) for i in state):
        listed = ", ".join(a.name for a in arguments)
        raise ShardstepError(
            "no state found: no argument comes back among the outputs with the same structure, shapes and dtypes"
            f" (arguments: {listed}). A training step returns its new state, e.g. `return state, loss`."
        )
    return Matching(state, places)


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


def _node(treedef: Any, leaves: Sequence[Any], shapes: Sequence[Shape], start: int) -> _Node:
    known = tuple(shapes[x] if isinstance(x, int) else None for x in leaves)
    return _Node(treedef, tuple(leaves), known, start)


def _input_nodes(call: Call, shapes: Sequence[Shape]) -> list[_Node]:
    arrays, constants = iter(range(len(call.leaves))), iter(call.statics)
    leaves = [next(arrays) if traced else next(constants) for traced in call.traced]
    nodes, start = [], 0
    for treedef in call.arguments:
        stop = start + treedef.num_leaves
        nodes.append(_node(treedef, leaves[start:stop], shapes, start))
        start = stop
    return nodes


def _children(node: _Node) -> list[_Node]:
    """Of a structure, not of a tree: no class of the user's is called with what it does not expect."""
    children, start = [], 0
    for treedef in node.treedef.children():
        stop = start + treedef.num_leaves
        children.append(_Node(treedef, node.leaves[start:stop], node.shapes[start:stop], node.start + start))
        start = stop
    return children


def _range(node: _Node) -> range:
    return range(node.start, node.start + len(node.leaves))


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
            if not node.arrays or not node.same_structure(other) or not (pairs := node.paired(other)):
                continue
            same = [before[i] == after[o] for i, o in pairs]
            first = pairs[0]
            alike = (
                any(same)
                if len(same) > 1
                else not state and _large(before[first[0]]) and _like(before[first[0]], after[first[1]])
            )
            if alike and not all(same):
                i, o = next(pair for pair, s in zip(pairs, same, strict=True) if not s)
                raise ShardstepError(
                    f"the state leaf {paths[i]} comes in as {_text(before[i])} but goes out as {_text(after[o])}: a"
                    " step must return its state with the shapes and dtypes it came with. Cast or reshape it there."
                )


def _like(before: Shape, after: Shape) -> bool:
    """One array in, one array out: the same weight if shape or dtype is kept."""
    (a, _), (b, _) = before, after
    return a == b or (len(a) == len(b) and bool(np.prod(a) == np.prod(b)))


def _text(shape: tuple[tuple[int, ...], Any]) -> str:
    return f"{np.dtype(shape[1]).name if isinstance(shape[1], np.dtype) else shape[1]}[{','.join(map(str, shape[0]))}]"
