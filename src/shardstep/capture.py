"""Read a training step: trace it, find what is state, what is batch, and what each state leaf is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .arguments import Argument, Call, Constant, Signature, abstract, is_array, signature_of
from .errors import ShardstepError
from .program import Program, flatten
from .rules.effects import REFUSED


@dataclass(frozen=True)
class Batch:
    """How the user told which arguments hold the examples (all None: find out)."""

    argnums: tuple[int, ...] | None = None
    argnames: tuple[str, ...] | None = None
    axis: int | tuple[int, ...] = 0

    @property
    def named(self) -> bool:
        return self.argnums is not None or self.argnames is not None


@dataclass(frozen=True, eq=False)
class Captured:
    """A step as data: its program, and what its inputs and outputs are."""

    program: Program
    call: Call
    arguments: tuple[Argument, ...]
    paths: tuple[str, ...]  # of the inputs
    out_tree: Any
    out_constants: tuple[tuple[int, Constant], ...]  # leaves of the output that are not arrays
    state: dict[int, int]  # input -> the output that replaces it
    batch: dict[int, int]  # input -> the dimension that holds the examples
    axis_name: str | None
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
) -> Captured:
    """Trace a step from the shapes of its arguments."""
    call = signature.take_apart(args, kwargs)
    try:
        traced = _trace(step, call, axis_name, replicas)
    except jax.errors.ConcretizationTypeError:
        # numbers that steer Python control flow are static, as eqx.filter_jit has them
        call = signature.take_apart(args, kwargs, numbers_static=True)
        traced = _trace(step, call, axis_name, replicas)
    arguments, paths = signature.describe(call)
    state = _match_state(call, arguments, paths, traced)
    examples = _find_batch(call, arguments, paths, state, batch, data_axes)
    _check_divisible(call, paths, examples, replicas)
    if axis_name is not None:
        traced = _trace(step, call, axis_name, replicas, examples)
    return Captured(
        program=flatten(traced.jaxpr),
        call=call,
        arguments=tuple(arguments),
        paths=tuple(paths),
        out_tree=traced.out_tree,
        out_constants=traced.out_constants,
        state=state,
        batch=examples,
        axis_name=axis_name,
        weak=frozenset(i for i, o in state.items() if traced.out_shapes[o].weak_type),
    )


# -- tracing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Traced:
    jaxpr: Any
    out_tree: Any
    out_shapes: tuple[Any, ...]  # of the array leaves
    out_constants: tuple[tuple[int, Constant], ...]


def _trace(
    step: Callable[..., Any], call: Call, axis_name: str | None, replicas: int, batch: dict[int, int] | None = None
) -> _Traced:
    found: dict[str, Any] = {}

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = call.rebuild(leaves)
        out, found["tree"] = jax.tree.flatten(step(*args, **kwargs))
        numbers = (bool, int, float, complex)
        module = any(not is_array(x) and not isinstance(x, numbers) for x in out)
        arrays = [is_array(x) or (isinstance(x, numbers) and not module) for x in out]
        found["constants"] = tuple((i, Constant(x)) for i, (x, a) in enumerate(zip(out, arrays, strict=True)) if not a)
        return [x for x, a in zip(out, arrays, strict=True) if a]

    avals = [_local(abstract(leaf), (batch or {}).get(i), replicas) for i, leaf in enumerate(call.leaves)]
    env = [(axis_name, replicas)] if axis_name is not None else None
    try:
        jaxpr, shapes = jax.make_jaxpr(flat, axis_env=env, return_shape=True)(*avals)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ShardstepError(
            f"the step uses a collective over an axis that is not bound ({error}). If it is a per-replica step, as for"
            " pmap or shard_map, give its axis: shardstep.shard(step, mesh, axis_name=...)."
        ) from error
    return _Traced(jaxpr, found["tree"], tuple(shapes), found["constants"])


def _local(aval: jax.ShapeDtypeStruct, dim: int | None, replicas: int) -> jax.ShapeDtypeStruct:
    if dim is None:
        return aval
    shape = list(aval.shape)
    shape[dim] //= replicas
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


# -- the state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Node:
    """A subtree: its structure with static leaves, and the array leaves in it."""

    treedef: Any
    constants: tuple[Constant, ...]
    leaves: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]

    def same_structure(self, other: _Node) -> bool:
        return self.treedef == other.treedef and self.constants == other.constants


def _match_state(call: Call, arguments: list[Argument], paths: list[str], traced: _Traced) -> dict[int, int]:
    """State is what comes back: the arguments whose structure, shapes and dtypes stand among the outputs."""
    inputs = [_shape(leaf) for leaf in call.leaves]
    outputs = [(tuple(s.shape), s.dtype) for s in traced.out_shapes]
    candidates = list(_input_nodes(call, inputs))
    waiting = list(range(len(candidates)))
    state: dict[int, int] = {}
    unmatched: list[_Node] = []

    def visit(tree: Any) -> None:
        node = _node(tree, outputs)
        for c in waiting:
            wanted = candidates[c]
            if node.leaves and wanted.same_structure(node) and wanted.shapes == node.shapes:
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


def _large(shape: tuple[tuple[int, ...], Any]) -> bool:
    """A scalar that has the shape of the loss is no proof of state."""
    return len(shape[0]) > 0


def _shape(leaf: Any) -> tuple[tuple[int, ...], Any]:
    shape, dtype, _ = signature_of(leaf)
    return tuple(shape), dtype


def _input_nodes(call: Call, shapes: Sequence[Any]) -> Iterator[_Node]:
    arrays, constants = iter(range(len(call.leaves))), iter(call.statics)
    marked = [next(arrays) if traced else next(constants) for traced in call.traced]
    args, kwargs = jax.tree.unflatten(call.treedef, marked)
    for argument in [*args, *(kwargs[k] for k in sorted(kwargs))]:
        yield _node(argument, shapes)


def _output_tree(traced: _Traced) -> Any:
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


# -- the batch ----------------------------------------------------------------------------------------------------


def _find_batch(
    call: Call,
    arguments: Sequence[Argument],
    paths: Sequence[str],
    state: dict[int, int],
    batch: Batch,
    data_axes: tuple[str, ...],
) -> dict[int, int]:
    """Input -> the dimension that holds the examples."""
    if batch.named:
        chosen = _named(arguments, batch)
        return _dimensions(call, chosen, _axes_for(chosen, batch))
    placed = {
        i: dim
        for i, leaf in enumerate(call.leaves)
        if i not in state and (dim := _placed_on(leaf, data_axes)) is not None
    }
    if placed:
        return placed
    return _inferred(call, arguments, paths, state, batch)


def _named(arguments: Sequence[Argument], batch: Batch) -> list[Argument]:
    chosen = []
    for i in batch.argnums or ():
        count = 1 + max((a.position for a in arguments if a.position is not None), default=-1)
        wanted = i + count if i < 0 else i
        found = [a for a in arguments if a.position == wanted]
        if not found:
            raise ShardstepError(f"batch_argnums={i}: the step was called with {count} positional arguments")
        chosen += found
    for name in batch.argnames or ():
        found = [a for a in arguments if a.name == name]
        if not found:
            listed = ", ".join(a.name for a in arguments)
            raise ShardstepError(f"batch_argnames={name!r}: no such argument; the step was called with {listed}")
        chosen += found
    return chosen


def _axes_for(chosen: Sequence[Argument], batch: Batch) -> list[int]:
    if isinstance(batch.axis, int):
        return [batch.axis] * len(chosen)
    if len(batch.axis) != len(chosen):
        raise ShardstepError(
            f"batch_axis has {len(batch.axis)} entries for {len(chosen)} batch arguments: give one for each"
        )
    return list(batch.axis)


def _dimensions(call: Call, chosen: Sequence[Argument], axes: Sequence[int]) -> dict[int, int]:
    """Split what has the examples' dimension; a scalar or a table among the leaves is replicated."""
    sized = [
        (i, axis % len(shape), shape[axis])
        for argument, axis in zip(chosen, axes, strict=True)
        for i in range(argument.start, argument.stop)
        if -len(shape := _shape(call.leaves[i])[0]) <= axis < len(shape)
    ]
    if not sized:
        names = ", ".join(a.name for a in chosen)
        raise ShardstepError(
            f"the batch ({names}) has no array with a dimension {axes[0] if axes else 0}: see batch_axis"
        )
    examples, _ = Counter(size for _, _, size in sized).most_common(1)[0]
    return {i: dim for i, dim, size in sized if size == examples}


