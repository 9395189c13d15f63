"""What a save takes of the host's memory: one copy of what its process holds, however many replicas hold it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 4)
import shardstep

def bytes_of(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

directory, wait, spec = sys.argv[1], sys.argv[2] == "wait", PartitionSpec(*filter(None, sys.argv[3:]))
laid = NamedSharding(Mesh(np.asarray(jax.devices()), ("data",)), spec)
shardstep.save(directory + "/first", {"w": jnp.ones(8)})  # what is loaded once
rng = np.random.default_rng(0)
state = {f"w{i}": jax.device_put(rng.standard_normal(2**22, np.float32), laid) for i in range(12)}
jax.block_until_ready(state)
part = sum(x.nbytes for x in state.values())
open("/proc/self/clear_refs", "w").write("5")  # from here on, the peak is this save's
before = bytes_of("VmRSS")
saving = shardstep.save(directory + "/run", state, wait=wait)
saving.wait()
print((bytes_of("VmHWM") - before) / part)
"""


SPLIT, WHOLE = ("data", 1), ("", 2)
FORMS = [
    pytest.param(*SPLIT, "background", id="split over 4-background"),
    pytest.param(*WHOLE, "wait", id="whole on 4 replicas-wait"),
    pytest.param(*SPLIT, "wait", id="split over 4-wait", marks=pytest.mark.thorough),
    pytest.param(*WHOLE, "background", id="whole on 4 replicas-background", marks=pytest.mark.thorough),
]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(("spec", "copies", "wait"), FORMS)
def test_the_peak_is_one_copy(tmp_path, wait, spec, copies):
    """192 MiB of logical arrays: 768 MiB on the replicas that hold them whole.

    Of what several hold, each first cuts the part that it writes, on its device. Here that is the host's memory, too.
    """
    command = [sys.executable, "-c", MEASURED, tmp_path, wait, spec]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0.01 < float(done.stdout.split()[-1]) < copies + 0.1
