"""Ctrl-C in the middle of a training loop: the caller is left with a state that can be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from launch import ROOT

from shardstep._src.runtime import interrupts

SCRIPT = """
import os, signal, threading, time
import jax, jax.numpy as jnp, numpy as np, shardstep
jax.config.update("jax_num_cpu_devices", 2)
signal.signal(signal.SIGINT, signal.default_int_handler)

def step(state, batch):
    body = lambda _, w: jnp.tanh(w @ w)
    return {"w": jax.lax.fori_loop(0, 60, body, state["w"]) + jnp.mean(batch), "n": state["n"] + 1}

sharded = shardstep.shard(step, jax.sharding.Mesh(np.asarray(jax.devices()), ("data",)))
state, data = {"w": jnp.eye(128), "n": jnp.asarray(0)}, jnp.ones((8, 2))
state = sharded(state, data)
taken, lost = 0, 0
for k in range(40):
    try:
        threading.Timer(0.001 * (k % 13), os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            state = sharded(state, data)
            taken += 1
    except KeyboardInterrupt:
        lost += any(x.is_deleted() for x in jax.tree.leaves(state))
        if lost:
            break
print("lost", lost, "uncounted", int(state["n"]) - taken - 1 if not lost else "?")
"""


def test_an_interrupt_at_any_moment_leaves_a_state():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith("lost 0"), ran.stdout


@pytest.fixture
def pythons_own_handler():
    """As in a program in the foreground: a shell has those in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_own_handler")
def test_an_interrupt_comes_even_if_no_call_follows():
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            held = 1
        held += 1
        time.sleep(5)
    assert held == 2


def test_a_handler_of_the_users_own_is_called_at_once():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)
