"""The plan on a terminal, with rich. In a pipe it is plain text without colours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...planning.formatting import array, count, duration, size
from .summary import LEFT_TO_XLA, advice, groups, left_to_xla, runs, short_line

if TYPE_CHECKING:
    from ...planning.plan import Leaf, Plan, Total

ROWS = 40  # of a table, unless all are asked for
PIPE = 140  # columns where nobody says how many there are


def console_for() -> Console:
    """Standard output: colours on a terminal, none in a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE
    return console


def render(plan: Plan, every: bool = False, notes: Sequence[str] = ()) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    yield headline(plan)
    for note in filter(None, (left_to_xla(plan), *plan.notes, *notes)):
        yield Text(f"Note: {note}", style="yellow")
    yield leaf_table(plan, every)
    if plan.engine == "annotate":
        yield Text(f"{LEFT_TO_XLA}. The bytes sent are an estimate.\n")
        return
    yield collective_table(plan, every)
    yield fallback_table(plan) if plan.fallbacks else Text("Everything that could be sharded is. No fallbacks.\n")


def headline(plan: Plan) -> Table:
    table = Table(title=f"shardstep on {plan.replicas} replicas", title_justify="left", title_style="bold")
    for name in ("per replica, each step", "replicated", "sharded", ""):
        table.add_column(name, justify="left" if name.startswith("per replica") else "right")
    table.add_row("state", *_change(plan.state_bytes))
    table.add_row("sent on the wire", *_change(plan.wire_bytes))
    times = plan.update_seconds, plan.wire_seconds
    for name, t in zip(("predicted: update", "predicted: wire"), times, strict=True):
        table.add_row(name, duration(t.replicated), duration(t.sharded), _factor(t))
    work = plan.update_flops
    table.add_row("update work", f"{count(work.replicated)} elements", f"{count(work.sharded)} elements", _factor(work))
    table.add_row("optimizer state that is sharded", "", f"{plan.auxiliary_share:.1%}", "")
    table.caption = (
        f"Machine: {plan.topology}. State is shared by {plan.group} replicas: {plan.why_group}.\n"
        f"Weights at rest: {plan.weights} ({plan.why_weights})."
    )
    table.caption_justify = "left"
    return table


def _change(total: Total) -> tuple[str, str, str]:
    return size(total.replicated), size(total.sharded), _factor(total)


def _factor(total: Total) -> str:
    return f"{total.ratio:.0%}"


def leaf_table(plan: Plan, every: bool) -> Group:
    """The leaves; what applies to many of them is said once, below."""
    table = _table("Leaves", "leaf", "array", "role", "at rest", "bytes per replica", "why")
    table.columns[4].justify = "right"
    reasons: dict[str, int] = {}
    if every:
        rows = [_leaf_row(leaf.path, leaf, leaf.bytes_before, leaf.bytes_after, 1, reasons) for leaf in plan.leaves]
    else:
        found = groups(plan.leaves)
        rows = [_leaf_row(g.path, g.first, g.bytes_before, g.bytes_after, len(g.leaves), reasons) for g in found]
    _fill(table, rows, every)
    legend = [Text(f" {number}  {reason}", style="dim") for reason, number in reasons.items()]
    return Group(table, *legend, Text())


def _leaf_row(path: str, leaf: Leaf, before: int, after: int, count: int, reasons: dict[str, int]) -> tuple[Text, ...]:
    change = size(after) if before == after else f"{size(before)} -> {size(after)}"
    times = f" x {count}" if count > 1 else ""
    style = "green" if after < before and leaf.role != "batch" else ""
    why = str(reasons.setdefault(leaf.reason, len(reasons) + 1))
    cells = (path + times, array(leaf.dtype, leaf.shape), leaf.role, leaf.layout, change, why)
    return tuple(Text(cell, style=style if i in (3, 4) else "") for i, cell in enumerate(cells))


def collective_table(plan: Plan, every: bool) -> RenderableType:
    if not plan.collectives:
        return Text("Nothing is sent.\n")
    table = _table("Collectives, in program order", "collective", "dtype", "sent", "for", "line", "inside")
    table.columns[2].justify = "right"
    rows = []
    for run in runs(plan.collectives):
        c = run.first
        kind = c.kind if run.count == 1 else f"{c.kind} x {run.count}"
        often = f"{short_loop(c.loop)}, {c.times} times" if c.loop and c.times > 1 else short_loop(c.loop)
        rows.append(
            tuple(Text(x) for x in (kind, c.dtype, size(run.bytes), c.purpose, short_line(c.line) or "-", often))
        )
    _fill(table, rows, every)
    if not any(c.loop for c in plan.collectives):
        table.columns.pop()
    return table


def short_loop(loop: str) -> str:
    primitive, at, line = loop.partition(" at ")
    return f"{primitive} {short_line(line)}" if at else loop


def fallback_table(plan: Plan) -> Table:
    table = _table("Not sharded", "primitive", "line", "why", "gathered", "what to do")
    table.columns[3].justify = "right"
    for f in plan.fallbacks:
        cells = (f.primitive, short_line(f.line), f.why, size(f.bytes), advice(f))
        table.add_row(*map(Text, cells))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _fill(table: Table, rows: Sequence[tuple[Text, ...]], every: bool) -> None:
    shown = rows if every else rows[:ROWS]
    for row in shown:
        table.add_row(*row)
    if len(rows) > len(shown):
        table.caption = f"{len(rows) - len(shown)} more rows: --all shows them"
        table.caption_justify = "left"
