"""What a report says, whatever it is shown on: leaves in groups, collectives in order, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from ...planning.formatting import array
from ...planning.paths import common, dotted, shortened, starred, within

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
    named = [[(short or {}).get(leaf.path, leaf.path) for leaf in members] for members in found.values()]
    return [Group(common(name), tuple(members)) for name, members in zip(named, found.values(), strict=True)]


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
    weights = {leaf.path: leaf for leaf in plan.leaves if leaf.role in ("weight", "frozen")}
    places = {place: weights[path] for path, place in within(list(weights)).items()}
    found: dict[object, list[tuple[Leaf, str]]] = {}
    for leaf in plan.leaves:
        if leaf.role not in ("batch", "input"):
            owner = short[_owner(leaf, places)]
            found.setdefault((starred(owner), leaf.shape), []).append((leaf, owner))
    made = [_family([leaf for leaf, _ in members], [owner for _, owner in members]) for members in found.values()]
    return sorted(made, key=lambda family: -family.before)


def _owner(leaf: Leaf, places: Mapping[tuple[str, ...], Leaf]) -> str:
    """The weight that a leaf belongs to: its path ends as the leaf's does, or there is no other."""
    if leaf.role in ("weight", "frozen"):
        return leaf.path
    parts = tuple(dotted(leaf.path).split("."))
    for i in range(len(parts)):
        owner = places.get(parts[i:])
        if owner and (owner.shape == leaf.shape or not "".join(parts[i:]).isdigit()):
            return owner.path
    only = next(iter(places.values())) if len(places) == 1 else None
    return only.path if only and only.shape == leaf.shape else leaf.path


def _family(members: Sequence[Leaf], owners: Sequence[str]) -> Family:
    weights = [leaf for leaf in members if leaf.role in ("weight", "frozen")]
    optimizer = [leaf for leaf in members if leaf.role not in ("weight", "frozen")]
    paths = list(dict.fromkeys(owners))
    return Family(
        common(paths),
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
    if set(layout.split(" x ")) == {"replicated"}:
        return "replicated"
    layout = re.sub(r"split\((\d+), padded to \d+\)", r"split(\1) padded", layout)
    parts = re.findall(r"split\((\d+)\)", layout)
    plain = " x ".join(f"split({part})" for part in parts)
    return f"split({','.join(parts)})" if len(parts) > 1 and plain == layout else layout


def short_array(leaf: Leaf) -> str:
    """`f32[768,3072]`, as JAX prints types."""
    return re.sub(r"^(?:b?float|u?int|complex)", lambda m: _DTYPES[m[0]], array(leaf.dtype, leaf.shape))


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


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
    alike: dict[tuple[str, str], list[str]] = {}
    for kind, path in dict.fromkeys(thing for c in members for thing in c.carries):
        name = short.get(path, path)
        alike.setdefault((kind, starred(name)), []).append(name)
    (kind, _), paths = max(alike.items(), key=lambda found: len(found[1]), default=(("", ""), [""]))
    others = sum(map(len, alike.values())) - len(paths) if alike else 0
    what = f"{kind} {common(paths)}".strip() or f"value for {first.purpose}"
    what += f" x {len(paths)}" if len(paths) > 1 else ""
    what += f" and {others} more" if others else ""
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
