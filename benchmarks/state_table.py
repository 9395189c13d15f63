"""How the state of a GPT-2-small-like model rests on 7, 8, 12 and 256 replicas, as the tables of docs/state.md.

    python benchmarks/state_table.py            # prints Markdown

The bytes on 7, 8 and 12 replicas are those of arrays: the state of the model with one layer (its other layers repeat
the same shapes) is created with `plan.init`, and what a replica's device holds is counted. 256 replicas are planned.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import shardstep
from shardstep._src.planning.formatting import size
from shardstep._src.planning.plan import Leaf, Plan
from shardstep._src.tools.demo import model

CREATED, PLANNED = (7, 8, 12), (256,)
ADAM = optax.adamw(1e-3)


def gpt2(layers: int) -> model.Config:
    return model.Config(vocabulary=50257, context=1024, width=768, heads=12, layers=layers)


class State(NamedTuple):
    params: Any
    moments: Any


def create(config: model.Config) -> State:
    params = model.init(jax.random.key(0), config)
    return State(params, ADAM.init(params))


def training(config: model.Config) -> Callable[..., tuple[State, jax.Array]]:
    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(model.loss)(state.params, batch, config)
        updates, moments = ADAM.update(grads, state.moments, state.params)
        return State(optax.apply_updates(state.params, updates), moments), loss

    return step


def plan_for(replicas: int, layers: int) -> Plan:
    config = gpt2(layers)
    tokens = jax.ShapeDtypeStruct((replicas, config.context), jnp.int32)
    mesh = Mesh(np.asarray(jax.devices()[:replicas]), ("data",))
    step = shardstep.shard(training(config), mesh, weights="replicated")
    return step.plan(jax.eval_shape(lambda: create(config)), {"input": tokens, "target": tokens})


def held_bytes(plan: Plan) -> dict[str, int]:
    """What the device of replica 0 holds of each leaf, when the state has been created."""
    state = plan.init(create, gpt2(1))
    paths = [leaf.path for leaf in plan.leaves if leaf.role in ("weight", "auxiliary", "frozen")]
    arrays = jax.tree.leaves(state)
    return {path: x.addressable_shards[0].data.nbytes for path, x in zip(paths, arrays, strict=True)}


def kinds(plan: Plan) -> dict[str, Leaf]:
    """One leaf of the optimizer's state for each shape."""
    return {str(list(leaf.shape)): leaf for leaf in plan.leaves if ".mu" in leaf.path}


def padding(leaf: Leaf) -> str:
    grown = [(held, own) for held, own in zip(leaf.held, leaf.shape, strict=True) if held != own]
    return f"{grown[0][1]} → {grown[0][0]}" if grown else "none"


def main() -> None:
    jax.config.update("jax_num_cpu_devices", max(CREATED + PLANNED))
    print("| replicas | shape | layout | padding | bytes per replica, before → after |\n|---|---|---|---|---|")
    for replicas in (*CREATED, *PLANNED):
        plan = plan_for(replicas, layers=1)
        held = held_bytes(plan) if replicas in CREATED else {}
        for shape, leaf in kinds(plan).items():
            after = held.get(leaf.path, leaf.bytes_after)
            assert after == leaf.bytes_after, f"{leaf.path}: planned {leaf.bytes_after} bytes, holds {after}"
            layout = leaf.layout.split(",")[0].rstrip(")") + (")" if "(" in leaf.layout else "")
            print(f"| {replicas} | {shape} | {layout} | {padding(leaf)} | {size(leaf.bytes_before)} → {size(after)} |")
    print("\n| replicas | state per replica, before → after | optimizer's bytes sharded | padding of all state |")
    print("|---|---|---|---|")
    for replicas in (*CREATED, *PLANNED):
        plan = plan_for(replicas, layers=12)
        before, after = plan.state_bytes.replicated, plan.state_bytes.sharded
        total = collections.Counter()
        for leaf in plan.leaves:
            if leaf.role == "auxiliary":
                total["own"] += int(np.prod(leaf.shape))
                total["held"] += int(np.prod(leaf.held))
        waste = total["held"] / total["own"] - 1
        print(f"| {replicas} | {size(before)} → {size(after)} | {plan.auxiliary_share:.2%} | {waste:.3%} |")


if __name__ == "__main__":
    main()
