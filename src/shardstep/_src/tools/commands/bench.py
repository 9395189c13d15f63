"""`shardstep bench`: a program against what its user would do instead of shardstep."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from ...api import PlannedStep, ShardedStep
from ...capture.arguments import Call, abstract, shape_of
from ...core.errors import ShardstepError
from ...core.padded import Padded
from ...planning.formatting import size
from .. import baselines
from ..measuring import Contender, Disagreement, Measured, measure, rows
from ..report.terminal import console_for
from . import target
from .explain import all_devices


def bench(name: str, steps: int, out: str | None) -> int:
    """Measure the program `name` on all devices."""
    target.require_place("--json", out)
    program = target.call(target.find(name))
    target.require_values(program, "bench")
    console = console_for()
    mesh = all_devices()
    try:
        found = measure(contenders(program, mesh), steps, warm_up=1)
    except Disagreement as error:
        console.print(str(error), style="bold red", soft_wrap=True)
        return 1
    console.print(table(found, name, steps, mesh.size))
    if out is not None:
        made = rows(found, name, "its own", mesh.size)
        Path(out).write_text(json.dumps(made, indent=1) + "\n")
        console.print(f"Figures: {out}", soft_wrap=True)
    return 0


# --- the contenders -------------------------------------------------------------------------------------------------


def contenders(program: target.Target, mesh: Mesh) -> list[Contender]:
    ours = {
        name: program.sharded(mesh, weights=weights)
        for name, weights in (("shardstep", "replicated"), ("shardstep-sharded", "sharded"))
    }
    runners = {name: Runner(step, *step.program(program.args, {})) for name, step in ours.items()}
    one = runners["shardstep"]
    _require_even(one.program, mesh.size)
    plain = one.annotated() if one.step.axis_name is None else [one.per_replica()]
    return [*plain, *(runner.sharded(name) for name, runner in runners.items())]


def _require_even(program: PlannedStep, replicas: int) -> None:
    captured = program.captured
    for i, dim in captured.batch.items():
        examples = shape_of(captured.call.leaves[i])[0][dim]
        if examples % replicas:
            raise ShardstepError(
                f"{captured.paths[i]} has {examples} examples, which {replicas} devices do not share evenly; jax.jit"
                " cannot run that: give another batch or --devices"
            )


class Runner:
    """Runs a captured step, leaf by leaf: new state takes the place of the old, everything else stays."""

    def __init__(self, step: ShardedStep, program: PlannedStep, call: Call):
        self.step, self.program, self.captured, self.call = step, program, program.captured, call
        outputs = self.captured.program.outputs
        scalars = (o for o, atom in enumerate(outputs) if atom.array.shape == () and _is_float(atom.array.dtype))
        kept = set(self.captured.state.values())
        self.loss = next((o for o in scalars if o not in kept), None)

    def annotated(self) -> list[Contender]:
        mesh = self.step.replicas.mesh
        layouts = {"replicated": baselines.everywhere, "zero1": baselines.zero1}
        specs = {name: lay_out(self.program, mesh) for name, lay_out in layouts.items()}
        return [
            self._plain(name, baselines.annotated(self.step, self.program, mesh, laid_out), mesh, laid_out)
            for name, laid_out in specs.items()
        ]

    def per_replica(self) -> Contender:
        """A step for one replica can be run replicated; annotations say nothing to it."""
        mesh = Mesh(self.step.replicas.mesh.devices.reshape(-1), (self.captured.axis_name,))
        run = baselines.per_replica(self.step, self.program, donate=True)
        return self._plain("replicated", run, mesh, baselines.everywhere(self.program, mesh))

    def _plain(self, name: str, run: Any, mesh: Mesh, specs: Sequence[PartitionSpec]) -> Contender:
        where = [NamedSharding(mesh, spec) for spec in specs]
        given = self.call.leaves

        def start() -> list[Any]:
            return [jax.device_put(_copy(x), sharding) for x, sharding in zip(given, where, strict=True)]

        return Contender(
            name, lambda: run.lower(*map(abstract, given)), start, lambda leaves: self._next(leaves, run(*leaves))
        )

    def sharded(self, name: str) -> Contender:
        """Called as a user calls it."""
        call = self.call
        start_args, start_kwargs = call.rebuild(call.leaves)

        def advance(leaves: list[Any]) -> tuple[list[Any], Any]:
            args, kwargs = call.rebuild(leaves)
            out = jax.tree.leaves(self.step(*args, **kwargs), is_leaf=lambda x: isinstance(x, Padded))
            return self._next(leaves, [x for x in out if hasattr(x, "dtype")])

        return Contender(
            name,
            lambda: self.step.lower(*start_args, **start_kwargs),
            lambda: [_copy(x) for x in call.leaves],
            advance,
        )

    def _next(self, leaves: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[Any], Any]:
        state = self.captured.state
        loss = None if self.loss is None or jnp.ndim(outputs[self.loss]) else outputs[self.loss]
        return [outputs[state[i]] if i in state else x for i, x in enumerate(leaves)], loss


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _copy(x: Any) -> Any:
    """Steps give their arguments away; the next contender needs them too."""
    return jnp.copy(x) if isinstance(x, jax.Array) else copy.copy(x)


# --- the table ------------------------------------------------------------------------------------------------------


def table(found: Sequence[Measured], name: str, steps: int, replicas: int) -> Table:
    title = f"{name}: {steps} steps of each in turn on {replicas} devices"
    made = Table("", title=title, title_justify="left", title_style="bold")
    for heading in ("per step", "quartiles", "", "arguments", "temporaries", "sent", "traced in", "compiled in"):
        made.add_column(heading, justify="right")
    plain = found[0].step.median
    for m in found:
        c, step = m.compiled, m.step
        times = f"{step.median:.1f} ms", f"{step.low:.1f} to {step.high:.1f}", f"{plain / step.median:.2f}x"
        bytes_ = (size(n) for n in (c.arg_bytes, c.temp_bytes, c.wire_bytes))
        made.add_row(m.contender, *times, *bytes_, f"{c.trace_s:.1f} s", f"{c.compile_s:.1f} s")
    made.caption, made.caption_justify = "Bytes are those of one device; a loop's are counted once.", "left"
    return made
