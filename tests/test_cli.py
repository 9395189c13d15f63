"""The command line, as a user meets it: in a process of its own."""

import os
import subprocess
import sys

import pytest


def run(*args, timeout=300):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(
        [sys.executable, "-m", "shardstep", *args], capture_output=True, text=True, timeout=timeout, env=environment
    )


@pytest.mark.slow
def test_demo_trains_both_ways_and_agrees():
    done = run("demo", "--steps", "3", "--devices", "4")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())  # rich wraps lines to the terminal
    assert "4 simulated replicas" in shown
    assert "optimizer state a replica" in shown
    assert "Same losses" in shown


def test_importing_the_library_leaves_the_devices_alone():
    program = "import shardstep, jax; jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_one_message():
    done = run("demo", "--devices", "0")
    assert done.returncode == 2
    assert "0 is not positive" in done.stderr and "Traceback" not in done.stderr


def test_an_error_is_one_line_unless_a_traceback_is_asked_for(monkeypatch, capsys):
    from shardstep import cli

    def fail(args):
        raise ValueError("no such thing")

    monkeypatch.setattr(cli, "run_demo", fail)
    assert cli.main(["demo"]) == 1
    assert "shardstep: ValueError: no such thing" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no such thing"):
        cli.main(["demo", "--traceback"])
