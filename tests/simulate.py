"""Test a rule without a mesh: play every replica by hand and put their blocks together again.

`verify(fun, *args, n=3)` traces `fun`, and for every equation, for every combination of operand placements,
asks the rule for its decisions, computes each replica's block from the decision alone, reassembles the results and
compares them with plain evaluation. No devices, no collectives: only the mathematics of the rule is under test.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split, divides, is_padded, local_shape
from shardstep._src.rules import Block, Local, Site, rule_for
from shardstep._src.rules.contract import filled, minds_padding


def cut(value, placement, n, rng):
    """The n blocks that replicas hold of `value`."""
    if isinstance(placement, Split) and placement.extent:
        missing = placement.extent - value.shape[placement.dim]
        room = poison((*value.shape[: placement.dim], missing, *value.shape[placement.dim + 1 :]), value, rng)
        return jnp.split(jnp.concatenate([value, room], placement.dim), n, axis=placement.dim)
    if isinstance(placement, Split):
        d, outer = placement.dim, placement.outer
        shape = value.shape
        seen = value.reshape(*shape[:d], outer, shape[d] // outer, *shape[d + 1 :])
        return [b.reshape(local_shape(shape, placement, n)) for b in jnp.split(seen, n, axis=d + 1)]
    if isinstance(placement, Partial) and placement.op == "add":
        terms = [jnp.asarray(rng.integers(-4, 5, value.shape), value.dtype) for _ in range(n - 1)]
        return [*terms, value - sum(terms, jnp.zeros_like(value))]
    if isinstance(placement, Partial):  # max or min: one replica holds the value, the others something weaker
        weaker = jnp.minimum if placement.op == "max" else jnp.maximum
        other = jnp.asarray(rng.integers(-4, 5, value.shape), value.dtype)
        return [value, *[weaker(value, other)] * (n - 1)]
    return [value] * n


def poison(shape, like, rng):
    """What may stand in padding: anything. NaN, infinities, numbers out of all range."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(17, impl=jax.random.key_impl(like)), shape)
    if jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.asarray(rng.choice([np.nan, np.inf, -np.inf, 3e38], shape), like.dtype)
    if like.dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape), jnp.bool_)
    info = jnp.iinfo(like.dtype)
    return jnp.asarray(rng.choice([int(info.min), int(info.max), 1, 5], shape)).astype(like.dtype)


