"""Random equations, played by hand: `play(choices, played)` writes a program and tries its equations one by one.

Each equation whose primitive has a rule is played for a few random placements of its operands, on one axis and on two:
every decision that the rule offers is carried out on blocks without devices (simulate.py), with poison in the padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import whole_steps
from choices import Choices
from numpy_primitives import evaluate
from simulate import as_numpy, assert_close, candidates, check_decisions, padded_candidates

from shardstep._src.core import compat
from shardstep._src.core.layout import Array, Replicated, Split, is_padded
from shardstep._src.planning.propagation.rule_queries import localise, nests, valid_decisions
from shardstep._src.rules import Site, rule_for

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2)]
TRIES = 6  # placements of an equation's operands on each mesh
LARGEST = 2048  # elements
CALLED = {  # calls, and the parameters that hold what is called
    **{"jit": ("jaxpr",), "pjit": ("jaxpr",), "remat2": ("jaxpr",), "checkpoint": ("jaxpr",)},
    **{"custom_jvp_call": ("call_jaxpr",), "custom_vjp_call": ("call_jaxpr", "fun_jaxpr")},
}


@dataclass
class Played:
    """What was tried so far, in this process."""

    equations: int = 0  # different ones
    plays: int = 0  # of an equation in one layout, by one decision for each axis
    on_two_axes: int = 0
    padded: int = 0
    rules: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)


def play(choices: Choices, played: Played) -> None:
    """Write a step and play its equations."""
    kind = choices.one_of(["state", "training", "state", "optimizer"])
    program = whole_steps.write(choices, kind)
    state, *batch = program.arguments()
    numbers = {k: v for k, v in state.items() if isinstance(v, int | float)}
    arrays = {k: v for k, v in state.items() if k not in numbers}
    leaves, tree = jax.tree.flatten((arrays, *batch))

    def step(*leaves):
        arrays, *batch = jax.tree.unflatten(tree, leaves)
        return program.step()(arrays | numbers, *batch)

    jaxpr = jax.make_jaxpr(step)(*leaves)
    _walk(jaxpr, jaxpr.consts, leaves, choices, played)


def _walk(jaxpr, consts, args, choices: Choices, played: Played) -> list:
    jaxpr, _ = compat.open_jaxpr(jaxpr)
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v] for v in eqn.invars]
        out = _evaluated(eqn, values, choices, played)
        env.update(zip(eqn.outvars, out, strict=True))
    return [np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v] for v in jaxpr.outvars]


def _evaluated(eqn, values: list, choices: Choices, played: Played) -> list:
    """The equation's results; it is played on the way, or those inside it are."""
    name = eqn.primitive.name
    body = next((eqn.params[p] for p in CALLED.get(name, ()) if p in eqn.params), None)
    if body is not None:
        return _walk(body, getattr(body, "consts", ()), values, choices, played)
    out = eqn.primitive.bind(*map(jnp.asarray, values), **eqn.params)
    out = list(out) if eqn.primitive.multiple_results else [out]
    if name == "scan" and eqn.params["length"]:
        carried = sum(compat.scan_counts(eqn.params))
        body = eqn.params["jaxpr"]
        _walk(body, body.consts, [*values[:carried], *(x[0] for x in values[carried:])], choices, played)
    elif name == "cond":
        for body in eqn.params["branches"]:
            _walk(body, body.consts, values[1:], choices, played)
    elif name == "while":
        tests, body = eqn.params["cond_nconsts"], eqn.params["body_jaxpr"]
        _walk(body, body.consts, values[tests:], choices, played)
    elif rule_for(eqn.primitive) is not None and sum(math.prod(np.shape(v)) for v in [*values, *out]) <= LARGEST:
        try:
            _play(eqn, values, out, choices, played)
        except Exception as error:
            raise AssertionError(f"{eqn}\n{error}") from error
    return out


def _play(eqn, values: list, out: list, choices: Choices, played: Played) -> None:
    shown = f"{eqn.primitive} {eqn.params} {[(v.shape, str(v.dtype)) for v in values]}"
    if shown in played.known:
        return
    played.known.add(shown)
    played.equations += 1
    inputs, outputs = (tuple(Array(v.shape, v.dtype) for v in vs) for vs in (values, out))
    by_numpy = evaluate(eqn.primitive.name, eqn.params, list(map(as_numpy, values)), [a.dtype for a in outputs])
    for got, want in zip(by_numpy or [], out, strict=by_numpy is not None):
        assert_close(got, np.asarray(want), 1e-2 if want.dtype.itemsize < 4 else 1e-4)
    rng = np.random.default_rng(choices.below(2**20))
    for sizes in MESHES:
        done = set()
        for _ in range(TRIES):
            site = Site(eqn.primitive, eqn.params, inputs, outputs, sizes[0])
            for decisions in _decided(site, sizes, (), choices):
                key = tuple((d.operands, d.results) for d in decisions)
                placements = [p for d in decisions for p in d.operands + d.results]
                if key in done or all(isinstance(p, Replicated) for p in placements):
                    continue
                done.add(key)
                check = f"on {sizes}: " + " / ".join(
                    f"{', '.join(map(str, d.operands))} -> {', '.join(map(str, d.results))}" for d in decisions
                )
                try:
                    check_decisions(eqn, site, decisions, values, out, rng, sizes, by_numpy=True)
                except Exception as error:
                    raise AssertionError(f"{check}\n{error}") from error
                played.plays += 1
                played.rules.add(str(eqn.primitive))
                played.on_two_axes += len(sizes) > 1
                played.padded += any(map(is_padded, placements))


def _decided(site: Site, sizes: tuple[int, ...], before: tuple, choices: Choices):
    """Decisions for all axes, for random placements of the operands: all that the rule offers, one on the last axis."""
    if not sizes:
        yield list(before)
        return
    offered = [_offered(site, i, before, choices) for i in range(len(site.inputs))]
    placements = tuple(choices.one_of(options) for options in offered)
    wants = [s for s in candidates(site.outputs[0], site.n) if isinstance(s, Split)] if site.outputs else []
    hint = (choices.one_of(wants),) * len(site.outputs) if wants and choices.coin() else ()
    site = Site(site.primitive, site.params, site.inputs, site.outputs, site.n, hint)
    decisions = [d for d in valid_decisions(site, placements) if nests(before, d)]
    if before and decisions:
        decisions = [choices.one_of(decisions)]
    for decision in decisions:
        nested = localise(site, decision)
        rest = sizes[1:]
        following = Site(nested.primitive, nested.params, nested.inputs, nested.outputs, rest[0] if rest else 1)
        yield from _decided(following, rest, (*before, decision), choices)


def _offered(site: Site, i: int, before: tuple, choices: Choices) -> list:
    """How operand i may lie along this axis; a dimension is padded once, by the outermost axis that cuts it."""
    array = site.inputs[i]
    cut_before = {p.dim for d in before for p in [d.operands[i]] if isinstance(p, Split)}
    padded = [p for p in padded_candidates(array, site.n) if not isinstance(p, Split) or p.dim not in cut_before]
    plain = candidates(array, site.n)
    return plain[1:] + padded[1:] + plain[:1]
