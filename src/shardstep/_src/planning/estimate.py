"""What a schedule will take of a machine: seconds, and memory. Choices between whole plans are made by this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.layout import Axis
from ..core.schedule import Schedule
from ..machine.topology import Topology
from .buffers import Buffers
from .costs import Seconds, wire_time, work_time
from .memory import Memory, memory_of


@dataclass(frozen=True)
class Estimate:
    """Per replica and step."""

    seconds: Seconds
    memory: Memory


def estimate(
    schedule: Schedule,
    donated: Mapping[int, int],
    axes: tuple[Axis, ...],
    topology: Topology,
    hosted: Mapping[int, int] | None = None,
) -> Estimate:
    """Of a schedule, with the outputs that may be written over the inputs they replace. `axes`: of the topology;
    `hosted`: the inputs that rest in host memory, with the outputs that replace them.
    """
    buffers = Buffers.of(schedule, hosted=hosted)
    wire = wire_time(schedule.collectives, axes, topology)
    streamed = sum(buffers.inputs[i].nbytes for i in buffers.hosted)
    seconds = Seconds(wire, *work_time(buffers, topology.chip), 2 * streamed / topology.chip.host)
    return Estimate(seconds, memory_of(buffers, donated))
