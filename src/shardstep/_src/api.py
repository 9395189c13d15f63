"""`shard`: capture -> plan -> rewrite -> run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .capture.arguments import Call, Signature, as_tuple, shape_of
from .capture.batch import Batch
from .capture.step import Captured, capture, refuse, uses_axis
from .core import meshes
from .core import user_shardings as shardings
from .core.errors import ShardstepError
from .core.gc_pause import undisturbed
from .core.layout import Axis, Layout, Varying, padded_shape, partition_spec
from .core.options import Options
from .machine.replicas import Replicas
from .planning import engines
from .planning.plan import Decided, Plan, decide, describe
from .runtime import in_place, interpreter, processes
from .runtime.call_cache import Familiar
from .runtime.placing import Resting, place, returned


def shard(
    step: Callable[..., Any],
    mesh: Mesh | None = None,
    *,
    axis: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    batch_axis: int | Sequence[int] = 0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    axis_name: str | None = None,
    weights: str = "auto",
    group: int | None = None,
    options: Options | None = None,
) -> ShardedStep:
    """Shard the weight update of a training step across data-parallel replicas.

    Args:
        step: the training step, unchanged: `(state, batch) -> (state, metrics)` in any order, jitted or not.
        mesh: where it runs; if None, that of `jax.set_mesh` around the call, else all devices on one axis `"data"`.
        axis: the mesh axis or axes that carry the batch; all of them if None.
        batch_argnums: the arguments that hold the examples, where they cannot be found by themselves.
        batch_argnames: the same, by name.
        batch_axis: the dimension that holds the examples, one for all or one per batch argument.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        axis_name: set for a per-replica step, as for `pmap` or `shard_map`: the axis its collectives name.
        weights: how weights rest between steps: `"replicated"`, `"sharded"`, or `"auto"`.
        group: shard the state over groups of this many replicas, and all-reduce between the groups.
        options: see `Options`.

    Returns:
        A callable with the step's own signature, and `.plan`, `.place` and `.lower`.
    """
    settings = {name: value for name, value in locals().items() if name not in ("step", "mesh", "axis")}
    if weights not in ("auto", "replicated", "sharded"):
        raise ShardstepError(f"weights={weights!r}: choose 'replicated', 'sharded' or 'auto'")
    if mesh is None:
        mesh = meshes.around() or Mesh(np.asarray(jax.devices()), ("data",))
    signature = Signature.of(step, static_argnums, static_argnames)
    batch = Batch(
        None if batch_argnums is None else as_tuple(batch_argnums, int),
        None if batch_argnames is None else as_tuple(batch_argnames, str),
        batch_axis if isinstance(batch_axis, int) else tuple(batch_axis),
    )
    options = options or Options()
    replicas = Replicas.of(mesh, axis, group, options.topology)
    sharded = ShardedStep(step, signature, replicas, batch, axis_name, weights, options)
    sharded.settings = settings
    return sharded


class ShardedStep:
    """A training step whose weight update is sharded. Called like the step itself."""

    def __init__(
        self,
        step: Callable[..., Any],
        signature: Signature,
        replicas: Replicas,
        batch: Batch,
        axis_name: str | None,
        weights: str,
        options: Options,
    ):
        functools.update_wrapper(self, step, updated=())
        self.step = step
        self.replicas = replicas
        self.axis_name = axis_name
        self.options = options
        self._signature = signature
        self._batch = batch
        self._weights = weights
        self.settings: dict[str, Any] = {}  # what `shard` was asked for, mesh and axis apart
        self._programs: dict[Any, Rewritten] = {}
        self._latest: Rewritten | None = None
        self._feeds_parts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest, context = self._latest, meshes.explicit(self.replicas.user_mesh)
        if latest and (arrays := latest.place_again(self.take_apart(args, kwargs), context)):
            return latest(arrays)
        program, call = self.program(args, kwargs)
        if program.spans_processes and (mine := program.local_batch(call.leaves)):
            program, call = self._joined(program, call, mine)
        arrays = program.place(call.leaves)
        program.remember(call, context, arrays)
        self._latest = program
        return program(arrays)

    def _joined(self, program: Rewritten, call: Call, mine: dict[int, int]) -> tuple[Rewritten, Call]:
        """A batch that each process holds by itself is the whole batch if all hold the same, else a part each.

        Once processes were seen to feed parts they are not compared any more; the whole batch is compared every time.
        """
        leaves, paths = list(call.leaves), program.captured.paths
        local = {paths[i]: leaves[i] for i in mine}
        self._feeds_parts = self._feeds_parts or not processes.hold_the_same(local)
        if not self._feeds_parts:
            return program, call
        for i, dim in mine.items():
            leaves[i] = processes.join(leaves[i], paths[i], dim, self.replicas.mesh, self.replicas.names)
        return self.program(*call.rebuild(leaves))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What would be done for these arguments (arrays or `jax.ShapeDtypeStruct`s); nothing is run."""
        return self.program(args, kwargs)[0].plan

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments, laid out as the step wants them. A call does this by itself when needed."""
        program, call = self.program(args, kwargs)
        arrays = program.place(call.leaves)
        shapes = [shape_of(leaf)[0] for leaf in call.leaves]
        args, kwargs = call.rebuild(
            [returned(x, shape) if x.shape != shape else x for x, shape in zip(arrays, shapes, strict=True)]
        )
        return (*args, kwargs) if kwargs else args

    def global_batch(self, part: Any) -> Any:
        """One batch for all processes, of which each gives its own part: a pytree of arrays on the host.

        The parts lie one after the other along the dimension that holds the examples, in the order of the mesh.
        Alone, a process gives all of it.
        """
        axis = self._batch.axis if isinstance(self._batch.axis, int) else self._batch.axis[0]
        mesh, names = self.replicas.mesh, self.replicas.names
        return jax.tree_util.tree_map_with_path(
            lambda path, x: processes.join(x, f"batch{jax.tree_util.keystr(path)}", axis, mesh, names), part
        )

    def take_apart(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Call:
        """The arguments as the step's program sees them."""
        return self._signature.take_apart(args, kwargs or {})

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The rewritten step, lowered for arguments of these shapes."""
        return self.program(args, kwargs)[0].lower()

    def program(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Rewritten, Call]:
        """The rewritten step for arguments of this kind, and the arguments taken apart for it."""
        call = self._signature.take_apart(args, kwargs)
        others = self.replicas.others
        kept = tuple(shardings.kept(leaf, others) for leaf in call.leaves) if others else ()
        typed = meshes.explicit(self.replicas.user_mesh)
        key = call.key(), kept, typed
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._rewrite(args, kwargs)
            # shard_map returns weakly typed state as strongly typed: the next call is the same program all the same
            self._programs[call.key(strong=program.captured.weak), kept, typed] = program
        if program.captured.call.traced != call.traced:
            call = self._signature.take_apart(args, kwargs, numbers_static=True)
        return program, call

    @undisturbed()
    def _rewrite(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Rewritten:
        replicas = self.replicas
        captured = capture(
            self.step,
            self._signature,
            args,
            kwargs,
            self._batch,
            replicas.known_names,
            replicas.count,
            self.axis_name,
            replicas.user_mesh,
            replicas.others,
        )
        if self.axis_name is not None and not uses_axis(captured.program, self.axis_name):
            raise ShardstepError(
                f"axis_name={self.axis_name!r} is set, but the step has no collective over that axis: each replica"
                " would train on its own batch alone. A step for the whole batch (as for jax.jit) goes without."
            )
        refuse(captured.program)
        decided = decide(captured, replicas, self._weights, self.options)
        return Rewritten(self.step, captured, decided, replicas, self.options)


class Rewritten:
    """A captured step with its plan, as a compiled function on arrays."""

    def __init__(
        self, step: Callable[..., Any], captured: Captured, decided: Decided, replicas: Replicas, options: Options
    ):
        self.captured = captured
        self.decided = decided
        self.replicas = replicas
        self.mesh = replicas.mesh
        axes = replicas.axes
        inputs = [v.array for v in captured.program.inputs]
        specs = [
            self._spec(array.ndim, layout, axes, captured.batch.get(i))
            for i, (array, layout) in enumerate(zip(inputs, decided.inputs, strict=True))
        ]
        outs = [
            self._spec(max(atom.array.ndim, 1), layout, axes, 0)
            for atom, layout in zip(captured.program.outputs, decided.outputs, strict=True)
        ]
        # along the axes that are not ours, state rests as it came
        resting = list(map(shardings.joined, specs, captured.kept))
        self.rests = [
            Resting(path, NamedSharding(self.mesh, spec), self._held(array.shape, layout))
            for path, spec, array, layout in zip(captured.paths, resting, inputs, decided.inputs, strict=True)
        ]
        # what comes back is of the user's own kind: on his mesh if that is Explicit, and along his axes as it came
        theirs = meshes.typed_copy(self.mesh, replicas.user_mesh)
        out_specs = list(outs)
        for i, o in captured.state.items():
            out_specs[o] = self.rests[i].sharding.spec
        returning = theirs or (self.mesh if any(captured.kept) else None)
        self.padded_outputs = [
            o
            for o, (atom, layout) in enumerate(zip(captured.program.outputs, decided.outputs, strict=True))
            if self._held(atom.array.shape, layout)
        ]
        self._agreed = False
        self._familiar: Familiar | None = None
        self.spans_processes = not NamedSharding(self.mesh, PartitionSpec()).is_fully_addressable
        self.donated = tuple(captured.state) if options.donate else ()
        if decided.engine.engine == "annotate":
            self.constant_values: list[Any] = []  # the step is traced once more, as it is
            self._run = engines.annotated(step, captured, [rest.sharding for rest in self.rests], self.donated)
            return
        self.constant_values = [value for _, value in captured.program.constants]
        gathered: frozenset[int] = frozenset()
        if self.donated and axes[0].tiled:
            gathered = in_place.gathered_outputs(decided.schedule, replicas.topology.chip.near)
        self._run = jax.jit(
            jax.shard_map(
                # no partial: of one, jit would print the schedule
                lambda *blocks: _replica(decided, gathered, len(inputs), *blocks),
                mesh=self.mesh,
                in_specs=(*specs, *[PartitionSpec()] * len(self.constant_values)),
                out_specs=tuple(outs),
                axis_names=set(replicas.names),
                check_vma=options.check,
            ),
            donate_argnums=self.donated,
            out_shardings=returning and tuple(NamedSharding(returning, spec) for spec in out_specs),
        )

    @staticmethod
    def _spec(ndim: int, layout: Layout, axes: tuple[Axis, ...], dim: int | None) -> PartitionSpec:
        """How an input or output lies over the mesh. Replicas' own values lie side by side along `dim`."""
        if any(isinstance(p, Varying) for p in layout):
            assert dim is not None
            names = tuple(n for a in axes for n in a.names)
            return PartitionSpec(*[None] * dim, names)
        return partition_spec(ndim, layout, axes)

    @staticmethod
    def _held(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...] | None:
        """The shape of the array that holds a padded value; None: its own."""
        held = padded_shape(shape, layout)
        return held if held != shape else None

    @functools.cached_property
    @undisturbed()
    def plan(self) -> Plan:
        return describe(self.captured, self.decided, self.replicas)

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
        self._familiar = Familiar.of(call, context, self.replicas.others, arrays, self.captured.state)

    def place_again(self, call: Call, context: Any) -> list[Any] | None:
        """As `place`, if the call is like the one remembered: only what is no state has to be laid out."""
        familiar = self._familiar
        arrays = familiar and familiar.recognise(call, context)
        if not familiar or not arrays or (self.spans_processes and self.local_batch(arrays)):
            return None
        others = list(familiar.others)
        with meshes.within(self.mesh.abstract_mesh):
            for i, x in zip(others, place([arrays[i] for i in others], [self.rests[i] for i in others]), strict=True):
                arrays[i] = x
        return arrays

    def __call__(self, arrays: Sequence[Any]) -> Any:
        with meshes.within(self.mesh.abstract_mesh):
            outputs = list(self._run(*arrays, *self.constants))
        for o in self.padded_outputs:
            outputs[o] = returned(outputs[o], self.captured.program.outputs[o].array.shape)
        return self.captured.rebuild(outputs)

    def lower(self) -> jax.stages.Lowered:
        shapes = []
        for leaf, rest in zip(self.captured.call.leaves, self.rests, strict=True):
            shape, dtype = shape_of(leaf)
            shapes.append(jax.ShapeDtypeStruct(rest.held or shape, dtype, sharding=rest.sharding))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        constants = [jax.ShapeDtypeStruct(*shape_of(value), sharding=everywhere) for value in self.constant_values]
        with meshes.within(self.mesh.abstract_mesh):
            return self._run.lower(*shapes, *constants)


def _replica(decided: Decided, gathered: AbstractSet[int], count: int, *blocks: jax.Array) -> tuple[jax.Array, ...]:
    """What one replica does."""
    outputs = interpreter.run(decided.schedule, blocks[:count], blocks[count:], decided.kept)
    outputs = [in_place.rewritten(x) if o in gathered else x for o, x in enumerate(outputs)]
    return tuple(
        x[None] if any(isinstance(p, Varying) for p in layout) and x.ndim == 0 else x
        for x, layout in zip(outputs, decided.outputs, strict=True)
    )
