"""The plan as a page: one HTML file with everything in it, and a fragment for notebooks.

The page draws with Plotly (the "basic" build, kept in `page/` with its licence), so that it needs neither a network nor
a further package. Its content security policy forbids every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...planning.formatting import array, size
from ...planning.timeline import PHASES
from .summary import LEFT_TO_XLA, Group, advice, cargoes, families, groups, names, short_line
from .verdict import verdict

if TYPE_CHECKING:
    from ...planning.plan import Owned, Plan
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
    short = names(plan)
    return {
        "verdict": [asdict(sentence) for sentence in verdict(plan)],
        "notes": [*plan.notes, *notes],
        "left": _left(plan),
        "limit": plan.memory,
        "memory": _memory(plan),
        "peak": [
            {"name": "peak, replicated", "parts": {"peak": plan.peak_bytes.replicated}},
            {"name": "peak, sharded", "parts": {"peak": plan.peak_bytes.sharded}},
        ],
        "owned": [_owned(o) for o in plan.owned],
        "families": [asdict(family) for family in families(plan)],
        "wire": [
            {"name": "replicated", "parts": _sent(plan.timeline_before)},
            {"name": "sharded", "parts": _sent(plan.timeline) or {"estimated": plan.wire_bytes.sharded}},
        ],
        "before": [_segment(s) for s in plan.timeline_before],
        "after": [_segment(s) for s in plan.timeline],
        "groups": [_group(g) for g in groups(plan.leaves, short)],
        "leaves": [_group(Group(leaf.path, (leaf,)), short[leaf.path]) for leaf in plan.leaves],
        "collectives": [{**asdict(cargo), "line": short_line(cargo.line)} for cargo in cargoes(plan)],
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


def _left(plan: Plan) -> str:
    """What stands where there are no collectives of ours to show."""
    if plan.replicas == 1:
        return "Nothing is sent: there is one replica."
    return f"{LEFT_TO_XLA}." if plan.engine == "annotate" else ""


def _by_source(lines: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((short_line(line.source), line.code), []).append(line)
    return found


def _group(group: Group, short: str = "") -> dict[str, Any]:
    leaf, count = group.first, len(group.leaves)
    return {
        "path": group.path if count == 1 else f"{group.path} x {count}",
        "short": short,
        "array": array(leaf.dtype, leaf.shape),
        "role": leaf.role,
        "layout": leaf.layout,
        "before": group.bytes_before,
        "after": group.bytes_after,
        "saved": group.bytes_before - group.bytes_after,
        "reason": leaf.reason,
    }


def _owned(o: Owned) -> dict[str, Any]:
    """Who does the work on matrices that an update needs whole."""
    return {
        "matrices": f"{o.count} x {array(o.dtype, o.shape)}",
        "owner": o.who,
        "before": o.flops_before,
        "after": o.flops_after,
        "line": short_line(o.line),
        "why": o.why,
    }


_KINDS = {"weight": "weights", "auxiliary": "optimizer state", "frozen": "frozen weights"}


def _memory(plan: Plan) -> list[dict[str, Any]]:
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for leaf in plan.leaves:
        if leaf.role in _KINDS:
            name = _KINDS[leaf.role]
            before[name] = before.get(name, 0) + leaf.bytes_before
            after[name] = after.get(name, 0) + leaf.bytes_after
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
        "seconds": s.seconds,
        "loop": f"{s.loop}, {s.times} times" if s.loop else "",
        "times": s.times,
        "visit": s.visit,
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
        f"<tr><td>{escape(x.topic)}</td><td>{'<b>worse:</b> ' if x.worse else ''}{escape(x.text)}</td></tr>"
        for x in verdict(plan)
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
        ("what", "how", "bytes", "line"),
        [(cargo.what, cargo.how, size(cargo.bytes), short_line(cargo.line)) for cargo in cargoes(plan)],
    )
    missed = _rows(
        ("primitive", "line", "why", "gathered"),
        [(f.primitive, short_line(f.line), f.why, size(f.bytes)) for f in plan.fallbacks],
    )
    return (
        f"<b>shardstep on {plan.replicas} {'replica' if plan.replicas == 1 else 'replicas'}</b><table>{figures}</table>"
        f"<details><summary>{len(plan.leaves)} leaves</summary>{leaves}</details>"
        f"<details><summary>{len(plan.collectives)} collectives</summary>{sent}</details>"
        f"<details><summary>{len(plan.fallbacks)} equations not sharded</summary>{missed}</details>"
    )


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(x)}</th>' for x in head)}</tr>{body}</table>"
