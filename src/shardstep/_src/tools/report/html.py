"""The plan as a page: one HTML file with everything in it, and a fragment for notebooks.

The page draws with Plotly (the "basic" build, kept in `page/` with its licence), so that it needs neither a network nor
a further package. Its content security policy forbids every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...planning.formatting import array, count, duration, size
from ...planning.timeline import PHASES
from .summary import LEFT_TO_XLA, advice, groups, left_to_xla, runs, short_line

if TYPE_CHECKING:
    from ...planning.plan import Plan, Total
    from ...planning.timeline import Line, Segment

_PLOTLY = "plotly-basic-4.1.1.min.js"


def page(plan: Plan, title: str = "shardstep report", notes: Sequence[str] = ()) -> str:
    """The whole report as HTML."""
    parts = {
        "title": escape(title),
        "subtitle": escape(f"{plan.topology}; weights at rest: {plan.weights} ({plan.why_weights})"),
        "footer": escape(f"made by shardstep {_version()}"),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "plotly": _asset(_PLOTLY),
        "data": _embedded(_data(plan, notes)),
    }
    return re.sub(r"@(\w+)@", lambda name: parts[name[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _data(plan: Plan, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "headline": headline(plan),
        "notes": [*filter(None, [left_to_xla(plan)]), *plan.notes, *notes],
        "left": f"{LEFT_TO_XLA}." if plan.engine == "annotate" else "",
        "memory": _memory(plan),
        "wire": [
            {"name": "replicated", "parts": _sent(plan.timeline_before)},
            {"name": "sharded", "parts": _sent(plan.timeline) or {"estimated": plan.wire_bytes.sharded}},
        ],
        "before": [_segment(s) for s in plan.timeline_before],
        "after": [_segment(s) for s in plan.timeline],
        "leaves": [
            {
                "path": leaf.path,
                "array": array(leaf.dtype, leaf.shape),
                "role": leaf.role,
                "layout": leaf.layout,
                "before": leaf.bytes_before,
                "after": leaf.bytes_after,
                "reason": leaf.reason,
            }
            for leaf in plan.leaves
        ],
        "collectives": [
            {
                "kind": run.first.kind,
                "count": run.count,
                "dtype": run.first.dtype,
                "bytes": run.bytes,
                "purpose": run.first.purpose,
                "line": short_line(run.first.line),
                "loop": f"{run.first.loop}, {run.first.times} times" if run.first.loop else "",
            }
            for run in runs(plan.collectives)
        ],
        "fallbacks": [
            {"primitive": f.primitive, "line": short_line(f.line), "why": f.why, "bytes": f.bytes, "advice": advice(f)}
            for f in plan.fallbacks
        ],
        "update": [
            {
                "source": source,
                "code": code,
                "lines": [{"text": x.text, "count": x.count, "sends": x.sends} for x in lines],
            }
            for (source, code), lines in _by_source(plan.update).items()
        ],
    }


def _by_source(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((short_line(line.source), line.code), []).append(line)
    return found


def headline(plan: Plan) -> list[dict[str, str]]:
    """The figures that come first, and whether a change is for the "better"."""

    def card(name: str, total: Total, show: Callable[[float], str], change: str = "") -> dict[str, str]:
        if not change and total.replicated:
            change = f"{total.ratio:.0%} of before"
        verdict = "better" if total.ratio < 0.995 else "worse" if total.ratio > 1.005 else "same"
        return {"name": name, "value": _arrow(total, show), "change": change, "verdict": verdict}

    share = f"{plan.auxiliary_share:.1%}"
    return [
        card("state per replica", plan.state_bytes, size),
        card("sent per step and replica", plan.wire_bytes, size),
        card(
            "predicted update time", plan.update_seconds, duration, f"on the wire {_arrow(plan.wire_seconds, duration)}"
        ),
        card("elements updated", plan.update_flops, count),
        {"name": "optimizer state sharded", "value": share, "change": "", "verdict": "same"},
    ]


def _arrow(total: Total, show: Callable[[float], str]) -> str:
    """Before and after. A line may break before the arrow, but not between a number and its unit."""
    before, after = (show(x).replace(" ", "\u00a0") for x in (total.replicated, total.sharded))
    return f"{before} →\u00a0{after}"


def _memory(plan: Plan) -> list[dict[str, Any]]:
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for leaf in plan.leaves:
        if leaf.role in ("weight", "auxiliary", "frozen"):
            before[leaf.role] = before.get(leaf.role, 0) + leaf.bytes_before
            after[leaf.role] = after.get(leaf.role, 0) + leaf.bytes_after
    return [{"name": "replicated", "parts": before}, {"name": "sharded", "parts": after}]


def _sent(segments: Sequence[Segment]) -> dict[str, float]:
    sent: dict[str, float] = {}
    for s in segments:
        if s.what not in PHASES:
            sent[s.what] = sent.get(s.what, 0.0) + s.bytes
    return sent


def _segment(s: Segment) -> dict[str, Any]:
    return {
        "what": s.what,
        "count": s.count,
        "bytes": s.bytes,
        "loop": f"{s.loop}, {s.times} times" if s.loop else "",
        "collective": s.what not in PHASES,
    }


def _version() -> str:
    try:
        return version("shardstep")
    except PackageNotFoundError:
        return ""


# -- notebooks ----------------------------------------------------------------------------------------------------


def fragment(plan: Plan) -> str:
    """The plan for a notebook's output: tables without scripts, which untrusted notebooks would strip."""
    figures = "".join(
        f"<tr><td>{escape(c['name'])}</td><td><b>{escape(c['value'])}</b></td><td>{escape(c['change'])}</td></tr>"
        for c in headline(plan)
    )
    leaves = _rows(
        ("leaf", "array", "role", "at rest", "bytes per replica", "why"),
        [
            (
                g.path + (f" x {len(g.leaves)}" if len(g.leaves) > 1 else ""),
                array(g.first.dtype, g.first.shape),
                g.first.role,
                g.first.layout,
                f"{size(g.bytes_before)} → {size(g.bytes_after)}",
                g.first.reason,
            )
            for g in groups(plan.leaves)
        ],
    )
    sent = _rows(
        ("collective", "dtype", "sent", "for", "line"),
        [
            (f"{r.first.kind} x {r.count}", r.first.dtype, size(r.bytes), r.first.purpose, short_line(r.first.line))
            for r in runs(plan.collectives)
        ],
    )
    missed = _rows(
        ("primitive", "line", "why", "gathered"),
        [(f.primitive, short_line(f.line), f.why, size(f.bytes)) for f in plan.fallbacks],
    )
    return (
        f"<b>shardstep on {plan.replicas} replicas</b><table>{figures}</table>"
        f"<details><summary>{len(plan.leaves)} leaves</summary>{leaves}</details>"
        f"<details><summary>{len(plan.collectives)} collectives</summary>{sent}</details>"
        f"<details><summary>{len(plan.fallbacks)} equations not sharded</summary>{missed}</details>"
    )


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(x)}</th>' for x in head)}</tr>{body}</table>"
