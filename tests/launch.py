"""Real processes on this machine, as a cluster would start them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "distributed.py"
WORKERS = ROOT / "tests" / "workers"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Processes:
    """Some processes that run one script, each with its own output file."""

    def __init__(self, commands, environments, directory):
        self.outputs = [directory / f"process-{i}.txt" for i in range(len(commands))]
        self.running = []
        for command, environment, output in zip(commands, environments, self.outputs, strict=True):
            with open(output, "w") as f:
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, "-u", *map(str, command)],
                        env=_environment() | environment,
                        stdout=f,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, i=0):
        return self.outputs[i].read_text(errors="replace")

    def wait(self, timeout=180):
        """The exit codes."""
        until = time.monotonic() + timeout
        return [p.wait(max(until - time.monotonic(), 0.1)) for p in self.running]

    def succeed(self, timeout=180):
        codes = self.wait(timeout)
        assert not any(codes), "\n".join(f"== {c}\n{self.output(i)[-3000:]}" for i, c in enumerate(codes))

    def until(self, text, i=0, timeout=120):
        """Wait for a process to print something."""
        end = time.monotonic() + timeout
        while text not in self.output(i):
            assert time.monotonic() < end and self.running[i].poll() is None, self.output(i)[-3000:]
            time.sleep(0.02)

    def kill(self, i):
        self.running[i].send_signal(signal.SIGKILL)
        self.running[i].wait()


@contextlib.contextmanager
def started(commands, directory, environments=None):
    directory.mkdir(parents=True, exist_ok=True)
    processes = Processes(commands, environments or [{}] * len(commands), directory)
    try:
        yield processes
    finally:
        for p in processes.running:
            if p.poll() is None:
                p.kill()
                p.wait()


def _environment():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_"))}
    paths = [ROOT / "src", ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}


def by_hand(count):
    """Arguments of the example: who the coordinator is, and which process this is."""
    port = free_port()
    return [["--coordinator", f"127.0.0.1:{port}", "--processes", count, "--process", i] for i in range(count)]


def slurm(count):
    """What SLURM tells each of its tasks, on one node."""
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(count),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    return [common | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(count)]


def open_mpi(count):
    """What Open MPI's mpirun tells each of its ranks."""
    common = {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    return [common | {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_LOCAL_RANK": str(i)} for i in range(count)]
