"""What a compiled program sends: every collective in the text of an optimized HLO module.

    for c in collectives(compiled.as_text()):
        print(c.kind, c.dtype, c.bytes, c.wire_bytes, c.in_loop)

Reads what the CPU, GPU and TPU backends print: synchronous and `-start` forms, fused (tuple-shaped) collectives,
tiled layouts, all notations of replica groups, and the TPU's `all-reduce-scatter` fusions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Collective:
    """One collective of the program. A fused one, over several arrays, is one record."""

    kind: str
    dtype: str  # of its largest array
    bytes: int  # all of the data taken together: what is reduced, before scattering or after gathering
    group: int  # how many replicas take part
    in_loop: bool  # inside the body of a while loop: it runs once per iteration
    arrays: int  # how many arrays travel in it
    name: str
    times: int = 1  # how often one step runs it, where the compiler knows how often its loops turn
    overlapped: bool = False  # other work is scheduled between its start and its end

    @property
    def wire_bytes(self) -> float:
        """The bytes each replica sends each time, under the bandwidth-optimal (ring) algorithm."""
        away = (self.group - 1) / self.group
        return {"all-reduce": 2 * away, "collective-permute": 1.0}.get(self.kind, away) * self.bytes


def collectives(text: str) -> list[Collective]:
    """Every collective in `compiled.as_text()`, in the order of the text."""
    computations = dict(_computations(text))
    loops = _reachable(computations, _bodies(text))
    times = _times(computations)
    everyone = _header_int(text, "replica_count") * _header_int(text, "num_partitions")
    lines = [(computation, line) for computation, body in computations.items() for line in body]
    # The TPU hides a gather behind other work in pieces (start, steps, done), and all print it: one chain, one gather.
    chains = {m[1]: line for _, line in lines if (m := _CHAIN.search(line))}
    once = set(chains.values())
    beside_work = _beside_work(computations)
    found = []
    for computation, line in lines:
        collective = _collective(line, computation, everyone, computation in loops)
        if collective is not None and (line in once or not _CHAIN.search(line)):
            overlapped = collective.name in beside_work or computation in beside_work
            found.append(replace(collective, times=times[computation], overlapped=overlapped))
    return found


def instructions(text: str) -> Iterator[tuple[str, int]]:
    """Every instruction of a program, with how often one step runs it."""
    computations = dict(_computations(text))
    times = _times(computations)
    for name, body in computations.items():
        yield from ((line.strip(), times.get(name, 1)) for line in body)


def counts(found: Iterable[Collective]) -> dict[str, int]:
    """How many of each kind."""
    tally: dict[str, int] = {}
    for collective in found:
        tally[collective.kind] = tally.get(collective.kind, 0) + 1
    return tally


def wire_bytes(found: Iterable[Collective]) -> float:
    """Bytes each replica sends in one step. A loop counts as often as it turns; once, if only the data knows that."""
    return sum(collective.times * collective.wire_bytes for collective in found)


def overlap(found: Iterable[Collective]) -> dict[str, tuple[float, float]]:
    """By kind: the bytes each replica sends while it does other work, and all that it sends, in one step.

    Only a scheduled program says so (`is_scheduled=true`): there the order of the text is the order of execution.
    """
    tally: dict[str, tuple[float, float]] = {}
    for c in found:
        hidden, whole = tally.get(c.kind, (0.0, 0.0))
        sent = c.times * c.wire_bytes
        tally[c.kind] = hidden + c.overlapped * sent, whole + sent
    return tally


def inside_loops(text: str) -> str:
    """The part of a module that its loops repeat, as a module: what one iteration of a training loop runs."""
    computations = dict(_computations(text))
    repeated = _reachable(computations, _bodies(text))
    parts = ["\n".join((f"%{name} {{", *computations[name], "}")) for name in computations if name in repeated]
    return "\n\n".join((text.split("\n", 1)[0], *parts)) + "\n"


# --- the module as computations -------------------------------------------------------------------------------------

_CHAIN = re.compile(r'chain_id="(\d+)"')
_NAME = r"%?([\w.\-]+)"
_OPENING = re.compile(rf"^(?:ENTRY\s+)?{_NAME}\s*(?:\(.*\)\s*->.*)?\{{\s*$")
_CALLED = re.compile(rf"\b(?:calls|to_apply|body|condition|true_computation|false_computation)={_NAME}")
_CALLED_SET = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        opening = _OPENING.match(line)
        if opening:
            name, lines = opening[1], []
        elif line.startswith("}") and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _bodies(text: str) -> set[str]:
    return set(re.findall(rf"\bbody={_NAME}", text))


def _called(lines: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for line in lines:
        names.update(_CALLED.findall(line))
        for group in _CALLED_SET.findall(line):
            names.update(part.strip().lstrip("%") for part in group.split(","))
    return names


def _reachable(computations: dict[str, list[str]], roots: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(_called(computations.get(name, ())))
    return seen


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def _times(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: the trips of the loops around it."""
    times: dict[str, int] = {}

    def visit(name: str, runs: int) -> None:
        if times.get(name, 0) >= runs:
            return
        times[name] = runs
        for line in computations.get(name, ()):
            trips = _trips(line, computations) if " while(" in line else 1
            for called in _called([line]):
                visit(called, runs * trips)

    called = set().union(*map(_called, computations.values())) if computations else set()
    for name in computations.keys() - called:
        visit(name, 1)
    return times


