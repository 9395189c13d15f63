"""What one can do with a training step: plain data parallelism, annotations, shardstep, and an expert's own program.

Each variant is a function of a workload and a mesh, and gives a contender to be measured. All of them donate their
state. "By the first divisible dimension" is the rule that everyone writes by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimization import MATRIX_OPTIMIZERS, OPTIMIZERS, RATE, of_matrices
from workloads import State, Workload

import shardstep
from shardstep._src.tools.measuring import Contender

AXIS = "data"
WHOLE, BY_EXAMPLE = PartitionSpec(), PartitionSpec(AXIS)
Variant = Callable[[Workload, Mesh], Contender]


def contender(
    name: str, workload: Workload, mesh: Mesh, step: Any, layout: State, init: Callable[[], State] | None = None
) -> Contender:
    """Of a jitted `(state, batch) -> (state, loss)` whose state rests in this layout of PartitionSpecs.

    `init`: how the state begins, where it is not what the optimizer itself keeps.
    """
    create = init or workload.init
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout, is_leaf=lambda x: isinstance(x, PartitionSpec))
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(create),
        where,
    )
    return Contender(
        name,
        lambda: step.lower(shapes, workload.batch),
        lambda: jax.device_put(create(), where, may_alias=False),
        lambda state: step(state, workload.batch),
    )


# --- annotations ----------------------------------------------------------------------------------------------------


def divisible(shape: tuple[int, ...], replicas: int) -> int | None:
    """The first dimension that the replicas divide."""
    return next((d for d, size in enumerate(shape) if size % replicas == 0), None)


def along(dim: int | None) -> PartitionSpec:
    return WHOLE if dim is None else PartitionSpec(*[None] * dim, AXIS)


def by_hand(shapes: State, mesh: Mesh, weights: bool, moments: bool) -> State:
    """PartitionSpecs of weights or moments by the first divisible dimension, or whole."""

    def lay_out(tree: Any, split: bool) -> Any:
        return jax.tree.map(lambda x: along(divisible(x.shape, mesh.size)) if split else WHOLE, tree)

    return State(lay_out(shapes.params, weights), lay_out(shapes.optimizer, moments), lay_out(shapes.statistics, False))


def annotated(name: str, weights: bool, moments: bool) -> Variant:
    """The step under `jit`, with its weights or moments laid out by the first divisible dimension, or whole."""

    def make(workload: Workload, mesh: Mesh) -> Contender:
        layout = by_hand(jax.eval_shape(workload.init), mesh, weights, moments)
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout)
        step = jax.jit(
            workload.step,
            in_shardings=(where, NamedSharding(mesh, BY_EXAMPLE)),
            out_shardings=(where, NamedSharding(mesh, WHOLE)),
            donate_argnums=0,
        )
        return contender(name, workload, mesh, step, layout)

    return make


def over_data(workload: Workload, mesh: Mesh) -> Contender:
    """As MaxText does it with `shard_optimizer_over_data`, after its public description and code.

    Weights and moments rest split alike. The step begins by constraining the weights to be whole, in the dtype in which
    they are accumulated over, and ends by constraining the gradients to rest as the weights do.
    """
    optimizer = OPTIMIZERS[workload.optimizer].plain()
    layout = by_hand(jax.eval_shape(workload.init), mesh, weights=True, moments=True)
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout)
    whole = NamedSharding(mesh, WHOLE)

    def train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        seen = jax.tree.map(lambda w: lax.with_sharding_constraint(w, whole), state.params)
        value, grads, statistics = workload.gradient(state._replace(params=seen), batch, None)
        grads = jax.tree.map(lax.with_sharding_constraint, grads, where.params)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments, statistics), value

    step = jax.jit(
        train_step,
        in_shardings=(where, NamedSharding(mesh, BY_EXAMPLE)),
        out_shardings=(where, whole),
        donate_argnums=0,
    )
    return contender("over-data", workload, mesh, step, layout)


# --- per-replica programs -------------------------------------------------------------------------------------------


def per_replica(
    name: str,
    workload: Workload,
    mesh: Mesh,
    replica: Callable[..., Any],
    layout: State,
    init: Callable[[], State] | None = None,
) -> Contender:
    """A program that is written for one replica: what one gives to `pmap` or `shard_map`."""
    mapped = jax.shard_map(
        replica, mesh=mesh, in_specs=(layout, BY_EXAMPLE), out_specs=(layout, WHOLE), check_vma=False
    )
    return contender(name, workload, mesh, jax.jit(mapped, donate_argnums=0), layout, init)


def gradients(workload: Workload, params: Any, statistics: Any, batch: Any, replicas: int) -> tuple[Any, Any, Any]:
    """This replica's terms: of the loss, of the gradient; and the statistics, which are everyone's."""
    return workload.gradient(State(params, (), statistics), batch, AXIS, 1 / replicas)


def data_parallel(workload: Workload, mesh: Mesh) -> Contender:
    """Add up the gradients, update everything everywhere."""
    shapes = jax.eval_shape(workload.init)
    optimizer = OPTIMIZERS[workload.optimizer].plain()

    def replica(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, grads, statistics = gradients(workload, state.params, state.statistics, batch, mesh.size)
        updates, moments = optimizer.update(lax.psum(grads, AXIS), state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments, statistics), lax.psum(loss, AXIS)

    return per_replica("shard_map", workload, mesh, replica, jax.tree.map(lambda _: WHOLE, shapes))


def forward_backward(workload: Workload, mesh: Mesh) -> Contender:
    """Not a training step: loss and gradient terms, and nothing that follows. Step time minus this is the update's.

    The gradients are returned, for they are made in memory in the other programs too.
    """
    shapes = jax.eval_shape(workload.init)
    layout = jax.tree.map(lambda _: WHOLE, shapes._replace(optimizer=()))

    def replica(state: State, batch: Any) -> tuple[jax.Array, Any]:
        loss, grads, _ = gradients(workload, state.params, state.statistics, batch, mesh.size)
        return lax.psum(loss, AXIS), jax.tree.map(lambda g: g[None], grads)

    step = jax.jit(
        jax.shard_map(replica, mesh=mesh, in_specs=(layout, BY_EXAMPLE), out_specs=(WHOLE, BY_EXAMPLE), check_vma=False)
    )
    where = NamedSharding(mesh, WHOLE)

    def start() -> State:
        return jax.device_put(workload.init()._replace(optimizer=()), where)

    def advance(state: State) -> tuple[State, None]:
        jax.block_until_ready(step(state, workload.batch))
        return state, None

    def lower() -> jax.stages.Lowered:
        kept = shapes._replace(optimizer=())
        return step.lower(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), kept), workload.batch
        )

    return Contender(FORWARD_BACKWARD, lower, start, advance)


FORWARD_BACKWARD = "forward+backward"


# --- the expert's program -------------------------------------------------------------------------------------------

SMALL = 64 * 1024  # bytes; smaller weights are reduced together and updated by every replica, for that is cheaper


def expert(name: str, rests_sharded: bool) -> Variant:
    """Scatter each gradient, update the shard, gather the weight: what shardstep is held against.

    Weights are whole (sliced for the update, gathered after it) or sharded (gathered before the forward pass).
    """

    def make(workload: Workload, mesh: Mesh) -> Contender:
        shapes = jax.eval_shape(workload.init)
        tree = jax.tree.structure(shapes.params)

        def dim_of(leaf: Any) -> int | None:
            return divisible(leaf.shape, mesh.size) if leaf.size * leaf.dtype.itemsize >= SMALL else None

        dims = [dim_of(leaf) for leaf in jax.tree.leaves(shapes.params)]
        on_shards = OPTIMIZERS[workload.optimizer].on_shards
        assert on_shards is not None, f"no expert's {workload.optimizer}"
        optimizer = on_shards([d is not None for d in dims], AXIS)

        def scatter(grads: Any) -> Any:
            leaves = jax.tree.leaves(grads)
            small = iter(lax.psum([g for g, d in zip(leaves, dims, strict=True) if d is None], AXIS))
            return tree.unflatten(
                next(small) if d is None else lax.psum_scatter(g, AXIS, scatter_dimension=d, tiled=True)
                for g, d in zip(leaves, dims, strict=True)
            )

        def own(params: Any) -> Any:
            def part(w: jax.Array, d: int | None) -> jax.Array:
                if d is None:
                    return w
                size = w.shape[d] // mesh.size
                return lax.dynamic_slice_in_dim(w, lax.axis_index(AXIS) * size, size, d)

            return tree.unflatten(map(part, jax.tree.leaves(params), dims))

        def gather(shards: Any) -> Any:
            def whole(w: jax.Array, d: int | None) -> jax.Array:
                return w if d is None else lax.all_gather(w, AXIS, axis=d, tiled=True)

            return tree.unflatten(map(whole, jax.tree.leaves(shards), dims))

        def replica(state: State, batch: Any) -> tuple[State, jax.Array]:
            params = gather(state.params) if rests_sharded else state.params
            shard = state.params if rests_sharded else own(params)
            loss, grads, statistics = gradients(workload, params, state.statistics, batch, mesh.size)
            updates, moments = optimizer.update(scatter(grads), state.optimizer, shard)
            shard = optax.apply_updates(shard, updates)
            return State(shard if rests_sharded else gather(shard), moments, statistics), lax.psum(loss, AXIS)

        def lay_out(tree: Any, split: bool = True) -> Any:
            return jax.tree.map(lambda leaf: along(dim_of(leaf)) if split else WHOLE, tree)

        layout = State(
            lay_out(shapes.params, rests_sharded), lay_out(shapes.optimizer), lay_out(shapes.statistics, False)
        )
        return per_replica(name, workload, mesh, replica, layout)

    return make


def layer_by_layer(workload: Workload, mesh: Mesh) -> Contender:
    """FSDP as an expert writes it for layers that are scanned.

    Weights and moments rest split along a dimension that is not the layers'. Each layer is gathered inside the loop, in
    bfloat16, and its gradient is scattered inside the loop that goes back.
    """
    assert workload.layered is not None, f"{workload.name} cannot be read layer by layer"
    loss, shapes = workload.layered, jax.eval_shape(workload.init)
    tree = jax.tree.structure(shapes.params)

    def dim_of(path: Any, leaf: Any) -> int | None:
        stacked = "layers" in jax.tree_util.keystr(path)
        if leaf.ndim == 0 or leaf.size * leaf.dtype.itemsize // (leaf.shape[0] if stacked else 1) < SMALL:
            return None
        return next((d for d in range(stacked, leaf.ndim) if leaf.shape[d] % mesh.size == 0), None)

    paths = jax.tree_util.tree_leaves_with_path(shapes.params)
    dims = [dim_of(path, leaf) for path, leaf in paths]
    # as a layer sees it, without the dimension of the layers
    seen = {
        path[-1].key: d if d is None else d - ("layers" in jax.tree_util.keystr(path))
        for (path, _), d in zip(paths, dims, strict=True)
    }
    on_shards = OPTIMIZERS[workload.optimizer].on_shards
    assert on_shards is not None, f"no expert's {workload.optimizer}"
    optimizer = on_shards([d is not None for d in dims], AXIS)

    def read(name: str, w: jax.Array) -> jax.Array:
        w, d = w.astype(jax.numpy.bfloat16), seen[name]
        return w if d is None else lax.all_gather(w, AXIS, axis=d, tiled=True)

    def replica(state: State, batch: Any) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(lambda p: loss(p, batch, read) / mesh.size)(state.params)
        leaves = jax.tree.leaves(grads)  # what was gathered comes back scattered; the rest is to be added up
        small = iter(lax.psum([g for g, d in zip(leaves, dims, strict=True) if d is None], AXIS))
        grads = tree.unflatten(next(small) if d is None else g for g, d in zip(leaves, dims, strict=True))
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), moments, state.statistics), lax.psum(value, AXIS)

    layout = jax.tree_util.tree_map_with_path(lambda path, leaf: along(dim_of(path, leaf)), shapes)
    return per_replica("expert-layers", workload, mesh, replica, layout)


def owned(workload: Workload, mesh: Mesh) -> Contender:
    """A matrix optimizer as an expert writes it: matrices of one shape are stacked, each replica owns some of them.

    Gradients are scattered to the owners, which keep the optimizer's state and make the updates; those are gathered.
    Everything else is reduced and updated by every replica.
    """
    make = MATRIX_OPTIMIZERS[workload.optimizer]
    shapes = jax.eval_shape(workload.init).params
    leaves, tree = jax.tree.flatten(shapes)
    matrices = of_matrices(shapes)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (leaf, matrix) in enumerate(zip(leaves, matrices, strict=True)):
        if matrix:
            groups.setdefault(leaf.shape, []).append(i)
    rest = [i for i, matrix in enumerate(matrices) if not matrix]
    one, others = make(), optax.adamw(RATE)

    def height(members: list[int]) -> int:
        """Of the stack: every replica owns as many."""
        return -(-len(members) // mesh.size) * mesh.size

    def fresh(w: jax.Array) -> Any:
        return one.init([w])

    def moments(params: Any) -> Any:
        leaves = jax.tree.leaves(params)
        stacks = [jax.vmap(fresh)(jax.numpy.zeros((height(m), *shape))) for shape, m in groups.items()]
        return stacks, others.init([leaves[i] for i in rest])

    def init() -> State:
        params, statistics = workload.create(jax.random.key(0))
        return State(params, moments(params), statistics)

    def replica(state: State, batch: Any) -> tuple[State, jax.Array]:
        value, grads, statistics = gradients(workload, state.params, state.statistics, batch, mesh.size)
        flat, old = jax.tree.leaves(grads), jax.tree.leaves(state.params)
        new, stacks = list(old), []
        for members, stack in zip(groups.values(), state.optimizer[0], strict=True):
            terms = jax.numpy.stack([flat[i] for i in members])
            terms = jax.numpy.pad(terms, ((0, height(members) - len(members)), (0, 0), (0, 0)))
            mine = lax.psum_scatter(terms, AXIS, scatter_dimension=0, tiled=True)
            updates, stack = jax.vmap(lambda g, s: one.update([g], s, [jax.numpy.zeros_like(g)]))(mine, stack)
            stacks.append(stack)
            for i, update in zip(members, lax.all_gather(updates[0], AXIS, axis=0, tiled=True), strict=False):
                new[i] = old[i] + update
        reduced = lax.psum([flat[i] for i in rest], AXIS)
        updates, kept = others.update(reduced, state.optimizer[1], [old[i] for i in rest])
        for i, update in zip(rest, updates, strict=True):
            new[i] = old[i] + update
        return State(tree.unflatten(new), (stacks, kept), statistics), lax.psum(value, AXIS)

    state = jax.eval_shape(init)
    split = jax.tree.map(lambda x: along(0) if x.ndim else WHOLE, state.optimizer[0])
    whole = jax.tree.map(lambda _: WHOLE, state)
    layout = whole._replace(optimizer=(split, whole.optimizer[1]))
    return per_replica("expert-owned", workload, mesh, replica, layout, init)


# --- shardstep ------------------------------------------------------------------------------------------------------


def sharded(name: str, weights: str) -> Variant:
    def make(workload: Workload, mesh: Mesh) -> Contender:
        step = shardstep.shard(workload.step, mesh, weights=weights)
        return Contender(
            name,
            lambda: step.lower(jax.eval_shape(workload.init), workload.batch),
            lambda: step.place(workload.init(), workload.batch)[0],
            lambda state: step(state, workload.batch),
        )

    return make


def default_of(workload: Workload, mesh: Mesh) -> str:
    """The variant that a user gets who asks for nothing."""
    plan = shardstep.shard(workload.step, mesh).plan(jax.eval_shape(workload.init), workload.batch)
    return {"replicated": "shardstep", "sharded": "shardstep-sharded"}[plan.weights]


VARIANTS: dict[str, Variant] = {
    "replicated": annotated("replicated", weights=False, moments=False),
    "shard_map": data_parallel,
    "zero1": annotated("zero1", weights=False, moments=True),
    "fsdp": annotated("fsdp", weights=True, moments=True),
    "over-data": over_data,
    "shardstep": sharded("shardstep", "replicated"),
    "expert": expert("expert", rests_sharded=False),
    "shardstep-sharded": sharded("shardstep-sharded", "sharded"),
    "expert-sharded": expert("expert-sharded", rests_sharded=True),
    "expert-layers": layer_by_layer,
    "expert-owned": owned,
}
EXPERTS = {"shardstep": "expert", "shardstep-sharded": "expert-sharded"}  # each is held against its twin


def variants_for(workload: Workload) -> list[str]:
    """All that there are for this workload and its optimizer; of those that repeat a matrix optimizer's work, one of a
    kind."""
    written = OPTIMIZERS[workload.optimizer].on_shards is not None
    of_matrices = workload.optimizer in MATRIX_OPTIMIZERS
    there = {
        **dict.fromkeys(("shard_map", "over-data"), not of_matrices),
        **dict.fromkeys(EXPERTS.values(), written),
        "expert-layers": written and workload.layered is not None,
        "expert-owned": of_matrices,
    }
    return [name for name in VARIANTS if there.get(name, True)]
