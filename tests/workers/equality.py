"""One of several processes: goes on from a checkpoint, feeds batches in every form, saves, and says what it saw.

python equality.py PORT PROCESSES PROCESS DEVICES DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from noisy import noisy_state, noisy_step
from steps import batch

import shardstep


def main(directory):
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    step = shardstep.shard(noisy_step, mesh)
    state, losses = train(step, mesh)
    shardstep.save(directory / "saved", state, step=len(losses))
    plan = step.plan(state, batch(0))
    shardstep.save(directory / "fresh", noisy_state())  # of what every process holds for itself
    fresh = shardstep.restore(directory / "fresh", plan)
    restored = shardstep.restore(directory / "alone", plan)  # one process wrote it
    _, resumed = step(restored, step.global_batch(own(batch(0))))
    moments = state["train"][1][0].mu["w1"]
    seen = {
        "losses": losses,
        "restored": float(resumed),
        "refused": refused(mesh),
        "held": sum(s.data.size for s in moments.addressable_shards) / moments.size,
        "replicas": plan.replicas,
        "fresh": all(map(same, jax.tree.leaves(fresh), jax.tree.leaves(noisy_state()))),
        "checked": shardstep.check(step, noisy_state(), batch(0), steps=2).within(1e-5),
    }
    (directory / f"seen-{jax.process_index()}.json").write_text(json.dumps(seen))


def same(a, b):
    if hasattr(b, "dtype") and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return all(np.array_equal(shard.data, np.asarray(b)[shard.index]) for shard in a.addressable_shards)


def own(tree):
    """This process's part of the examples."""
    n, k = jax.process_count(), jax.process_index()
    return jax.tree.map(lambda x: np.split(np.asarray(x), n)[k], tree)


def train(step, mesh):
    def joined_by_jax(tree):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), own(tree))

    forms = [
        lambda tree: jax.tree.map(np.asarray, tree),  # the whole batch, on every host
        lambda tree: tree,  # the whole batch, on a device of every process
        joined_by_jax,
        lambda tree: step.global_batch(own(tree)),
        own,  # every host its own part
        own,
    ]
    state, losses = noisy_state(), []  # on one device of every process
    for i, form in enumerate(forms):
        state, loss = step(state, form(batch(i)))
        losses.append(float(loss))
    return state, losses


def refused(mesh):
    """What is said when each process gives a state of its own, or parts of different sizes."""
    mine = {**noisy_state(), "steps": jax.process_index()}
    unequal = batch(0, 8 * (1 + jax.process_index()))
    said = []
    for state, examples in [(mine, batch(0)), (noisy_state(), unequal)]:
        try:
            shardstep.shard(noisy_step, mesh)(state, examples)
        except shardstep.ShardstepError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    port, processes, process, devices = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    main(Path(sys.argv[5]))
