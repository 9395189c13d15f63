"""The plan: how each leaf is laid out at rest, what the step communicates, what could not be sharded, and why."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..core.errors import ShardstepError
from ..core.schedule import Collective, Fallback
from .programs import VIEWS, Programs, Total
from .timeline import Line, Segment


@dataclass(frozen=True)
class Leaf:
    """One input leaf of the step, and its layout at rest."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str  # weight, auxiliary, frozen, batch, input
    layout: str
    spec: PartitionSpec
    held: tuple[int, ...]  # the shape of the array that holds it: larger than `shape` where that is padded
    bytes_before: int  # per replica
    bytes_after: int
    reason: str
    memory: str = "device"  # or "pinned_host": optimizer state that rests in the memory of the host

    def sharding(self, mesh: Any) -> NamedSharding:
        """How the array that holds it is distributed over devices."""
        return NamedSharding(mesh, self.spec, memory_kind=None if self.memory == "device" else self.memory)


@dataclass(frozen=True)
class Argument:
    """One argument of a planned step, taken apart."""

    tree: Any
    leaves: tuple[Leaf | None, ...]  # None where something static stands
    values: tuple[Any, ...]  # shardings, and what is static
    paths: tuple[Any, ...]  # where each leaf stands in it

    @property
    def name(self) -> str:
        return next(re.split(r"[.\[]", leaf.path)[0] for leaf in self.leaves if leaf)


@dataclass(frozen=True)
class Owned:
    """Equal work on several matrices (Muon, Shampoo, ...): who does it.

    `count` matrices of one shape are treated alike by the code at `line`. Each replica has at least and at most `held`
    of them; several shapes are balanced, so that who has fewer of one has more of another. If every replica takes part
    in all of it, both are `count`: each repeats it, or products are split inside and only factorizations are repeated.
    `why` has the seconds of these ways.
    """

    shape: tuple[int, ...]  # of the largest matrix that enters; of the piece that `line` is in
    dtype: str
    count: int
    held: tuple[int, int]  # per replica, at least and at most
    flops_before: float  # per replica and step
    flops_after: float  # of a replica that has most of these
    line: str
    why: str = ""

    @property
    def repeated(self) -> bool:
        """Does every replica do all of it?"""
        return self.held == (self.count, self.count) and self.flops_after == self.flops_before

    @property
    def who(self) -> str:
        """`2 per replica`, `1 or 2 per replica`, `1 on each of 12 replicas`."""
        least, most = self.held
        if self.repeated:
            return "repeated by every replica"
        if least == self.count:
            mostly = 2 * self.flops_after > self.flops_before
            return "products split inside, the rest repeated" if mostly else "split inside, over all replicas"
        if least == most:
            return f"{most} per replica"
        return f"{least} or {most} per replica" if least else f"{most} on each of {self.count // most} replicas"


