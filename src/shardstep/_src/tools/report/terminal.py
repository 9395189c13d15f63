"""The plan on a terminal, with rich: a verdict, then the ten leaves that matter, then what is sent.

In a pipe it is plain text without colours. Everything fits 80 columns.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...planning.formatting import array, count, size
from .summary import LEFT_TO_XLA, Cargo, advice, cargoes, families, short_array, short_layout, short_line
from .verdict import verdict

if TYPE_CHECKING:
    from ...planning.plan import Plan

ROWS = 10  # of a table, unless all are asked for
NARROW, WIDE = 80, 140  # columns where nobody says how many there are


def console_for(columns: int = WIDE) -> Console:
    """Standard output: colours on a terminal, none in a pipe, which is taken to have so many columns."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = columns
    return console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`shardstep explain ... | head` is no failure: the command line decides."""
        raise BrokenPipeError


def render(plan: Plan, every: bool = False, notes: Sequence[str] = ()) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    yield headline(plan)
    for note in (*plan.notes, *notes):
        yield Text(f"Note: {note}", style="yellow")
    yield from leaf_table(plan, every)
    if plan.replicas == 1:
        yield Text("\nNothing is sent.")
        return
    if plan.engine == "annotate":
        yield Text(f"\n{LEFT_TO_XLA}.")
        return
    yield from collective_table(plan, every)
    if plan.owned:
        yield from owner_table(plan)
    if plan.fallbacks:
        yield from fallback_table(plan)


def headline(plan: Plan) -> Table:
    """The verdict."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    title = f"shardstep on {plan.replicas} {'replica' if plan.replicas == 1 else 'replicas'}"
    table.title, table.title_justify, table.title_style = f"{title}: {plan.topology}", "left", "bold"
    for sentence in verdict(plan):
        style = "bold red" if sentence.worse else "bold" if sentence.topic == "Verdict" else ""
        table.add_row(Text(sentence.topic, style=style or "bold"), Text(sentence.line, style=style))
    return table


def leaf_table(plan: Plan, every: bool) -> Iterator[RenderableType]:
    """The modules that hold most; with `every`, each leaf by its full path, with the reasons."""
    if every:
        yield from _every_leaf(plan)
        return
    yield _title("Kept per device: weights with their optimizer state")
    table = _table("module", "array", "at rest")
    for name in ("before", "after"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    found = families(plan)
    for family in found[:ROWS]:
        path = family.path if family.count == 1 else f"{family.path} x {family.count}"
        style = _style(family.before, family.after)
        sizes = (Text(size(n), style=style) for n in (family.before, family.after))
        table.add_row(*map(Text, (path, family.array, family.layout)), *sizes)
    if rest := found[ROWS:]:
        held = sum(f.before for f in rest), sum(f.after for f in rest)
        table.add_row(f"{sum(f.count for f in rest)} others (--all)", "", "", *map(size, held))
    yield table


def _every_leaf(plan: Plan) -> Iterator[RenderableType]:
    yield _title("Kept per device")
    table = _table("leaf", "array", "at rest")
    for name in ("before", "after"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for leaf in plan.leaves:
        style = "" if leaf.role == "batch" else _style(leaf.bytes_before, leaf.bytes_after)
        sizes = (Text(size(n), style=style) for n in (leaf.bytes_before, leaf.bytes_after))
        table.add_row(*map(Text, (leaf.path, short_array(leaf), short_layout(leaf.layout))), *sizes)
        reasons.setdefault(leaf.reason, []).append(leaf.path)
    yield table
    for reason, paths in reasons.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield Text(f"\n{paths[0]}{more}: {reason}", style="dim")


def _style(before: int, after: int) -> str:
    return "green" if after < before else "bold red" if after > before else ""


def collective_table(plan: Plan, every: bool) -> Iterator[RenderableType]:
    if not plan.collectives:
        yield Text("\nNothing is sent.")
        return
    found: Sequence[Cargo] = cargoes(plan)
    shown = found if every else sorted(found, key=lambda cargo: -cargo.bytes)[:ROWS]
    lines = [short_line(cargo.line) if every else short_line(cargo.line).split(" ")[0] for cargo in shown]
    home = "" if every else _home(lines)
    yield _title(f"Sent per device and step{f' (lines of {home})' if home else ''}")
    table = _table("what", "how")
    table.add_column("bytes", justify="right", header_style="dim", no_wrap=True)
    table.add_column("line", justify="left" if every else "right", overflow="fold", header_style="dim")
    for cargo, line in zip(shown, lines, strict=True):
        place = line.removeprefix(f"{home}:") if home else line
        table.add_row(*map(Text, (cargo.what, cargo.how, size(cargo.bytes), place)))
    if not every and len(found) > ROWS:
        rest = [cargo for cargo in found if cargo not in shown]
        table.add_row(f"{sum(c.count for c in rest)} others (--all)", "", size(sum(c.bytes for c in rest)), "")
    yield table


def _home(lines: Sequence[str]) -> str:
    """The file that most lines are in, which need not be named in each row."""
    files = Counter(line.rpartition(":")[0] for line in lines if ":" in line)
    return files.most_common(1)[0][0] if files else ""


def owner_table(plan: Plan) -> Iterator[RenderableType]:
    yield _title("Whole matrices in the update")
    table = _table("matrices", "owner", "flops per replica", "line")
    for o in plan.owned:
        work = f"{count(o.flops_before)} -> {count(o.flops_after)}"
        line = short_line(o.line).split(" ")[0]
        table.add_row(*map(Text, (f"{o.count} x {array(o.dtype, o.shape)}", o.who, work, line)))
    yield table


def fallback_table(plan: Plan) -> Iterator[RenderableType]:
    yield _title("Not sharded")
    table = _table("operation", "line", "gathered", "why, and what to do")
    table.columns[2].justify = "right"
    for f in sorted(plan.fallbacks, key=lambda f: -f.bytes):
        table.add_row(*map(Text, (f.primitive, short_line(f.line), size(f.bytes), f"{f.why}: {advice(f)}")))
    yield table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    return table
