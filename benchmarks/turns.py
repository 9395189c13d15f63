"""Groups of processes that take turns: one group trains while the others wait on a pipe and cost nothing.

A process of a group reads one line of JSON for each command and answers with one. `serve` is the process's half;
`Group` is the driver's. Standard library only: both halves run in whichever environment they are started from.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# --- the process's half ---------------------------------------------------------------------------------------------


class Session(Protocol):
    """What a worker trains. A step returns when its work is done, not when it is dispatched."""

    parts: dict[str, float]  # seconds of the last step, by part, where they are cheap to tell

    def step(self) -> float: ...

    def facts(self) -> dict[str, Any]: ...


def serve(create: Callable[[], Session]) -> None:
    """Create the session, then do as told until there is nothing more to read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs into the log

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        session = create()
        answer({})
        for line in sys.stdin:
            command = json.loads(line)
            answer(session.facts() if command["do"] == "facts" else _train(session, command["steps"]))
            if command["do"] == "facts":
                _forget_peak()
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # the other processes of the group may be waiting inside a collective: no orderly end


def _train(session: Session, steps: int) -> dict[str, Any]:
    stamps, losses, parts = [time.perf_counter()], [], []
    for _ in range(steps):
        losses.append(session.step())
        stamps.append(time.perf_counter())
        parts.append(dict(session.parts))
    return {"stamps": stamps, "losses": losses, "parts": parts, "peak_rss_bytes": _peak()}


def _forget_peak() -> None:
    """Count the peak of resident memory from here on: training, not starting and compiling."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def pin(core: int | None) -> None:
    """Keep this process on one core. Call it before a library counts the cores."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


# --- what the kernel counts -----------------------------------------------------------------------------------------

_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
_alone = False


def be_alone_on_loopback() -> bool:
    """Move this process into a network of its own, where nothing but loopback exists; its children are there too.

    Then what the kernel counts on loopback is theirs alone. Only root may; False where that is refused.
    """
    global _alone
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_NEW_NETWORK | _NEW_NAMES):
        return False
    socket.sethostname("localhost")  # gloo meets where the host's name leads
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        up = struct.pack("16sh", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(s, _SIOCSIFFLAGS, up)
    _alone = True
    return True


_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def sent_on_loopback() -> int | None:
    """Bytes since the network began, headers and acknowledgements included; None if others send there too."""
    if not _alone:
        return None
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


# --- the driver's half ----------------------------------------------------------------------------------------------


class GroupError(RuntimeError):
    """A process of the group failed; the message is its own."""


@dataclass(frozen=True)
class Turn:
    """What a group did in one turn."""

    seconds: list[float]  # of each step
    losses: list[float]  # the mean over the processes: the loss of the global batch
    parts: list[dict[str, float]]  # of the slowest process
    peak_rss_bytes: int | None  # of the largest process
    loopback_bytes: int | None = None  # what all processes sent, by the kernel's count


class Group:
    """Processes that run one program together."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as errors:
            self._processes = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
                )
                for command in commands
            ]
        try:
            self._answers()
        except GroupError:
            self.end()
            raise

    def train(self, steps: int) -> Turn:
        before = sent_on_loopback()
        answers = self._ask({"do": "train", "steps": steps})
        after = sent_on_loopback()
        sent = None if before is None or after is None else after - before
        # A step is done when the last process is done with it. The clock is the machine's, the same for all processes.
        ends = [max(stamps) for stamps in zip(*(a["stamps"] for a in answers), strict=True)]
        losses = [sum(values) / len(values) for values in zip(*(a["losses"] for a in answers), strict=True)]
        slowest = max(answers, key=lambda a: a["stamps"][-1])
        peaks = [a["peak_rss_bytes"] for a in answers if a["peak_rss_bytes"]]
        seconds = [after - before for before, after in itertools.pairwise(ends)]
        return Turn(seconds, losses, slowest["parts"], max(peaks, default=None), sent)

    def facts(self) -> dict[str, Any]:
        """What the first process says of itself. From here on every process counts its peak of memory anew."""
        return self._ask({"do": "facts"})[0]

    def end(self) -> None:
        for process in self._processes:
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        until = time.monotonic() + 20
        for process in self._processes:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except OSError as error:
                raise GroupError(f"a process ended by itself; see {self.log}") from error
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        answers = [json.loads(line) if line else {"error": f"ended by itself; see {self.log}"} for line in lines]
        for answer in answers:
            if "error" in answer:
                raise GroupError(answer["error"])
        return answers


@contextlib.contextmanager
def groups() -> Iterator[dict[str, Group]]:
    """An empty dictionary; the groups that are put into it end with the block."""
    alive: dict[str, Group] = {}
    try:
        yield alive
    finally:
        for group in alive.values():
            group.end()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
