"""`shard`: capture -> plan -> run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

import jax
import numpy as np
from jax.sharding import Mesh

from .capture.arguments import Call, shape_of
from .capture.numbers import varying
from .capture.settings import Keywords, Settings, check_asked
from .capture.step import Captured, StepSpec, capture, uses_axis
from .core import compat, meshes, user_shardings
from .core.errors import ShardstepError
from .core.gc_pause import undisturbed
from .core.options import Options
from .machine.replicas import Replicas
from .planning.batch_choice import choose_batch
from .planning.decision import Decided, decide
from .planning.description import describe
from .planning.plan import Plan
from .planning.plan_table import too_large
from .planning.propagation.memo import Memo
from .planning.propagation.price import Price
from .rules.refusals import refuse
from .runtime import processes
from .runtime.bound import BoundStep
from .runtime.placing import returned
from .runtime.rewritten import Rewritten
from .runtime.stages import Lowered, Traced

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")


@overload
def shard(step: Callable[P, R], mesh: Mesh | None = None, **keywords: Unpack[Keywords]) -> ShardedStep[P, R]: ...


@overload
def shard(
    step: None = None, mesh: Mesh | None = None, **keywords: Unpack[Keywords]
) -> Callable[[Callable[P, R]], ShardedStep[P, R]]: ...


def shard(
    step: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    *,
    axis: str | Sequence[str] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    batch_argnames: str | Sequence[str] | None = None,
    batch_axis: int | Sequence[int | None] = 0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    axis_name: str | None = None,
    weights: str = "auto",
    group: int | None = None,
    options: Options | None = None,
) -> Any:
    """Shard the weight update of a training step across data-parallel replicas.

    Call it, or decorate a function or method with `@shard` or `@shard(mesh=mesh)`, as with `jax.jit`. The old state is
    donated: its arrays are gone after the call. `donate_argnums=()` keeps them.

    Args:
        step: the training step, unchanged: `(state, batch) -> (state, metrics)` in any order, jitted or not.
        mesh: where it runs; if None, that of `jax.set_mesh` around the call or of a jitted step's own
            `in_shardings`, else all devices on one axis `"data"`.
        axis: the mesh axis or axes that carry the batch; all of them if None.
        batch_argnums: the arguments that hold the examples, where they cannot be found by themselves.
        batch_argnames: the same, by name.
        batch_axis: the dimension that holds the examples, one for all or one per batch argument. None, in a per-replica
            step: one value for each replica, in a leading dimension that the step does not see, as under `pmap`.
        static_argnums: as for `jax.jit`.
        static_argnames: as for `jax.jit`.
        donate_argnums: the arguments whose state is donated. None: all of it, or what a jitted step says.
        donate_argnames: the same, by name.
        axis_name: set for a per-replica step, as for `pmap` or `shard_map`: the axis its collectives name.
        weights: how weights are kept between steps: `"replicated"`, `"sharded"`, or `"auto"`.
        group: shard the state over groups of this many replicas, and all-reduce between the groups.
        options: see `Options`.

    Returns:
        A callable with the step's own signature, and `.plan`, `.place`, `.lower`, `.trace`, `.eval_shape`.
    """
    settings = Settings(
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axis=batch_axis,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        axis_name=axis_name,
        weights=weights,
        group=group,
        options=Options() if options is None else options,
    )
    return _sharded(step, mesh, axis, settings)


def _sharded(
    step: Callable[..., Any] | None, mesh: Mesh | None, axis: str | Sequence[str] | None, settings: Settings
) -> Any:
    """The sharded step, or what makes one of the function that it decorates."""
    check_asked(step, mesh, settings)
    if step is None:
        return functools.partial(shard, mesh=mesh, axis=axis, **settings.keywords())
    if isinstance(step, ShardedStep | BoundStep):
        raise ShardstepError(f"{step!r} is sharded already: shard the function itself, {step.__name__}, once")
    if mesh is None:
        mesh = meshes.around() or compat.jitted_mesh(step) or Mesh(np.asarray(jax.devices()), ("data",))
    return ShardedStep(step, Replicas.of(mesh, axis, settings.group, settings.options.topology), settings)


class ShardedStep(Generic[P, R]):
    """A training step whose weight update is sharded. Called like the step itself."""

    __name__: str

    def __init__(self, step: Callable[P, R], replicas: Replicas, settings: Settings):
        functools.update_wrapper(self, step, updated=())
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self.step = step
        self.replicas = replicas
        self.settings = settings
        self._signature = settings.signature(step)
        self._batch = settings.batch
        self._donate = settings.donate(step)
        self._programs: dict[Any, PlannedStep] = {}
        self._captured: dict[Any, list[Captured]] = {}  # by what their calls are like
        self._latest: PlannedStep | None = None
        self._feeds_parts = False

    @property
    def axis_name(self) -> str | None:
        return self.settings.axis_name

    @property
    def options(self) -> Options:
        return self.settings.options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        latest, context = self._latest, meshes.explicit(self.replicas.user_mesh)
        if latest:
            call = self._signature.take_apart(args, kwargs, latest.captured.constants)
            if arrays := latest.place_again(call, context):
                return latest(arrays)
        program, call = self.program(args, kwargs)
        if program.spans_processes and (mine := program.local_batch(call.leaves)):
            program, call = self._joined(program, call, mine)
        arrays = program.place(call.leaves)
        program.remember(call, context, arrays)
        self._latest = program
        return program(arrays)

    @overload
    def __get__(self, owner: None, kind: type | None = None) -> ShardedStep[P, R]: ...

    @overload
    def __get__(self: ShardedStep[Concatenate[S, Q], R], owner: S, kind: type | None = None) -> BoundStep[Q, R]: ...

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """As a method: the object is the first argument."""
        return self if owner is None else BoundStep(self, owner)

    def __repr__(self) -> str:
        replicas = self.replicas
        mesh = ", ".join(f"{name}={size}" for name, size in replicas.user_mesh.shape.items())
        chosen = "".join(f", {name}={value!r}" for name, value in self.settings.chosen().items())
        return f"ShardedStep({self.__name__}, mesh=({mesh}){chosen})"

    def _joined(self, program: PlannedStep, call: Call, mine: dict[int, int]) -> tuple[PlannedStep, Call]:
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
        """One batch for all processes, each of which passes its own part: a pytree of arrays on the host.

        The parts lie one after the other along the dimension that holds the examples, in the order of the mesh.
        Alone, a process gives all of it.
        """
        axis = self._batch.first
        mesh, names = self.replicas.mesh, self.replicas.names
        return jax.tree_util.tree_map_with_path(
            lambda path, x: processes.join(x, f"batch{jax.tree_util.keystr(path)}", axis, mesh, names), part
        )

    def take_apart(self, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Call:
        """The arguments as the step's program sees them."""
        call = self._signature.take_apart(args, kwargs or {})
        earlier = self._captured.get(call.structure)
        return call.fixed(earlier[-1].constants if earlier else call.inner_numbers)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The rewritten step, traced for arguments of these shapes, as `jax.jit`'s `trace` gives it."""
        program = self.program(args, kwargs)[0]
        return Traced(program, program.traced())

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The rewritten step, lowered for arguments of these shapes, as `jax.jit`'s `lower` gives it.

        `.compile()` is called as the step is, with its own pytrees.
        """
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of what the step returns; nothing is run."""
        return self.program(args, kwargs)[0].out_info()

    def clear_cache(self) -> None:
        """Forget what was planned and compiled. The next call starts afresh."""
        self._programs.clear()
        self._captured.clear()
        self._latest = None

    def program(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[PlannedStep, Call]:
        """The rewritten step for arguments of this kind, and the arguments taken apart for it."""
        others = self.replicas.user_axes
        typed = meshes.explicit(self.replicas.user_mesh)

        def key(call: Call, strong: AbstractSet[int] = frozenset()) -> Any:
            kept = tuple(user_shardings.kept(leaf, others) for leaf in call.leaves) if others else ()
            return call.key(strong=strong), kept, typed

        call = self._signature.take_apart(args, kwargs)
        alike = self._captured.setdefault(call.structure, [])
        for constants in dict.fromkeys([captured.constants for captured in alike]) or [frozenset[int]()]:
            fixed = call.fixed(constants) if call.numbers else call
            if program := self._programs.get(key(fixed)):
                return program, fixed
        program = self._rewrite(args, kwargs, varying(call, alike))
        captured = program.captured
        alike.append(captured)
        call = call.fixed(captured.constants)
        self._programs[key(call)] = program
        # shard_map returns weakly typed state as strongly typed: the next call is the same program all the same
        self._programs[key(call, captured.weak)] = program
        return program, call

    @undisturbed()
    def _rewrite(self, args: Sequence[Any], kwargs: dict[str, Any], varying: AbstractSet[int]) -> PlannedStep:
        replicas = self.replicas
        spec = StepSpec(
            step=self.step,
            signature=self._signature,
            batch=self._batch,
            data_axes=replicas.known_names,
            replicas=replicas.count,
            axis_name=self.axis_name,
            mesh=replicas.user_mesh,
            donate=self._donate,
            user_axes=replicas.user_axes,
        )
        captured = capture(spec, args, kwargs, varying)
        if self.axis_name is not None and not uses_axis(captured.program, self.axis_name):
            raise ShardstepError(
                f"axis_name={self.axis_name!r} is set, but the step has no collective over that axis: each replica"
                " would train on its own batch alone. A step for the whole batch (as for jax.jit) goes without."
            )
        refuse(captured.program)
        memo = Memo(price=Price.together(replicas.topology.rings))
        captured = choose_batch(captured, replicas, memo)
        decided = decide(captured, replicas, self.settings.weights, self.options, memo)
        planned = PlannedStep(self.step, captured, decided, replicas, self.options)
        if not decided.fits:
            warnings.warn(f"shardstep: {too_large(planned.plan)}", stacklevel=_CALLER)
        return planned


_CALLER = 5  # frames up from where a step is planned: the user's call, or step.plan


class PlannedStep(Rewritten):
    """A step as it runs for arguments of one kind, with its plan."""

    def __init__(
        self, step: Callable[..., Any], captured: Captured, decided: Decided, replicas: Replicas, options: Options
    ):
        super().__init__(step, captured, decided.execution, replicas, options)
        self.decided = decided

    @functools.cached_property
    @undisturbed()
    def plan(self) -> Plan:
        return describe(self.captured, self.decided, self.replicas)
