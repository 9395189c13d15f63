"""Ctrl-C in the middle of a training loop: the caller is left with a state that can be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from launch import ROOT
from steps import mesh_of

import shardstep
from shardstep._src.runtime import interrupts, rewritten

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


FIRST_CALLS = """
import os, random, signal, threading, time
import jax, jax.numpy as jnp, numpy as np, shardstep
jax.config.update("jax_num_cpu_devices", 2)
signal.signal(signal.SIGINT, signal.default_int_handler)
mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))

def program(k):
    def step(state, batch):
        return {"w": jnp.tanh(state["w"] @ state["w"]) * (k + 1) + jnp.mean(batch), "n": state["n"] + 1}
    return shardstep.shard(step, mesh)

data, chance, interrupted, took = jnp.ones((8, 2)), random.Random(0), 0, 0.0
for k in range(12):
    sharded = program(k)
    state = {"w": jnp.eye(128), "n": jnp.asarray(0)}
    (state, _), begun = sharded.place(state, data), time.perf_counter()
    try:
        if k:  # the zeroth says how long it takes
            threading.Timer(chance.uniform(0, took), os.kill, (os.getpid(), signal.SIGINT)).start()
        state = sharded(state, data)
        took = took or time.perf_counter() - begun
        time.sleep(60 if k else 0)
    except KeyboardInterrupt:
        interrupted += 1
    state = state if int(state["n"]) else sharded(state, data)
    assert int(state["n"]) == 1 and bool(jnp.all(jnp.isfinite(state["w"])))
print("interrupted", interrupted)
"""


def test_an_interrupt_at_any_moment_of_a_first_call_leaves_a_state():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", FIRST_CALLS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == "interrupted 11\n", ran.stdout


def small(state, batch):
    return {"w": state["w"] * 0.5 + jnp.mean(batch), "n": state["n"] + 1}


@pytest.fixture
def first_call(pythons_own_handler, monkeypatch):
    """A program's first call, with Ctrl-C before or after its arguments are given away; `finish` is the second part."""

    def call(before):
        run, pressed = rewritten.Rewritten.run, []

        def interrupted(self, *arguments):
            if before and not pressed:
                pressed.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            outputs = run(self, *arguments)
            if not pressed:
                pressed.append(1)
                os.kill(os.getpid(), signal.SIGINT)
            return outputs

        monkeypatch.setattr(rewritten.Rewritten, "run", interrupted)
        step = shardstep.shard(small, mesh_of(2))
        data = jnp.ones((8, 2))
        (state, _) = step.place({"w": jnp.ones((8, 8)), "n": jnp.asarray(0)}, data)
        return step, state, data

    return call


def test_an_interrupt_before_a_first_call_gives_anything_away_is_raised_at_once(first_call):
    step, state, data = first_call(before=True)
    with pytest.raises(KeyboardInterrupt):
        step(state, data)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    after = step(state, data)  # as if nothing had been
    assert int(after["n"]) == 1 and float(after["w"][0, 0]) == 1.5


def test_an_interrupt_after_a_first_call_has_given_its_arguments_away_waits_for_the_results(first_call):
    step, state, data = first_call(before=False)
    old = state
    with pytest.raises(KeyboardInterrupt):
        state = step(state, data)
        time.sleep(5)
    assert old["w"].is_deleted()
    assert int(state["n"]) == 1 and float(state["w"][0, 0]) == 1.5


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
