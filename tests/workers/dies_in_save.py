"""The example, but one process is killed in the middle of its second save.

    python dies_in_save.py VICTIM WHERE [arguments of the example]

WHERE is `writing` (its part of the arrays) or `sealing` (all parts are written, the checkpoint has no name yet).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import jax
import orbax.checkpoint as ocp
from launch import EXAMPLE

from shardstep._src.checkpoint import manifest

victim, where = int(sys.argv[1]), sys.argv[2]
owner, name = {"writing": (ocp.CompositeCheckpointHandler, "async_save"), "sealing": (manifest, "write")}[where]
original = getattr(owner, name)
calls = 0


def deadly(*args, **kwargs):
    global calls
    calls += 1
    if calls == 2 and jax.process_index() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)


setattr(owner, name, deadly)
sys.argv = [str(EXAMPLE), *sys.argv[3:]]
runpy.run_path(str(EXAMPLE), run_name="__main__")
