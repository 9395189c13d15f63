"""Rules as text, found by asking the rules themselves about an example.

A rule of indices prints as an equation, as in Shardy: `([i,k],[k,j]) -> ([i,j])`, and what the result is when an index
is split. Any other rule prints as a table: operands as they come, operands as the rule takes them -> results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ..core.layout import VARYING, Partial, Placement, Replicated, Split
from .contract import PARTIAL, REPLICATED, Decision, Site, rule_for, speaks_of_replicas
from .contraction import ByIndex, Index

LETTERS = "ijklmnopqrstuvw"


def printed(site: Site) -> str:
    """The rule of the site's primitive, on this example."""
    rule = rule_for(site.primitive)
    assert rule is not None, f"{site.primitive} has no rule"
    return equation(rule, site) if isinstance(rule, ByIndex) else table(site)


def equation(rule: ByIndex, site: Site) -> str:
    named = list(zip(LETTERS, (index for index in rule.indices(site) if index.size > 1), strict=False))

    def sides(arrays: int, places: str) -> list[dict[int, list[tuple[int, str]]]]:
        found: list[dict[int, list[tuple[int, str]]]] = [{} for _ in range(arrays)]
        for letter, index in named:
            for at, place in zip(found, getattr(index, places), strict=True):
                if place is not None:
                    at.setdefault(place.dim, []).append((place.outer, letter))
        return found

    def shown(ndim: int, at: dict[int, list[tuple[int, str]]]) -> str:
        dims = ("".join(letter for _, letter in sorted(at.get(d, []))) or "*" for d in range(ndim))
        return f"[{','.join(dims)}]"

    operands = ",".join(map(shown, (x.ndim for x in site.inputs), sides(len(site.inputs), "operands")))
    results = ",".join(map(shown, (x.ndim for x in site.outputs), sides(len(site.outputs), "results")))
    lines = [f"({operands}) -> ({results})", *_outcomes(named, rule.op)]
    if rule.linear:
        lines.append(f"linear in operand {' and '.join(map(str, rule.linear))}: {_short(Partial(rule.op))} stays")
    return "\n".join(lines)


def _outcomes(named: Sequence[tuple[str, Index]], op: str) -> Iterator[str]:
    kept = [letter for letter, index in named if None not in index.results]
    reduced = [letter for letter, index in named if None in index.results]
    if kept:
        yield f"{', '.join(kept)} split -> split"
    if reduced:
        yield f"{', '.join(reduced)} split -> {_short(Partial(op))}"


def table(site: Site) -> str:
    rule = rule_for(site.primitive)
    assert rule is not None
    lines = []
    for placements in _questions(site):
        answer = rule(site, placements)
        decisions = [answer] if isinstance(answer, Decision) else list(answer or ())
        taken = [f"{_row(d.operands)} -> {_row(d.results)}" for d in decisions]
        lines.append(f"{_row(placements)}: {' or '.join(dict.fromkeys(taken)) or 'gather'}")
    return "\n".join(lines)


def _questions(site: Site) -> list[tuple[Placement, ...]]:
    """Every placement of one operand among replicated ones, then the same for all operands at once."""
    terms: list[Placement] = [PARTIAL, Partial("max"), *([VARYING] if speaks_of_replicas(site.primitive) else [])]
    found: list[tuple[Placement, ...]] = []
    whole: tuple[Placement, ...] = (REPLICATED,) * len(site.inputs)
    for i, array in enumerate(site.inputs):
        splits = [Split(d) for d in range(array.ndim) if site.divides(i, Split(d))]
        found += [(*whole[:i], p, *whole[i + 1 :]) for p in itertools.chain(splits, terms)]
    common = [Split(d) for d in range(min((x.ndim for x in site.inputs), default=0))]
    for p in itertools.chain(common, terms):
        if not isinstance(p, Split) or all(site.divides(i, p) for i in range(len(site.inputs))):
            found.append((p,) * len(site.inputs))
    return list(dict.fromkeys(found))


def _row(placements: Sequence[Placement]) -> str:
    return " ".join(map(_short, placements)) or "()"


def _short(placement: Placement) -> str:
    """R, S0, P, Pmax, V."""
    if isinstance(placement, Split):
        return f"S{placement.dim}" + (f"/{placement.outer}" if placement.outer > 1 else "")
    if isinstance(placement, Partial):
        return "P" if placement == PARTIAL else f"P{placement.op}"
    return "R" if isinstance(placement, Replicated) else "V"
