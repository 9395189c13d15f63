"""What the planner hands to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .layout import Layout
from .program import Atom
from .schedule import Schedule
from .user_shardings import Kept

HOST = "pinned_host"  # JAX's name for the host's memory, of which a device can read and write
AHEAD = 4  # leaves from host memory that are on a device at once: Adam's two of one weight, and of the next


@dataclass(frozen=True, eq=False)
class Execution:
    """How a captured step runs: everything that the runtime needs to know of the plan."""

    engine: str  # "rewrite" or "annotate"
    schedule: Schedule
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    kept: Mapping[Atom, Kept]  # of the values that are laid out as some state is, along the user's own axes
    hosted: Mapping[int, int] = field(default_factory=dict)  # inputs in host memory -> the outputs that replace them