_CONDITION = re.compile(rf"\bcondition={_NAME}")
_LESS = re.compile(rf"ROOT .* compare\([^,]*, {_NAME}\), direction=LT")


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop turns: as the compiler says; else (TPU) what its counter is compared with; 1 if that is data."""
    if found := _TRIPS.search(line):
        return int(found[1])
    condition = _CONDITION.search(line)
    test = "\n".join(computations.get(condition[1], ())) if condition else ""
    if not (limit := _LESS.search(test)):
        return 1
    number = re.search(rf"%?{re.escape(limit[1])} = [su]\d+\[\]\S* constant\((\d+)\)", test)
    return int(number[1]) if number else 1


def _header_int(text: str, name: str) -> int:
    header = text.split("\n", 1)[0]
    match = re.search(rf"\b{name}=(\d+)", header)
    return int(match[1]) if match else 1


_START = re.compile(rf"^\s*(?:ROOT\s+)?{_NAME} = .*? [\w\-]+-start\(")
_DONE = re.compile(rf" [\w\-]+-done\((?:.* )?{_NAME}\)")
_WORK = re.compile(r" (?:fusion|custom-call|dot|convolution|while|conditional|call|sort|scatter|reduce)\(")
_NO_WORK = re.compile(r'custom_call_target="(?:AllocateBuffer|Sharding|annotate_device_placement)"')


def _beside_work(computations: dict[str, list[str]]) -> set[str]:
    """What was started and is waited for after other work: names of instructions, and of computations that they run.

    A fusion that is a collective itself (the TPU's `all-reduce-scatter`) is no work.
    """
    sending = {name for name, lines in computations.items() if any(map(_INSTRUCTION.match, lines))}
    found: set[str] = set()
    for lines in computations.values():
        under_way: dict[str, str] = {}
        worked: set[str] = set()  # those under way since which work was done
        for line in lines:
            if started := _START.match(line):
                under_way[started[1]] = line
            elif (done := _DONE.search(line)) and done[1] in under_way:
                if done[1] in worked:
                    found |= {done[1], *_called([under_way[done[1]]])}
                del under_way[done[1]]
            elif _WORK.search(line) and not _NO_WORK.search(line) and not _called([line]) & sending:
                worked |= under_way.keys()
    return found


# --- one instruction ------------------------------------------------------------------------------------------------

_KIND = "|".join(sorted(KINDS, key=len, reverse=True))
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT\s+)?{_NAME} = (?P<type>.*?) (?P<kind>{_KIND})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\]")
_GROUPS_LISTED = re.compile(r"replica_groups=\{\{([\d, ]*)\}")
_GROUPS_COUNTED = re.compile(r"replica_groups=\[(\d+),(\d+)\]")
_GROUPS_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def _collective(line: str, computation: str, everyone: int, in_loop: bool) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    kind, type_ = match["kind"], match["type"]
    # A `-start` returns (operands, results, ...): only the results are counted. That of an all-reduce returns the
    # results alone, but newer GPU compilers write ((operands), results).
    if match["start"] and (kind != "all-reduce" or type_.startswith("((")):
        type_ = _elements(type_)[1]
    group = _group_size(line, everyone)
    arrays = _arrays(type_)
    size = sum(nbytes for _, nbytes in arrays)
    if kind == "reduce-scatter":
        size *= group
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU fusion of all-reduce and slice that moves only a scatter's bytes
    dtype = max(arrays, key=lambda array: array[1])[0] if arrays else "token"
    return Collective(kind, dtype, size, group, in_loop, len(arrays), match[1])


def _elements(type_: str) -> list[str]:
    """The elements of a tuple type; parentheses also occur inside tiled layouts, `f32[8,128]{1,0:T(8,128)}`."""
    inner = type_.strip()
    if not inner.startswith("("):
        return [inner, inner]
    depth, start, parts = 0, 1, []
    for i, char in enumerate(inner):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return parts


def _arrays(type_: str) -> list[tuple[str, int]]:
    return [
        (dtype, math.ceil(math.prod(int(d.strip("<= ")) for d in dims.split(",") if d.strip()) * _bits(dtype) / 8))
        for dtype, dims in _ARRAY.findall(type_)
    ]


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)  # f32, bf16, s8, u4, c64, f8e4m3fn
    return int(digits[0]) if digits else 0


def _group_size(line: str, everyone: int) -> int:
    """From `{{0,1,2,3},{4,5,6,7}}`, from `[2,4]<=[8]`, or from `mesh['a'=2,'b'=4] {'b'}`; no groups: everyone."""
    if counted := _GROUPS_COUNTED.search(line):
        return int(counted[2])
    if listed := _GROUPS_LISTED.search(line):
        return len(listed[1].split(","))
    if named := _GROUPS_OF_MESH.search(line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
        taken = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])  # `'b':(2)2` is a part of axis b, of size 2
        return math.prod(int(part) if part else sizes[axis] for axis, part in taken)
    return everyone
