"""Ctrl-C in the middle of a training loop: the caller is left with a state that can be used."""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from steps import mesh_of

import shardstep
from shardstep._src.runtime import interrupts


def step(state, batch):
    def body(_, w):
        return jnp.tanh(w @ w)

    return {"w": jax.lax.fori_loop(0, 60, body, state["w"]) + jnp.mean(batch), "n": state["n"] + 1}


def test_an_interrupt_at_any_moment_leaves_a_state():
    sharded = shardstep.shard(step, mesh_of(2))
    state, data = {"w": jnp.eye(128), "n": jnp.asarray(0)}, jnp.ones((8, 2))
    state = sharded(state, data)
    taken, survived = 0, 0
    for k in range(40):
        sender = threading.Timer(0.001 * (k % 13), os.kill, (os.getpid(), signal.SIGINT))
        try:
            sender.start()
            until = time.monotonic() + 5
            while time.monotonic() < until:
                state = sharded(state, data)
                taken += 1
        except KeyboardInterrupt:
            survived += not any(x.is_deleted() for x in jax.tree.leaves(state))
    assert survived == 40, f"{40 - survived} of 40 interrupts lost the state"
    assert int(state["n"]) == taken + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
