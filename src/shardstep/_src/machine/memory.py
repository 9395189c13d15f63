"""How many bytes a device may use."""

from __future__ import annotations

import math
from typing import Any

from . import topology
from .replicas import Replicas

_GIB = 2**30


def memory_limit(replicas: Replicas, asked: int | None, machine: str | None) -> int | None:
    """What was asked for; else what the named machine has, or what the devices say they have. None: no limit.

    Where the user's own mesh axes cut a replica into several devices, how much each holds is not known here: there is a
    limit only if one was asked for.
    """
    if asked is not None:
        return int(asked)
    if replicas.user_axes:
        return None
    capacity = replicas.topology.chip.capacity
    if machine is not None:
        capacity = topology.describe(machine).chip.capacity
    elif replicas.topology.platform != "cpu":
        capacity = _stated(list(replicas.mesh.devices.flat)) or capacity
    return int(capacity) if math.isfinite(capacity) else None


def _stated(devices: list[Any]) -> float:
    """What the devices of this process may allocate; 0 where none is here or none says.

    Processes must come to the same plan, and a few megabytes more or less are a matter of what runs beside: whole GiB.
    """
    found = []
    for device in devices:
        try:
            stats = device.memory_stats()
        except (
            AttributeError,
            RuntimeError,
            NotImplementedError,
        ):  # a device that is only described, or of another process
            continue
        if stats and stats.get("bytes_limit"):
            found.append(int(stats["bytes_limit"]))
    return min(found) // _GIB * _GIB if found else 0.0
