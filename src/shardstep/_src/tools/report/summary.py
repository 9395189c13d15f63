"""What a report says, whatever it is shown on: leaves in groups, collectives in order, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ...planning.formatting import array
from ...planning.paths import dotted, shortened

if TYPE_CHECKING:
    from ...core.schedule import Collective, Fallback
    from ...planning.plan import Leaf, Plan

ROLES = ("weight", "auxiliary", "frozen", "input", "batch")


@dataclass(frozen=True)
class Group:
    """Leaves whose paths differ in numbers only (`layers[3]`, `Dense_3`): the same leaf of every layer."""

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


def names(plan: Plan) -> dict[str, str]:
    """A short name for the path of each leaf."""
    weights = [leaf.path for leaf in plan.leaves if leaf.role in ("weight", "frozen")]
    return shortened(weights, [leaf.path for leaf in plan.leaves if leaf.role not in ("weight", "frozen")])


def groups(leaves: Sequence[Leaf], short: Mapping[str, str] | None = None) -> list[Group]:
    """Grouped, in the order of their first leaves; by their short names where those are given."""
    found: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        key = starred((short or {}).get(leaf.path, leaf.path))
        found.setdefault((key, leaf.shape, leaf.dtype, leaf.role, leaf.layout, leaf.reason), []).append(leaf)
    named = [(short or {}).get(members[0].path, members[0].path) for members in found.values()]
    return [
        Group(name if len(members) == 1 else starred(name), tuple(members))
        for name, members in zip(named, found.values(), strict=True)
    ]


@dataclass(frozen=True)
class Family:
    """A weight, in every layer that has one, with the optimizer's state for it; or other state by itself."""

    path: str
    count: int  # layers
    array: str
    layout: str  # how the weight rests, and how its state does where that differs
    before: int  # bytes per device
    after: int


def families(plan: Plan) -> list[Family]:
    """The state by module, the largest first."""
    short = names(plan)
    owners = {tuple(short[x.path].split(".")): x.path for x in plan.leaves if x.role in ("weight", "frozen")}
    found: dict[object, list[Leaf]] = {}
    for leaf in plan.leaves:
        if leaf.role not in ("batch", "input"):
            owner = _owner(leaf, owners, short)
            found.setdefault((starred(short[owner]), leaf.shape), []).append(leaf)
    made = [_family(members, owners, short) for members in found.values()]
    return sorted(made, key=lambda family: -family.before)


def _owner(leaf: Leaf, owners: Mapping[tuple[str, ...], str], short: Mapping[str, str]) -> str:
    """The weight whose name a leaf's path ends with."""
    if leaf.role in ("weight", "frozen"):
        return leaf.path
    parts = tuple(dotted(leaf.path).split("."))
    return next((owners[parts[i:]] for i in range(len(parts)) if parts[i:] in owners), leaf.path)


def _family(members: Sequence[Leaf], owners: Mapping[tuple[str, ...], str], short: Mapping[str, str]) -> Family:
    weights = [leaf for leaf in members if leaf.role in ("weight", "frozen")]
    optimizer = [leaf for leaf in members if leaf.role not in ("weight", "frozen")]
    paths = list(dict.fromkeys(short[_owner(leaf, owners, short)] for leaf in members))
    return Family(
        paths[0] if len(paths) == 1 else starred(paths[0]),
        len(paths),
        short_array(members[0]),
        " + ".join(dict.fromkeys(filter(None, (_layouts(weights), _layouts(optimizer))))),
        sum(leaf.bytes_before for leaf in members),
        sum(leaf.bytes_after for leaf in members),
    )


def _layouts(leaves: Sequence[Leaf]) -> str:
    found = list(dict.fromkeys(leaf.layout for leaf in leaves))
    return short_layout(found[0]) if len(found) == 1 else " / ".join(map(short_layout, found))


def short_layout(layout: str) -> str:
    """`split(1,2)` for a value that is split along one dimension by one mesh axis and along another by the next."""
    whole = set(layout.split(" x ")) == {"replicated"}
    if whole:
        return "replicated"
    parts = re.findall(r"split\((\d+)\)", layout)
    plain = " x ".join(f"split({part})" for part in parts)
    return f"split({','.join(parts)})" if len(parts) > 1 and plain == layout else layout


def short_array(leaf: Leaf) -> str:
    """`f32[768,3072]`, as JAX prints types."""
    return re.sub(r"^(?:b?float|u?int|complex)", lambda m: _DTYPES[m[0]], array(leaf.dtype, leaf.shape))


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def starred(path: str) -> str:
    """The path with a star for each number that stands alone: the same leaf of every layer."""
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", "*", path)


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


@dataclass(frozen=True)
class Cargo:
    """Collectives that carry the same thing: `gradient of layers.*.wq x 12`."""

    what: str
    how: str
    bytes: float  # sent per replica and step
    count: int  # collectives
    line: str


def cargoes(plan: Plan) -> list[Cargo]:
    """What is sent, named after what it is, in the order in which it is first sent."""
    short = names(plan)
    found: dict[object, list[Collective]] = {}
    for c in plan.collectives:
        things = tuple(dict.fromkeys((kind, starred(short.get(path, path))) for kind, path in c.carries))
        found.setdefault((things, c.kind, c.dtype, c.loop, c.times), []).append(c)
    return [_cargo(members, short) for members in found.values()]


def _cargo(members: Sequence[Collective], short: Mapping[str, str]) -> Cargo:
    first = members[0]
    things = list(dict.fromkeys(thing for c in members for thing in c.carries))
    patterns = list(dict.fromkeys((kind, starred(short.get(path, path))) for kind, path in things))
    kind, path = patterns[0] if patterns else ("", "")
    if len(things) == 1:
        path = short.get(things[0][1], things[0][1])
    what = f"{kind} {path}".strip() or f"value for {first.purpose}"
    if len(patterns) > 1:
        what += f" and {len(things) - 1} more"
    elif len(things) > 1:
        what += f" x {len(things)}"
    dtype = re.sub(r"^(?:b?float|u?int|complex)", lambda m: _DTYPES[m[0]], first.dtype)
    how = f"{first.kind} {dtype}" + (f" x {first.times}" if first.times > 1 else "")
    return Cargo(what, how, sum(c.total for c in members), len(members), first.line)


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