@dataclass(frozen=True)
class Plan:
    """What shardstep will do with a step. `str(plan)` is a table; `to_json()` holds all of it.

    Predictions, per device and step, for the replicated program and for this one: `wire_seconds` and `update_seconds`;
    `step_seconds`, everything (wire, products and passes over memory, one after the other); `peak_bytes`, arguments and
    what is alive at the worst moment. `memory` is what a device may use (`Options.memory`, or what it has; None: no
    limit), `fits` says whether the peak stays below it, and `missing_bytes` by how much it does not.
    """

    replicas: int
    topology: str
    group: int  # how many replicas share one copy of the state
    why_group: str
    weights: str
    why_weights: str
    leaves: tuple[Leaf, ...]
    fallbacks: tuple[Fallback, ...]
    state_bytes: Total
    wire_bytes: Total
    wire_seconds: Total  # predicted by the cost model, see `costs.py`
    programs: Programs = field(compare=False, repr=False)  # both: what follows from them is worked out when it is read
    memory: int | None = None  # bytes that a device may use
    axis_seconds: tuple[tuple[str, float], ...] = ()  # how long the links of each data axis are busy, of several
    notes: tuple[str, ...] = ()
    lossy: str = ""  # what is rounded on the wire beyond what the step itself rounds (`Options.wire`)
    owned: tuple[Owned, ...] = ()  # whole matrices that the update needs, and who has them
    engine: str = "rewrite"  # or "annotate": XLA partitions the step; its collectives are known once it is compiled
    why_engine: str = "as asked"
    why_offload: str = ""  # what rests in host memory, and why; or why nothing does although that was asked for
    shardings: Any = field(default=None, compare=False, repr=False)  # pytree like (args, kwargs) of NamedSharding
    structure: Any = field(default=None, compare=False, repr=False)  # of each argument: treedef, values and paths

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What the step sends, in order; empty if the step is left to XLA."""
        return self.programs.collectives

    @property
    def update_flops(self) -> Total:
        """Elements computed in the update."""
        return self.programs.update_flops

    @property
    def update_seconds(self) -> Total:
        """Predicted, of the update alone."""
        return self.programs.update_seconds

    @property
    def step_seconds(self) -> Total:
        """Predicted, of everything."""
        return self.programs.step_seconds

    @property
    def peak_bytes(self) -> Total:
        """Predicted, see `memory.py`."""
        return self.programs.peak_bytes

    @property
    def timeline(self) -> tuple[Segment, ...]:
        """The sharded step in order."""
        return self.programs.timeline

    @property
    def timeline_before(self) -> tuple[Segment, ...]:
        """The replicated step in order."""
        return self.programs.timeline_before

    @property
    def update(self) -> tuple[Line, ...]:
        """The update, equation by equation."""
        return self.programs.update

    @property
    def host_bytes(self) -> int:
        """Bytes per replica that rest in the memory of the host."""
        return sum(leaf.bytes_after for leaf in self.leaves if leaf.memory != "device")

    @property
    def fits(self) -> bool:
        """Is the predicted peak within what a device may use?"""
        return not self.missing_bytes

    @property
    def missing_bytes(self) -> float:
        """By how much the predicted peak exceeds what a device may use."""
        return 0.0 if self.memory is None else max(self.peak_bytes.sharded - self.memory, 0.0)

    def __getstate__(self) -> dict[str, Any]:
        """Devices do not travel between processes; everything else does."""
        return {**self.__dict__, "shardings": None, "structure": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def to_json(self) -> str:
        data = {name: value for name, value in self.__dict__.items() if name not in _INTERNAL}
        data |= {name: getattr(self, name) for name in VIEWS}
        data["auxiliary_share"] = self.auxiliary_share
        data["fits"] = self.fits
        data["host_bytes"] = self.host_bytes
        return json.dumps(data, default=_plain, indent=1)

    def to_html(self, path: str | os.PathLike[str], title: str = "shardstep report", notes: Sequence[str] = ()) -> None:
        """Write the report as one self-contained HTML file."""
        from ..tools.report.html import page

        Path(path).write_text(page(self, title, notes), encoding="utf-8")

    def __str__(self) -> str:
        from .plan_table import table

        return table(self)

    def init(self, create_state: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `create_state(*args, **kwargs)` so that the state is created in its layout.

        It returns what `create_state` returns: the step's state argument, or a tuple of several of them. No device
        holds more of the optimizer's state than its own part, not even while it is created.
        """
        from ..runtime import sharded_init

        return sharded_init.prepare(self, create_state, args, kwargs).run()

    def arguments(self) -> list[Argument]:
        """The arguments that hold arrays, with their leaves."""
        if self.structure is None:
            raise ShardstepError("this plan has no devices (it was pickled): ask for it again with step.plan(...)")
        planned = iter(self.leaves)
        found = []
        for tree, values, paths in self.structure:
            leaves = tuple(next(planned) if isinstance(x, NamedSharding) else None for x in values)
            if any(leaves):
                found.append(Argument(tree, leaves, values, paths))
        return found

    def sharding(self, leaf: Leaf) -> NamedSharding:
        """How the array that holds this leaf is distributed over devices."""
        mesh = next(x.mesh for _, values, _ in self.structure for x in values if isinstance(x, NamedSharding))
        return leaf.sharding(mesh)

    def _repr_html_(self) -> str:
        """How a notebook shows the plan."""
        from ..tools.report.html import fragment

        return fragment(self)

    @property
    def auxiliary_share(self) -> float:
        """The share of the optimizer's state bytes that rests sharded."""
        auxiliary = [leaf for leaf in self.leaves if leaf.role == "auxiliary"]
        total = sum(leaf.bytes_before for leaf in auxiliary)
        return sum(leaf.bytes_before for leaf in auxiliary if "split" in leaf.layout) / total if total else 1.0


_INTERNAL = ("programs", "shardings", "structure")


def _plain(value: Any) -> Any:
    """JSON's view of what a plan holds."""
    if isinstance(value, PartitionSpec):
        return [list(x) if isinstance(x, tuple) else x for x in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
