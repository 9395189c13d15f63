"""One of several processes: a per-replica step, weights at rest in parts, groups, an uneven batch; each against `jit`.

python variants.py PORT PROCESSES PROCESS DEVICES
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from equality import own
from jax import lax
from steps import adam_state, adam_step, batch, loss, update

import shardstep


def per_replica(state, batch):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return update(params, moments, lax.pmean(gradients, "data")), lax.pmean(value, "data")


VARIANTS = [
    lambda step: shardstep.shard(per_replica, axis_name="data"),
    lambda step: shardstep.shard(step, weights="sharded"),
    lambda step: shardstep.shard(step, group=2),
]


def main():
    plain = jax.jit(adam_step)
    for variant in VARIANTS:
        step = variant(adam_step)
        ours, theirs = adam_state(), adam_state()
        for i in range(2):
            ours, value = step(ours, step.global_batch(own(batch(i))))
            theirs, expected = plain(theirs, batch(i))
            np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
    uneven = jax.tree.map(lambda x: np.asarray(x)[:13], batch(2))  # the whole batch on every process
    np.testing.assert_allclose(float(step(ours, uneven)[1]), float(plain(theirs, uneven)[1]), rtol=1e-5)


if __name__ == "__main__":
    port, processes, process, devices = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    main()
