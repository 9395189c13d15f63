"""Read a training step: trace it, find what is state, what is batch, and what each state leaf is for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.tree_util import KeyPath

from ..core import passes
from ..core.program import Program, flatten
from ..core.user_shardings import Kept, kept
from . import numbers, one_each
from .arguments import Argument, Call, Constant, Signature, abstract
from .batch import Batch, Examples, check_divisible, check_not_empty, find_examples, infer_batch, named_batch
from .find_state import Matching, match_state
from .inner_maps import without_maps
from .jitted import Donate, Jitted, donated
from .looked_up_layers import layers_in_turn
from .saved_layers import read_from_their_stacks
from .simplification import simplify
from .tracing import Keep, Shares, Traced, trace, trace_guessing


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
    examples: Examples  # where they are, or what is left to be chosen
    axis_name: str | None
    kept: tuple[Kept, ...]  # for each input, its layout over the user's own mesh axes
    weak: frozenset[int]  # state that a jitted step would return weakly typed, as it came (a Python number)
    constants: frozenset[int]  # the Python numbers among the leaves of the arguments that are not traced
    key_paths: tuple[KeyPath, ...]  # of all leaves of the arguments
    out_paths: tuple[KeyPath, ...]  # of all leaves of the result
    donated: tuple[int, ...]  # the state that may be given away: of a step that is jitted already, what it donates

    @property
    def batch(self) -> dict[int, int]:
        """Input -> the dimension that holds the examples."""
        return self.examples.inputs

    def with_examples(self, examples: Examples) -> Captured:
        """The same step with its examples elsewhere: they are not state."""
        state = {i: o for i, o in self.state.items() if i not in examples.inputs}
        donated = tuple(i for i in self.donated if i in state)
        return replace(self, examples=examples, state=state, donated=donated, weak=self.weak & state.keys())

    @property
    def frozen(self) -> set[int]:
        """State that is returned unchanged."""
        inputs, outputs = self.program.inputs, self.program.outputs
        return {i for i, o in self.state.items() if outputs[o] is inputs[i]}

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The step's return value, from its array leaves."""
        return jax.tree.unflatten(self.out_tree, self.with_constants(arrays))

    def with_constants(self, arrays: Sequence[Any]) -> list[Any]:
        """All leaves of the step's return value, with these in the places of its arrays."""
        leaves = list(arrays)
        for i, constant in self.out_constants:
            leaves.insert(i, constant.value)
        return leaves


@dataclass(frozen=True, eq=False)
class StepSpec:
    """A training step as its user gave it, and where it will run."""

    step: Callable[..., Any]
    signature: Signature
    batch: Batch
    data_axes: tuple[str, ...]  # what an array's own sharding may call the axes that carry the batch
    replicas: int
    axis_name: str | None = None  # of a per-replica step
    mesh: Mesh | None = None  # the user's own
    donate: Donate | None = None  # None: all state may be given away, or what a jitted step says
    user_axes: Collection[str] = ()  # of the mesh, those that are the user's: state keeps its sharding over them


