"""One replica of many on one GPU: its workloads and programs, at tiny sizes, without a GPU and without running them."""

from __future__ import annotations

import gpu_replica
import jax
import pytest


def test_every_group_names_a_workload():
    groups = [group for part in gpu_replica.PARTS.values() for group in part]
    assert len(groups) == len(set(groups)) and {name for name, _, _ in groups} == set(gpu_replica.WORKLOADS)


@pytest.mark.parametrize("name", gpu_replica.WORKLOADS)
def test_a_step_hands_its_state_back_as_it_came(name, mesh):
    workload = gpu_replica.WORKLOADS[name](mesh.size, "adamw", True)
    state = (workload.params, workload.moments)
    after, loss = jax.eval_shape(workload.step, state, workload.batch)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert loss.shape == ()


@pytest.mark.parametrize("name", ["accumulating", "mixture"])
@pytest.mark.parametrize("variant", ["zero1", "over-data", "shardstep-sharded", "shardstep-fits"])
def test_the_programs_can_be_built_for_batches_of_several_arrays(name, variant, mesh):
    workload = gpu_replica.WORKLOADS[name](mesh.size, "adamw", True)
    step, shardings, batch = gpu_replica.VARIANTS[variant](workload, mesh)
    state = gpu_replica.shaped((workload.params, workload.moments), shardings)
    lowered = step.lower(state, gpu_replica.shaped(workload.batch, batch))
    assert "sdy." in lowered.as_text() or "mhlo.sharding" in lowered.as_text()


def test_one_round_is_a_median_too():
    class Run:
        def seconds(self, steps):
            return 0.002

    measured: dict = {"replicated": {}}
    gpu_replica.take_turns({"replicated": Run()}, 1, 1, measured)
    assert measured["replicated"]["step_ms"] == 2.0
