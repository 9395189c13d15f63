"""A captured step with its plan, as a compiled function on arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..capture.arguments import Call, shape_of
from ..capture.step import Captured
from ..core import compat, meshes, trees, user_shardings
from ..core.errors import ShardstepError
from ..core.execution import HOST, Execution
from ..core.layout import Axis, Layout, Varying, padded_shape, partition_spec, show
from ..core.options import Options
from ..machine.replicas import Replicas
from ..rules.effects import calls_host
from . import annotate, in_place, interpreter, interrupts, processes
from .call_cache import CallCache
from .placing import Resting, fitted, place, returned


class Rewritten:
    """A captured step as it runs: rewritten for one replica, or left to XLA with its state sharded at rest."""

    def __init__(
        self, step: Callable[..., Any], captured: Captured, execution: Execution, replicas: Replicas, options: Options
    ):
        self.name = getattr(step, "__name__", type(step).__name__)
        self.captured = captured
        self.execution = execution
        self.replicas = replicas
        self.mesh = replicas.mesh
        self.donated = captured.donated if options.donate else ()
        self.spans_processes = not NamedSharding(self.mesh, PartitionSpec()).is_fully_addressable
        self.specs = _input_specs(captured, execution, replicas)
        self.rests = _at_rest(captured, execution, self.specs, replicas)
        self.padded_outputs = [
            o
            for o, (atom, layout) in enumerate(zip(captured.program.outputs, execution.outputs, strict=True))
            if _held(atom.array.shape, layout)
        ]
        self._agreed = False
        self._has_run = False
        self._retyped: list[NamedSharding] = []  # on the user's mesh, where the program itself cannot return that
        self._call_cache: CallCache | None = None
        if execution.engine == "annotate":
            self.constant_values: list[Any] = []  # the step is traced once more, as it is
            self._run = annotate.annotated(step, captured, [rest.sharding for rest in self.rests], self.donated)
        else:
            self.constant_values = [value for _, value in captured.program.constants]
            self._run = self._compiled(options)
            self._checked = functools.cache(lambda: self._compiled(options, checked=True))

    def _compiled(self, options: Options, checked: bool = False) -> Any:
        """The rewritten step, on the arrays that hold its inputs and constants.

        `checked`: for `jax.debug_nans`, which looks at all that comes back. Padding is undefined, so zeros come back
        there; and nothing is donated, so that JAX can look for the line that made a NaN.
        """
        captured, execution, replicas = self.captured, self.execution, self.replicas
        axes, count = replicas.axes, len(self.specs)
        outs = [
            _spec(max(atom.array.ndim, 1), layout, axes, 0)
            for atom, layout in zip(captured.program.outputs, execution.outputs, strict=True)
        ]
        gathered: frozenset[int] = frozenset()
        if self.donated and axes[0].backend.tiled:
            gathered = in_place.gathered_outputs(execution.schedule, replicas.topology.chip.near)
        rewritten = jax.shard_map(
            # no partial: of one, jit would print the schedule
            lambda *blocks: _replica(execution, gathered, count, *blocks),
            mesh=self.mesh,
            in_specs=(*self.specs, *[PartitionSpec()] * len(self.constant_values)),
            out_specs=tuple(outs),
            axis_names=set(replicas.names),
            check_vma=options.check,
        )

        def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            outputs = _as_promised(rewritten(*arrays), captured, execution, replicas.count)
            return self._without_padding(outputs) if checked else outputs

        return jax.jit(
            whole,
            donate_argnums=() if checked else self.donated,
            out_shardings=self._returned_shardings(outs),
        )

    def _without_padding(self, outputs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The same arrays with zeros in their padding."""
        clean = list(outputs)
        for o in set(self.padded_outputs) - set(self.execution.hosted.values()):
            clean[o] = fitted(outputs[o], self.captured.program.outputs[o].array.shape, outputs[o].shape, afresh=True)
        return tuple(clean)

    def _returned_shardings(self, specs: Sequence[PartitionSpec]) -> tuple[NamedSharding, ...] | None:
        """What comes back is of the user's own kind: on their mesh if that is Explicit, along their axes as it came."""
        returned_specs = list(specs)
        for i, o in self.captured.state.items():
            returned_specs[o] = self.rests[i].sharding.spec
        explicit = meshes.typed_copy(self.mesh, self.replicas.user_mesh)
        mesh = explicit or (self.mesh if any(self.captured.kept) else None)
        if explicit and calls_host(self.captured.program):  # JAX wants one mesh for a program that calls the host
            self._retyped = [NamedSharding(explicit, spec) for spec in returned_specs]
            mesh = self.mesh
        if mesh is None and not self.execution.hosted:
            return None
        kinds = dict.fromkeys(self.execution.hosted.values(), HOST)
        return tuple(
            NamedSharding(mesh or self.mesh, spec, memory_kind=kinds.get(o)) for o, spec in enumerate(returned_specs)
        )

    @functools.cached_property
    def constants(self) -> list[jax.Array]:
        """Placed when first run: a step may also be lowered for devices that are not there."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return processes.lay_out(self.constant_values, [everywhere] * len(self.constant_values))

    def local_batch(self, leaves: Sequence[Any]) -> dict[int, int]:
        """The leaves of the batch that this process holds by itself, with the dimension of their examples."""
        concrete = (i for i in self.captured.batch if not isinstance(leaves[i], jax.core.Tracer))
        return {i: self.captured.batch[i] for i in concrete if processes.is_local(leaves[i])}

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The arrays that hold the arguments, as the compiled step takes them."""
        if not self._agreed:  # once: a mistake shows on the first call, and later calls should not pay
            processes.check_agreement(leaves, [rest.sharding for rest in self.rests], self.captured.paths)
            self._agreed = True
        with meshes.within(self.mesh.abstract_mesh):
            return place(leaves, self.rests, self.donated)

    def remember(self, call: Call, context: Any, arrays: Sequence[Any]) -> None:
        self._call_cache = CallCache.of(call, context, self.replicas.user_axes, arrays, self.captured.state)

    def place_again(self, call: Call, context: Any) -> list[Any] | None:
        """As `place`, if the call is like the one remembered: only what is no state has to be laid out."""
        cache = self._call_cache
        arrays = cache and cache.recognise(call, context)
        if not cache or not arrays or (self.spans_processes and self.local_batch(arrays)):
            return None
        others = list(cache.others)
        with meshes.within(self.mesh.abstract_mesh):
            for i, x in zip(others, place([arrays[i] for i in others], [self.rests[i] for i in others]), strict=True):
                arrays[i] = x
        return arrays

    def __call__(self, arrays: Sequence[Any]) -> Any:
        interrupts.raise_waiting()
        with interrupts.deferred(None if self._has_run else arrays):  # compiling may be interrupted
            outputs = self._call(arrays)
            self._has_run = True
            return outputs

    def _call(self, arrays: Sequence[Any]) -> Any:
        debugging = compat.debugs_nans()
        if not debugging or self.execution.engine == "annotate":
            return self.run(self._run, arrays)
        try:
            return self.run(self._checked(), arrays)
        except RecursionError:  # JAX looks for the line, and walks in circles around a shard_map that is given NaN
            raise FloatingPointError(
                "invalid value (nan) encountered in the sharded step: its arguments hold NaN already"
            ) from None

    def run(self, program: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """What the step returns for arguments that are laid out, computed by this form of its program."""
        if self._retyped:  # what the last call returned
            arrays = [meshes.untyped(x, self.mesh) for x in arrays]
        with meshes.within(self.mesh.abstract_mesh):
            outputs = list(program(*arrays, *self.constants))
        if self._retyped:
            outputs = list(jax.device_put(outputs, self._retyped))
        for o in self.padded_outputs:
            outputs[o] = returned(outputs[o], self.captured.program.outputs[o].array.shape)
        return self.captured.rebuild(outputs)

    def traced(self) -> Any:
        """The program as JAX traces it, on arrays as they lie at rest."""
        shapes = []
        for leaf, rest in zip(self.captured.call.leaves, self.rests, strict=True):
            shape, dtype = shape_of(leaf)
            shapes.append(jax.ShapeDtypeStruct(rest.held or shape, dtype, sharding=rest.sharding))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        constants = [jax.ShapeDtypeStruct(*shape_of(value), sharding=everywhere) for value in self.constant_values]
        return self.under_mesh(lambda: self._run.trace(*shapes, *constants))

    def under_mesh(self, act: Callable[[], Any]) -> Any:
        with meshes.within(self.mesh.abstract_mesh):
            return act()

    def out_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays that the step returns, with their logical shapes."""
        outputs = zip(self.captured.program.outputs, self.execution.outputs, strict=True)
        shapes = [_whole(atom.array.shape, layout, self.replicas.count) for atom, layout in outputs]
        dtypes = [atom.array.dtype for atom in self.captured.program.outputs]
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def out_info(self) -> Any:
        """The same in the structure of what the step returns."""
        return trees.like(self.captured.out_tree, self.captured.with_constants(self.out_shapes()))


def _input_specs(captured: Captured, execution: Execution, replicas: Replicas) -> list[PartitionSpec]:
    inputs = zip(captured.program.inputs, execution.inputs, strict=True)
    return [
        _spec(var.array.ndim, layout, replicas.axes, captured.batch.get(i)) for i, (var, layout) in enumerate(inputs)
    ]


def _at_rest(
    captured: Captured, execution: Execution, specs: Sequence[PartitionSpec], replicas: Replicas
) -> list[Resting]:
    """The shardings of the input arrays. Along the user's own axes, state stays as it came."""
    resting = map(user_shardings.joined, specs, captured.kept)
    inputs = zip(captured.paths, resting, captured.program.inputs, execution.inputs, strict=True)
    return [
        Resting(
            path,
            NamedSharding(replicas.mesh, spec, memory_kind=HOST if i in execution.hosted else None),
            _held(var.array.shape, layout),
        )
        for i, (path, spec, var, layout) in enumerate(inputs)
    ]


def _spec(ndim: int, layout: Layout, axes: tuple[Axis, ...], dim: int | None) -> PartitionSpec:
    """The sharding of an input or output. Values of single replicas are concatenated along `dim`."""
    if any(isinstance(p, Varying) for p in layout):
        assert dim is not None
        names = tuple(n for a in axes for n in a.names)
        return PartitionSpec(*[None] * dim, names)
    return partition_spec(ndim, layout, axes)


def _whole(shape: tuple[int, ...], layout: Layout, replicas: int) -> tuple[int, ...]:
    """The shape of all replicas' values together: values of single replicas are concatenated."""
    if not any(isinstance(p, Varying) for p in layout):
        return shape
    return (shape[0] * replicas, *shape[1:]) if shape else (replicas,)


def _held(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...] | None:
    """The shape of the array that holds a padded value; None: its own."""
    held = padded_shape(shape, layout)
    return held if held != shape else None


def _replica(execution: Execution, gathered: AbstractSet[int], count: int, *blocks: jax.Array) -> tuple[jax.Array, ...]:
    """What one replica does."""
    outputs = interpreter.run(execution.schedule, blocks[:count], blocks[count:], execution.kept, execution.hosted)
    outputs = [in_place.rewritten(x) if o in gathered else x for o, x in enumerate(outputs)]
    return tuple(
        x[None] if any(isinstance(p, Varying) for p in layout) and x.ndim == 0 else x
        for x, layout in zip(outputs, execution.outputs, strict=True)
    )


def _as_promised(
    outputs: tuple[jax.Array, ...], captured: Captured, execution: Execution, replicas: int
) -> tuple[jax.Array, ...]:
    """What comes back has the shapes and dtypes that the plain step returns, or nothing comes back (while tracing)."""
    for o, (x, atom, layout) in enumerate(zip(outputs, captured.program.outputs, execution.outputs, strict=True)):
        shape, dtype = _whole(padded_shape(atom.array.shape, layout), layout, replicas), atom.array.dtype
        if (x.shape, x.dtype) != (shape, dtype):
            raise ShardstepError(
                f"internal error: output {o} of the rewritten step is {x.dtype}{list(x.shape)} where the step returns"
                f" {dtype}{list(shape)} ({show(layout)}). Please report this; options=Options(engine='annotate') leaves"
                " the step to XLA as it is."
            )
    return outputs