def capture(spec: StepSpec, args: Sequence[Any], kwargs: dict[str, Any], varying: Collection[int] = ()) -> Captured:
    """Trace a step from the shapes of its arguments. `varying`: numbers that had other values in earlier calls."""
    step, signature, axis_name, replicas = spec.step, spec.signature, spec.axis_name, spec.replicas
    key_paths = signature.key_paths(args, kwargs)

    def read(call: Call, keep: Keep | None) -> _Reading:
        arguments, paths = signature.describe(call, key_paths)
        examples = named_batch(call, arguments, spec.batch)
        if axis_name is None:
            traced, each = trace(step, call, mesh=spec.mesh, keep=keep), frozenset[int]()
        else:
            each = one_each.found_in(call, arguments, paths, spec.batch, replicas)
            check_divisible(call, paths, examples or {}, replicas)
            traced, each = _traced_for_one(spec, call, arguments, Shares(examples or {}, each), keep)
        return _Reading(call, arguments, paths, examples, each, traced, _program(traced, spec), keep)

    reading = numbers.settle(signature.take_apart(args, kwargs), read, varying)
    call, arguments, paths, traced = reading.call, reading.arguments, reading.paths, reading.traced
    program, state, examples = reading.program, reading.matching.state, reading.examples
    jitted = Jitted.of(traced.jaxpr)
    laid_out = jitted.laid_out(call) if jitted else call
    if axis_name is None:
        found = find_examples(laid_out, arguments, state, program, spec.batch, spec.data_axes)
    elif examples is None:
        found = Examples(infer_batch(laid_out, arguments, {*state}, reading.each, spec.batch, spec.data_axes), "")
        check_divisible(call, paths, found.inputs, replicas)
        traced = trace(step, call, axis_name, replicas, Shares(found.inputs, reading.each), keep=reading.keep)
        program = _program(traced, spec)
    else:
        found = Examples(examples, "as asked")
    state = {i: o for i, o in state.items() if i not in found.inputs}
    found = replace(found, inputs={**found.inputs, **dict.fromkeys(reading.each, 0)}, each=reading.each)
    check_not_empty(call, paths, found.inputs)
    return Captured(
        program=program,
        call=replace(call, leaves=tuple(map(abstract, call.leaves))),  # a step keeps nobody's arrays alive
        arguments=tuple(arguments),
        paths=tuple(paths),
        out_tree=traced.out_tree,
        out_constants=traced.out_constants,
        state=state,
        examples=found,
        axis_name=axis_name,
        kept=tuple(kept(leaf, spec.user_axes) for leaf in laid_out.leaves),
        weak=frozenset(i for i, o in state.items() if traced.out_shapes[o].weak_type),
        constants=frozenset(p for p in call.numbers if not call.traced[p]),
        key_paths=tuple(key_paths),
        out_paths=traced.out_paths,
        donated=donated(jitted, tuple(state)) if spec.donate is None else spec.donate.leaves(arguments, state),
    )


@dataclass(frozen=True, eq=False)
class _Reading:
    """A step traced with some of its numbers as constants."""

    call: Call
    arguments: list[Argument]
    paths: list[str]
    examples: dict[int, int] | None  # where the user named them
    each: frozenset[int]  # the leaves that hold one value for each replica
    traced: Traced
    program: Program
    keep: Keep | None

    @functools.cached_property
    def matching(self) -> Matching:
        leaves = [one_each.held_by_one(x) if i in self.each else x for i, x in enumerate(self.call.leaves)]
        call = replace(self.call, leaves=tuple(leaves))
        return match_state(call, self.arguments, self.paths, self.traced, self.program)


def _traced_for_one(
    spec: StepSpec, call: Call, arguments: Sequence[Argument], shares: Shares, keep: Keep | None
) -> tuple[Traced, frozenset[int]]:
    """A per-replica step, and the arguments that hold one value for each replica.

    As many keys as replicas may also be a table that every replica reads its own from: then the step takes all of them.
    """

    def read(shares: Shares) -> Traced:
        assert spec.axis_name is not None
        if shares.batch:
            return trace(spec.step, call, spec.axis_name, spec.replicas, shares, keep=keep)
        return trace_guessing(spec.step, call, arguments, spec.axis_name, spec.replicas, shares.each, keep)

    try:
        return read(shares), shares.each
    except Exception as error:
        if not shares.each or one_each.asked_for(arguments, spec.batch):
            raise
        try:
            return read(shares._replace(each=frozenset())), frozenset()
        except Exception:
            raise error from None


def _program(traced: Traced, spec: StepSpec) -> Program:
    program = passes.leave("capture", flatten(traced.jaxpr))
    if spec.axis_name is None:
        program = without_maps(program, spec.data_axes)
    return passes.leave("simplification", read_from_their_stacks(layers_in_turn(simplify(program))))


def uses_axis(program: Program, axis_name: str) -> bool:
    """Does any equation speak of this axis?"""

    def mentions(value: Any) -> bool:
        return value == axis_name or (isinstance(value, tuple) and axis_name in value)

    return any(mentions(e.params.get("axes")) or mentions(e.params.get("axis_name")) for e in program.walk())
