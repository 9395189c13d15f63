"""Trees of things that are no arrays, in the structure of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Node:
    """Replaces a node whose class accepts only arrays (it checks its fields, say)."""

    def __init__(self, kind: type, children: Sequence[Any]):
        self.kind = kind
        self.children = tuple(children)

    def tree_flatten(self) -> tuple[tuple[Any, ...], type]:
        return self.children, self.kind

    @classmethod
    def tree_unflatten(cls, kind: type, children: Sequence[Any]) -> Node:
        return cls(kind, children)

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(map(repr, self.children))})"


def children(treedef: Any, leaves: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The structure of each child with its leaves."""
    start = 0
    for child in treedef.children():
        yield child, leaves[start : start + child.num_leaves]
        start += child.num_leaves


def like(treedef: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves; where its classes refuse them, with `Node` in their place."""
    if jax.tree_util.treedef_is_leaf(treedef) and leaves:  # None is one too
        return leaves[0]
    try:
        return jax.tree.unflatten(treedef, leaves)
    except Exception:  # whatever a class may check when it is built
        below = [like(*child) for child in children(treedef, leaves)]
    kind, data = treedef.node_data()
    if kind is dict:
        return dict(zip(data, below, strict=True))
    return kind(below) if kind in (tuple, list) else Node(kind, below)
