"""What a report says, whatever it is shown on: leaves in groups, collectives in order, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.schedule import Collective, Fallback
    from ...planning.plan import Leaf, Plan

ROLES = ("weight", "auxiliary", "frozen", "input", "batch")


@dataclass(frozen=True)
class Group:
    """Leaves that differ only in the numbers in their paths: the same leaf of every layer."""

    path: str
    leaves: tuple[Leaf, ...]

    @property
    def first(self) -> Leaf:
        return self.leaves[0]

    @property
    def bytes_before(self) -> int:
        return sum(leaf.bytes_before for leaf in self.leaves)

    @property
    def bytes_after(self) -> int:
        return sum(leaf.bytes_after for leaf in self.leaves)


def groups(leaves: Sequence[Leaf]) -> list[Group]:
    """Grouped, in the order of their first leaves."""
    found: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        path = re.sub(r"\d+", "*", leaf.path)
        found.setdefault((path, leaf.shape, leaf.dtype, leaf.role, leaf.layout, leaf.reason), []).append(leaf)
    return [
        Group(members[0].path if len(members) == 1 else re.sub(r"\d+", "*", members[0].path), tuple(members))
        for members in found.values()
    ]


@dataclass(frozen=True)
class Run:
    """Collectives of one kind that one line of the program asks for, one after the other."""

    first: Collective
    count: int
    bytes: float  # sent per replica and step


def runs(collectives: Sequence[Collective]) -> list[Run]:
    found = []
    for _, same in groupby(collectives, lambda c: (c.kind, c.dtype, c.axis, c.purpose, c.line, c.loop, c.times)):
        members = list(same)
        found.append(Run(members[0], len(members), sum(c.total for c in members)))
    return found


def short_line(line: str) -> str:
    """`train.py:31 (loss)` of `path/to/train.py:31:4 (loss.<locals>.f)`."""
    place = re.match(r"(?:.*[/\\])?([^/\\:]+):(\d+)(?::\d+)?(?: \((.*)\))?$", line)
    if not place:
        return line
    function = f" ({place[3].replace('.<locals>', '')})" if place[3] else ""
    return f"{place[1]}:{place[2]}{function}"


def advice(fallback: Fallback) -> str:
    """What a user can do about an equation that was not sharded."""
    if "no rule" in fallback.why:
        return f"teach it a rule: shardstep.register_rule({fallback.primitive}_p, rule)"
    return "it mixes elements across the split; if much is gathered, let it work along another dimension"


LEFT_TO_XLA = "XLA partitions this step and chooses its collectives: step.lower(...).compile().as_text() shows them"


def left_to_xla(plan: Plan) -> str:
    """Why the step is not rewritten; empty where it is."""
    return f"the step is left to XLA: {plan.why_engine}" if plan.engine == "annotate" else ""
