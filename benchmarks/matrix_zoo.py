"""Matrix optimizers, each written leaf by leaf as one finds them: `OPTIMIZERS[name] = (init, update)` for one matrix.

`init(w)` makes the state of a leaf, `update(g, state, count)` its update and new state. `transformation(name)` makes an
Optax optimizer of it; leaves that are not matrices take plain gradient steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

State = Any
Leafwise = tuple[Callable[[jax.Array], State], Callable[[jax.Array, State, jax.Array], tuple[jax.Array, State]]]

_QUINTIC = (3.4445, -4.7750, 2.0315)


def _newton_schulz_step(x: jax.Array) -> jax.Array:
    a, b, c = _QUINTIC
    gram = x @ x.T
    return a * x + (b * gram + c * gram @ gram) @ x


def _orthogonal(iterate: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def orthogonal(x: jax.Array) -> jax.Array:
        wide = x if x.shape[0] <= x.shape[1] else x.T
        done = iterate(wide / (jnp.linalg.norm(wide) + 1e-7))
        return done if x.shape[0] <= x.shape[1] else done.T

    return orthogonal


def _unrolled(x: jax.Array) -> jax.Array:
    for _ in range(5):
        x = _newton_schulz_step(x)
    return x


_ITERATIONS = {
    "fori": lambda x: lax.fori_loop(0, 5, lambda _, x: _newton_schulz_step(x), x),
    "scan": lambda x: lax.scan(lambda x, _: (_newton_schulz_step(x), None), x, length=5)[0],
    "unrolled": _unrolled,
    "while": lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, _newton_schulz_step(c[1])), (0, x))[1],
}


def _muon(iterations: str, dtype: Any = jnp.float32) -> Leafwise:
    orthogonal = _orthogonal(_ITERATIONS[iterations])

    def update(g: jax.Array, m: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.95 * m + g
        nesterov = 0.95 * m + g
        return orthogonal(nesterov.astype(dtype)).astype(jnp.float32) * 0.2 * max(g.shape) ** 0.5, m

    return jnp.zeros_like, update


def _muon_without_momentum() -> Leafwise:
    orthogonal = _orthogonal(_ITERATIONS["scan"])
    return (lambda w: ()), lambda g, s, count: (orthogonal(g), s)


def _root_eigh(a: jax.Array, power: float) -> jax.Array:
    values, vectors = jnp.linalg.eigh(a)
    return (vectors * jnp.maximum(values, 1e-6) ** power) @ vectors.T


def _root_svd(a: jax.Array, power: float) -> jax.Array:
    left, values, right = jnp.linalg.svd(a)
    return (left * jnp.maximum(values, 1e-6) ** power) @ right


def _root_newton(a: jax.Array, power: float) -> jax.Array:
    """The coupled Newton iteration for the inverse fourth root, as in distributed Shampoo."""
    p = round(-1 / power)
    eye = jnp.eye(a.shape[0], dtype=a.dtype)
    a = a + 1e-3 * eye
    z = (1 + p) / (2 * jnp.linalg.norm(a))

    def iterate(c: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, m, h, _ = c
        step = ((1 + 1 / p) * eye) - m / p
        new = jnp.linalg.matrix_power(step, p) @ m
        return i + 1, new, h @ step, jnp.max(jnp.abs(new - eye))

    def goes_on(c: tuple[jax.Array, ...]) -> jax.Array:
        return (c[0] < 30) & (c[3] > 1e-5)

    first = (0, a * z, eye * z ** (1 / p), jnp.max(jnp.abs(a * z - eye)))
    return lax.while_loop(goes_on, iterate, first)[2]


def _shampoo(root: Callable[[jax.Array, float], jax.Array], every: int = 1) -> Leafwise:
    def init(w: jax.Array) -> State:
        m, n = w.shape
        kept = {"left": 1e-2 * jnp.eye(m), "right": 1e-2 * jnp.eye(n), "momentum": jnp.zeros_like(w)}
        return kept if every == 1 else {**kept, "roots": (jnp.eye(m), jnp.eye(n))}

    def update(g: jax.Array, s: State, count: jax.Array) -> tuple[jax.Array, State]:
        left, right = 0.9 * s["left"] + g @ g.T, 0.9 * s["right"] + g.T @ g

        def fresh() -> tuple[jax.Array, jax.Array]:
            return root(left, -0.25), root(right, -0.25)

        roots = fresh() if every == 1 else lax.cond(count % every == 0, fresh, lambda: s["roots"])
        momentum = 0.9 * s["momentum"] + roots[0] @ g @ roots[1]
        kept = {"left": left, "right": right, "momentum": momentum}
        return momentum, kept if every == 1 else {**kept, "roots": roots}

    return init, update


def _soap() -> Leafwise:
    """Adam in the eigenbasis of Shampoo's preconditioners, which one step of orthogonal iteration follows."""

    def init(w: jax.Array) -> State:
        m, n = w.shape
        left, right = (1e-2 * jnp.diag(1.0 + jnp.arange(k) / k) for k in (m, n))
        sides = {"L": left, "R": right, "QL": jnp.eye(m), "QR": jnp.eye(n)}
        return {**sides, "m": jnp.zeros_like(w), "v": jnp.zeros_like(w)}

    def update(g: jax.Array, s: State, count: jax.Array) -> tuple[jax.Array, State]:
        left, right = 0.95 * s["L"] + 0.05 * g @ g.T, 0.95 * s["R"] + 0.05 * g.T @ g
        m = 0.9 * s["m"] + 0.1 * g
        ql, qr = s["QL"], s["QR"]
        v = 0.95 * s["v"] + 0.05 * (ql.T @ g @ qr) ** 2
        u = ql @ ((ql.T @ m @ qr) / (jnp.sqrt(v) + 1e-3)) @ qr.T
        ql, qr = jnp.linalg.qr(left @ ql)[0], jnp.linalg.qr(right @ qr)[0]
        return 0.1 * u, {"L": left, "R": right, "QL": ql, "QR": qr, "m": m, "v": v}

    return init, update