def join(blocks, placement, shape):
    """The value that the replicas' blocks stand for."""
    if isinstance(placement, Split) and placement.extent:
        return jax.lax.slice_in_dim(jnp.concatenate(blocks, placement.dim), 0, shape[placement.dim], axis=placement.dim)
    if isinstance(placement, Split):
        d, outer, n = placement.dim, placement.outer, len(blocks)
        seen = [b.reshape(*shape[:d], outer, shape[d] // outer // n, *shape[d + 1 :]) for b in blocks]
        return jnp.concatenate(seen, axis=d + 1).reshape(shape)
    if isinstance(placement, Partial):
        return {"add": sum, "max": lambda b: jnp.stack(b).max(0), "min": lambda b: jnp.stack(b).min(0)}[placement.op](
            blocks
        )
    for block in blocks[1:]:
        np.testing.assert_array_equal(
            as_data(block), as_data(blocks[0]), "a replicated result differs between replicas"
        )
    return blocks[0]


def as_data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def block_of(shape, placement, index, n):
    local = local_shape(shape, placement, n)
    offsets = tuple(
        index * local[d] if isinstance(placement, Split) and placement.dim == d else 0 for d in range(len(shape))
    )
    return Block(shape, local, offsets)


def candidates(array: Array, n: int, outers=(1, 2)):
    found = [REPLICATED]
    for d in range(array.ndim):
        found += [Split(d, o) for o in outers if divides(array.shape, Split(d, o), n)]
    if jnp.issubdtype(array.dtype, jnp.inexact):
        found.append(PARTIAL)
    return found


def padded_candidates(array: Array, n: int):
    """Padded splits, be it that n does not divide the dimension, or that it came padded from elsewhere."""
    extents = [(d, (size // n + 1) * n) for d, size in enumerate(array.shape) if size > 1]
    return [REPLICATED, *(Split(d, extent=extent) for d, extent in extents)]


def tolerance(site):
    """Cutting a bf16 value into terms rounds each term."""
    floats = [a.dtype for a in site.inputs + site.outputs if jnp.issubdtype(a.dtype, jnp.inexact)]
    return 5e-2 if any(d.itemsize < 4 for d in floats) else 2e-4


def check_decision(eqn, site, decision, values, expected, rng, n):
    rtol = tolerance(site)
    assert len(decision.operands) == len(values) and len(decision.results) == len(expected)
    for array, placement in zip(site.inputs + site.outputs, decision.operands + decision.results, strict=True):
        if isinstance(placement, Split):
            assert divides(array.shape, placement, n), f"{placement} does not divide {array.shape} by {n}"
    cuts = [cut(v, p, n, rng) for v, p in zip(values, decision.operands, strict=True)]
    params = dict(decision.params if decision.params is not None else eqn.params)
    replicas = []
    for index in range(n):
        local = Local(
            eqn.primitive,
            params,
            tuple(block_of(a.shape, p, index, n) for a, p in zip(site.inputs, decision.operands, strict=True)),
            tuple(block_of(a.shape, p, index, n) for a, p in zip(site.outputs, decision.results, strict=True)),
        )
        arrays = [c[index] for c in cuts]
        if decision.fill:
            layouts = [(p,) for p in decision.operands]
            arrays = [filled(*given) for given in zip(arrays, local.inputs, layouts, decision.fill, strict=True)]
        out = list(decision.emit(local, *arrays)) if decision.emit else local.bind(*arrays)
        for block, got in zip(local.outputs, out, strict=True):
            assert got.shape == block.local, f"block of shape {got.shape}, layout says {block.local}"
        replicas.append(out)
    for j, (want, placement) in enumerate(zip(expected, decision.results, strict=True)):
        got = as_data(join([r[j] for r in replicas], placement, want.shape))
        want = as_data(want)
        if np.issubdtype(want.dtype, np.inexact):
            np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(1.0, np.abs(want).max(initial=0)))
        else:
            np.testing.assert_array_equal(got, want)


def verify(fun, *args, n=3, outers=(1, 2), limit=400, only=None, wants=False):
    """Check every rule that `fun` meets; returns {primitive name (", padded"): set of (operands, results) offered}."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    offered: dict[str, set] = {}
    _walk(
        jaxpr,
        [jnp.asarray(a) if not hasattr(a, "dtype") else a for a in jax.tree.leaves(args)],
        n,
        outers,
        limit,
        only,
        wants,
        offered,
    )
    return offered


def _walk(jaxpr, args, n, outers, limit, only, wants, offered):
    from shardstep._src.core.compat import open_jaxpr

    consts = jaxpr.consts
    jaxpr, _ = open_jaxpr(jaxpr)
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    rng = np.random.default_rng(0)
    for eqn in jaxpr.eqns:
        values = [jnp.asarray(v.val) if hasattr(v, "val") else env[v] for v in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            out = _walk(eqn.params["jaxpr"], values, n, outers, limit, only, wants, offered)
        else:
            out = eqn.primitive.bind(*values, **eqn.params)
            out = list(out) if eqn.primitive.multiple_results else [out]
            rule = rule_for(eqn.primitive)
            if rule is not None and (only is None or eqn.primitive.name in only):
                inputs = tuple(Array(v.shape, v.dtype) for v in values)
                outputs = tuple(Array(v.shape, v.dtype) for v in out)
                choices = itertools.product(*(candidates(a, n, outers) for a in inputs))
                poisoned = itertools.product(*(padded_candidates(a, n) for a in inputs))
                poisoned = itertools.islice(poisoned, limit) if minds_padding(eqn.primitive) else ()
                checked = set()  # what the placements lead to; most lead to what others have led to
                for placements in itertools.chain(itertools.islice(choices, limit), poisoned):
                    hints = [()]
                    if wants:
                        hints = [
                            (s,) * len(outputs)
                            for s in candidates(outputs[0], n, outers) + padded_candidates(outputs[0], n)
                            if isinstance(s, Split)
                        ] + [()]
                    for hint in hints:
                        site = Site(eqn.primitive, eqn.params, inputs, outputs, n, hint)
                        decisions = rule(site, placements)
                        decisions = (
                            [] if decisions is None else [decisions] if hasattr(decisions, "operands") else decisions
                        )
                        for decision in decisions:
                            key = (decision.operands, decision.results)
                            plainly = decision.emit is None and decision.params is None
                            if not plainly or (key, decision.fill) not in checked:
                                check_decision(eqn, site, decision, values, out, rng, n)
                                checked.add((key, decision.fill))
                            padded = any(map(is_padded, decision.operands + decision.results))
                            name = f"{eqn.primitive.name}, padded" if padded else eqn.primitive.name
                            offered.setdefault(name, set()).add(key)
        env.update(zip(eqn.outvars, out, strict=True))
    return [v.val if hasattr(v, "val") else env[v] for v in jaxpr.outvars]