def _placed_on(leaf: Any, data_axes: tuple[str, ...]) -> int | None:
    """The dimension that the user's own NamedSharding lays over the data axes."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    for dim, names in enumerate(sharding.spec):
        if set(names if isinstance(names, tuple) else (names,)) & set(data_axes):
            return dim
    return None


def _inferred(
    call: Call, arguments: Sequence[Argument], paths: Sequence[str], state: dict[int, int], batch: Batch
) -> dict[int, int]:
    candidates: dict[str, dict[int, tuple[int, int]]] = {}
    axis = batch.axis if isinstance(batch.axis, int) else batch.axis[0]
    for argument in arguments:
        leaves = range(argument.start, argument.stop)
        if any(i in state for i in leaves) or any(_is_key(call.leaves[i]) for i in leaves):
            continue
        shapes = {i: _shape(call.leaves[i])[0] for i in leaves}
        sized = {i: (axis % len(s), s[axis]) for i, s in shapes.items() if -len(s) <= axis < len(s)}
        if sized:
            candidates[argument.name] = sized
    sizes = {size for sized in candidates.values() for _, size in sized.values()}
    if len(sizes) == 1:
        return {i: dim for sized in candidates.values() for i, (dim, _) in sized.items()}
    listed = "; ".join(
        f"{name} has leading dimension{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        for name, sized in candidates.items()
        for found in [sorted({size for _, size in sized.values()})]
    )
    if not candidates:
        names = ", ".join(a.name for a in arguments)
        raise ShardstepError(
            f"no batch found: every argument ({names}) is state, a key or a scalar. Name the batch:"
            " shardstep.shard(step, mesh, batch_argnums=...) or batch_argnames=..."
        )
    raise ShardstepError(
        f"the batch is ambiguous: {listed}. Name it, e.g. shardstep.shard(step, mesh,"
        f" batch_argnames={next(iter(candidates))!r}), or by batch_argnums=...; what is not named is replicated."
    )


def _is_key(leaf: Any) -> bool:
    """A PRNG key, typed or raw (uint32 with two or four words)."""
    shape, dtype = _shape(leaf)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == np.uint32 and shape in ((2,), (4,))


def _check_divisible(call: Call, paths: Sequence[str], examples: dict[int, int], replicas: int) -> None:
    for i, dim in examples.items():
        size = _shape(call.leaves[i])[0][dim]
        if size % replicas:
            raise ShardstepError(
                f"the batch does not divide: {paths[i]} has {size} examples on dimension {dim}, and {replicas} replicas"
                f" share them. Use a multiple of {replicas} (e.g. {max(size // replicas, 1) * replicas}), or a mesh of"
                " fewer devices."
            )


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