def _kron() -> Leafwise:
    """PSGD with triangular factors: u = Ql' Ql g Qr' Qr."""

    def init(w: jax.Array) -> State:
        return {"l": jnp.eye(w.shape[0]), "r": jnp.eye(w.shape[1]), "m": jnp.zeros_like(w)}

    def update(g: jax.Array, s: State, count: jax.Array) -> tuple[jax.Array, State]:
        m = 0.9 * s["m"] + 0.1 * g
        left, right = s["l"], s["r"]
        a = left @ m @ right.T
        probe = jnp.sin(1.0 + jnp.arange(g.size, dtype=jnp.float32)).reshape(g.shape)
        b = jax.scipy.linalg.solve_triangular(left, probe, trans=1)
        b = jax.scipy.linalg.solve_triangular(right, b.T, trans=1).T

        def moved(q: jax.Array, plus: jax.Array, minus: jax.Array) -> jax.Array:
            return q - 0.1 / (jnp.linalg.norm(plus + minus) + 1e-6) * jnp.triu(plus - minus) @ q

        left, right = moved(left, a @ a.T, b @ b.T), moved(right, a.T @ a, b.T @ b)
        return 0.1 * left.T @ (left @ m @ right.T) @ right, {"l": left, "r": right, "m": m}

    return init, update


def _inverses() -> Leafwise:
    """As K-FAC: damped inverses of both factors."""

    def init(w: jax.Array) -> State:
        return {"a": jnp.eye(w.shape[0]), "b": jnp.eye(w.shape[1])}

    def update(g: jax.Array, s: State, count: jax.Array) -> tuple[jax.Array, State]:
        a, b = 0.9 * s["a"] + g @ g.T, 0.9 * s["b"] + g.T @ g
        eye = jnp.eye(a.shape[0])
        inverse = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a + 0.1 * eye), eye)
        return inverse @ g @ jnp.linalg.inv(b + 0.1 * jnp.eye(b.shape[0])), {"a": a, "b": b}

    return init, update


