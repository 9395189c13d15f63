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
from numpy_primitives import evaluate

from shardstep._src.core.layout import PARTIAL, REPLICATED, Array, Partial, Split, divides, is_padded, local_shape
from shardstep._src.rules import Block, Local, Site, rule_for
from shardstep._src.rules.contract import filled, minds_padding, neutral


def cut(value, placement, n, rng):
    """The n blocks that replicas hold of `value`."""
    xp = np if isinstance(value, np.ndarray) else jnp
    if isinstance(placement, Split) and placement.extent:
        missing = placement.extent - value.shape[placement.dim]
        room = poison((*value.shape[: placement.dim], missing, *value.shape[placement.dim + 1 :]), value, rng)
        return xp.split(xp.concatenate([value, room], placement.dim), n, axis=placement.dim)
    if isinstance(placement, Split):
        d, outer = placement.dim, placement.outer
        shape = value.shape
        seen = value.reshape(*shape[:d], outer, shape[d] // outer, *shape[d + 1 :])
        return [b.reshape(local_shape(shape, placement, n)) for b in xp.split(seen, n, axis=d + 1)]
    if isinstance(placement, Partial) and placement.op == "add":
        with np.errstate(all="ignore"):
            # as large as the value, so that rounding them is rounding it; what stands in padding may be huge
            sizes = np.abs(np.asarray(value)[np.isfinite(value)]).astype(np.float64)
            largest = sizes[sizes < 1e30].max(initial=0)
            scale = 2.0 ** np.floor(np.log2(largest / 4)) if 0 < largest < 4 else 1.0
            terms = [(scale * rng.integers(-4, 5, value.shape)).astype(value.dtype) for _ in range(n - 1)]
            return [*terms, value - sum(terms, xp.zeros_like(value))]
    if isinstance(placement, Partial):  # max or min: one replica holds the value, the others something weaker
        weaker = np.minimum if placement.op == "max" else np.maximum
        other = rng.integers(-4, 5, value.shape).astype(value.dtype)
        return [value, *[weaker(value, other)] * (n - 1)]
    return [value] * n


def poison(shape, like, rng):
    """What may stand in padding: anything. NaN, infinities, numbers out of all range."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(17, impl=jax.random.key_impl(like)), shape)
    if jnp.issubdtype(like.dtype, jnp.inexact):
        with np.errstate(all="ignore"):
            return rng.choice([np.nan, np.inf, -np.inf, 3e38], shape).astype(like.dtype)
    if like.dtype == jnp.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    info = jnp.iinfo(like.dtype)
    return rng.choice([int(info.min), int(info.max), 1, 5], shape).astype(like.dtype)


def join(blocks, placement, shape):
    """The value that the replicas' blocks stand for."""
    xp = np if all(isinstance(b, np.ndarray) for b in blocks) else jnp
    if isinstance(placement, Split) and placement.extent:
        kept = tuple(slice(0, shape[placement.dim]) if d == placement.dim else slice(None) for d in range(len(shape)))
        return xp.concatenate(blocks, placement.dim)[kept]
    if isinstance(placement, Split):
        d, outer, n = placement.dim, placement.outer, len(blocks)
        seen = [b.reshape(*shape[:d], outer, shape[d] // outer // n, *shape[d + 1 :]) for b in blocks]
        return xp.concatenate(seen, axis=d + 1).reshape(shape)
    if isinstance(placement, Partial):
        with np.errstate(all="ignore"):
            return {"add": sum, "max": lambda b: np.stack(b).max(0), "min": lambda b: np.stack(b).min(0)}[placement.op](
                blocks
            )
    for block in blocks[1:]:
        one, other = (x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in map(as_data, (blocks[0], block)))
        np.testing.assert_array_equal(other, one, "a replicated result differs between replicas")
    return blocks[0]


def cut_by_axes(value, layout, sizes, rng):
    """The blocks of all replicas, the first axis outermost: what the second cuts is the first one's block."""
    if not layout:
        return [value]
    if layout[0] == REPLICATED:  # the same along this axis, terms and padding too
        return cut_by_axes(value, layout[1:], sizes[1:], rng) * sizes[0]
    return [b for block in cut(value, layout[0], sizes[0], rng) for b in cut_by_axes(block, layout[1:], sizes[1:], rng)]


def join_by_axes(blocks, layout, sizes, shape):
    shapes = [shape]
    for placement, n in zip(layout, sizes, strict=True):
        shapes.append(local_shape(shapes[-1], placement, n))
    for placement, n, whole in reversed(list(zip(layout, sizes, shapes, strict=False))):
        blocks = [join(blocks[i : i + n], placement, whole) for i in range(0, len(blocks), n)]
    return blocks[0]


def as_data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def as_numpy(x):
    """On the host, except for keys."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def block_of(shape, layout, index, sizes):
    """Where a replica's block sits; `index` is its place along each axis."""
    local, offsets = shape, [0] * len(shape)
    for placement, i, n in zip(layout, index, sizes, strict=True):
        if isinstance(placement, Split):
            local = local_shape(local, placement, n)
            offsets[placement.dim] += i * local[placement.dim]
    return Block(shape, local, tuple(offsets))


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
    check_decisions(eqn, site, [decision], values, expected, rng, (n,))


def check_decisions(eqn, site, decisions, values, expected, rng, sizes, by_numpy=False):
    """Play all replicas: one decision for each axis, the first outermost; `site` is what the first sees."""
    operands = list(zip(*(d.operands for d in decisions), strict=True)) if values else []
    results = list(zip(*(d.results for d in decisions), strict=True))
    assert len(operands) == len(values) and len(results) == len(expected)
    for array, layout in zip(site.inputs + site.outputs, operands + results, strict=True):
        shape = array.shape
        for placement, n in zip(layout, sizes, strict=True):
            if isinstance(placement, Split):
                assert divides(shape, placement, n), f"{placement} does not divide {shape} by {n}"
            shape = local_shape(shape, placement, n)
    cuts = [cut_by_axes(as_numpy(v), p, sizes, rng) for v, p in zip(values, operands, strict=True)]
    params = dict(next((d.params for d in reversed(decisions) if d.params is not None), eqn.params))
    emit = next((d.emit for d in reversed(decisions) if d.emit is not None), None)
    fills = [d.fill for d in decisions if d.fill]
    fill = [next((f for f in of_one if f), None) for of_one in zip(*fills, strict=True)]
    replicas = []
    for i, index in enumerate(itertools.product(*map(range, sizes))):
        local = Local(
            eqn.primitive,
            params,
            tuple(block_of(a.shape, p, index, sizes) for a, p in zip(site.inputs, operands, strict=True)),
            tuple(block_of(a.shape, p, index, sizes) for a, p in zip(site.outputs, results, strict=True)),
        )
        arrays = [c[i] if by_numpy else jnp.asarray(c[i]) for c in cuts]
        if fill:
            into = filled_by_numpy if by_numpy else filled
            arrays = [into(*given) for given in zip(arrays, local.inputs, operands, fill, strict=True)]
        out = None
        if emit is None and by_numpy:
            out = evaluate(eqn.primitive.name, params, arrays, [a.dtype for a in site.outputs])
        if out is None:
            arrays = list(map(jnp.asarray, arrays))
            out = list(emit(local, *arrays)) if emit else local.bind(*arrays)
        for block, got in zip(local.outputs, out, strict=True):
            assert got.shape == block.local, f"block of shape {got.shape}, layout says {block.local}"
        replicas.append([as_numpy(x) for x in out])
    for j, (want, layout) in enumerate(zip(expected, results, strict=True)):
        got = as_data(join_by_axes([r[j] for r in replicas], layout, sizes, want.shape))
        assert_close(got, as_data(want), tolerance(site))


def filled_by_numpy(x, block, layout, op):
    """As `filled`, which has to be compiled for each shape."""
    if op is None or not isinstance(x, np.ndarray):
        return x if op is None else filled(x, block, layout, op)
    for d in {p.dim for p in layout if isinstance(p, Split) and p.extent}:
        place = np.arange(x.shape[d]) + block.offsets[d]
        inside = (place < block.shape[d]).reshape([-1 if e == d else 1 for e in range(x.ndim)])
        x = np.where(inside, x, np.asarray(neutral(op, x.dtype), x.dtype))
    return x


def assert_close(got, want, rtol):
    assert got.shape == want.shape
    if not jnp.issubdtype(want.dtype, np.inexact):
        np.testing.assert_array_equal(got, want)
        return
    wide = np.complex128 if jnp.issubdtype(want.dtype, np.complexfloating) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    largest = np.abs(want[np.isfinite(want)]).max(initial=0)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * max(1.0, largest))


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