def _spectral_clip() -> Leafwise:
    def update(g: jax.Array, m: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + g
        left, values, right = jnp.linalg.svd(m, full_matrices=False)
        return (left * jnp.minimum(values, 0.05)) @ right, m

    return jnp.zeros_like, update


def _truncated() -> Leafwise:
    """As GaLore: momentum of a projection on the leading singular vectors."""
    rank = 4

    def init(w: jax.Array) -> State:
        return {"p": jnp.eye(w.shape[0], rank), "m": jnp.zeros((rank, w.shape[1]))}

    def update(g: jax.Array, s: State, count: jax.Array) -> tuple[jax.Array, State]:
        def fresh() -> jax.Array:
            return jnp.linalg.svd(g, full_matrices=False)[0][:, :rank]

        # the sign of a singular vector is arbitrary, its projection is not
        p = lax.cond(count % 2 == 0, fresh, lambda: s["p"])
        m = 0.9 * (p.T @ s["p"]) @ s["m"] + p.T @ g
        return p @ m, {"p": p, "m": m}

    return init, update


OPTIMIZERS: dict[str, Leafwise] = {
    "muon_fori": _muon("fori"),
    "muon_scan": _muon("scan"),
    "muon_unrolled": _muon("unrolled"),
    "muon_while": _muon("while"),
    "muon_bf16": _muon("scan", jnp.bfloat16),
    "muon_without_momentum": _muon_without_momentum(),
    "shampoo_eigh": _shampoo(_root_eigh),
    "shampoo_svd": _shampoo(_root_svd),
    "shampoo_newton": _shampoo(_root_newton),
    "shampoo_every_2": _shampoo(_root_eigh, every=2),
    "soap": _soap(),
    "kron": _kron(),
    "kfac": _inverses(),
    "spectral_clip": _spectral_clip(),
    "galore": _truncated(),
}


def transformation(name: str, rate: float = 0.05, vmapped: bool = False) -> optax.GradientTransformation:
    """An Optax optimizer of one of these; `vmapped`: leaves are stacks of matrices."""
    leaf_init, leaf_update = OPTIMIZERS[name]
    if vmapped:
        leaf_init, leaf_update = jax.vmap(leaf_init), jax.vmap(leaf_update, in_axes=(0, 0, None))
    rank = 3 if vmapped else 2

    def init(params: Any) -> Any:
        leaves = jax.tree.leaves(params)
        return {"count": jnp.zeros((), jnp.int32), "leaves": [leaf_init(w) if w.ndim == rank else () for w in leaves]}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(grads)
        done = [
            leaf_update(g, s, state["count"]) if g.ndim == rank else (g, s)
            for g, s in zip(leaves, state["leaves"], strict=True)
        ]
        updates = jax.tree.unflatten(tree, [-rate * u for u, _ in done])
        return updates, {"count": state["count"] + 1, "leaves": [s for _, s in done]}

    return optax.GradientTransformation(init, update)


def layers(count: int, shape: tuple[int, int], stacked: bool = False) -> Any:
    """Weights of `count` layers, each a matrix up and one of the same shape down (used transposed)."""
    ups, downs = (
        [0.3 * jax.random.normal(jax.random.key(10 * i + k), shape) / shape[0] ** 0.5 for i in range(count)]
        for k in (1, 2)
    )
    if stacked:
        return {"up": jnp.stack(ups), "down": jnp.stack(downs), "bias": jnp.zeros(shape[0])}
    pairs = zip(ups, downs, strict=True)
    return {"layers": [{"up": u, "down": d} for u, d in pairs], "bias": jnp.zeros(shape[0])}


def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Residual layers; those that are stacked are scanned."""

    def layer(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(x @ w["up"]) @ w["down"].T

    x, y = batch
    if "layers" in params:
        x = functools.reduce(layer, params["layers"], x)
    else:
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, {k: params[k] for k in ("up", "down")})
    return jnp.mean((x + params["bias"] - y) ** 2)


def training(optimizer: optax.GradientTransformation, params: Any) -> tuple[Callable[..., Any], Any]:
    """(step, state)"""

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, slots = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, slots = optimizer.update(grads, slots, params)
        return (optax.apply_updates(params, updates), slots), value

    return step, (params, optimizer.init(params))


def examples(size: int, width: int) -> tuple[jax.Array, jax.Array]:
    x, y = (jax.random.normal(jax.random.key(100 + k), (size, width)) for k in range(2))
    return x, y
