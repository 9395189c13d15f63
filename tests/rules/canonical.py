"""One small equation for every primitive that has a rule: what the golden file of rules asks about."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardstep._src.core import compat
from shardstep._src.core.layout import Array
from shardstep._src.core.pieces import Piece
from shardstep._src.core.program import Program
from shardstep._src.rules.contract import Site

N = 2
X = jax.ShapeDtypeStruct((4, 6), jnp.float32)
B = jax.ShapeDtypeStruct((4, 6), jnp.bool_)
U = jax.ShapeDtypeStruct((4, 6), jnp.uint32)
S = jax.ShapeDtypeStruct((), jnp.float32)
M = jax.ShapeDtypeStruct((4, 2, 2), jnp.float32)
I4 = jax.ShapeDtypeStruct((4,), jnp.int32)
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
F = np.float32


def _window(f, init):
    return lambda x: lax.reduce_window(x, F(init), f, (1, 2), (1, 2), "VALID")


def _scatter(write):
    return lambda x, i, u: getattr(x.at[i], write)(u)


def _image(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# What users write, by the primitive that JAX makes of it.
TRACED = {
    "add_any": (lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.cos(x)))(x), X),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "argmin": (lambda x: jnp.argmin(x, 1), X),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 2), X),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), X),
    "cholesky": (lax.linalg.cholesky, M),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), X, X),
    "conv_general_dilated": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        _image((4, 8, 8, 2)),
        _image((3, 3, 2, 6)),
    ),
    "convert_element_type": (lambda x: x.astype(jnp.bfloat16), X),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), X),
    "cummax": (lambda x: lax.cummax(x, 1), X),
    "cummin": (lambda x: lax.cummin(x, 1), X),
    "cumprod": (lambda x: lax.cumprod(x, 1), X),
    "cumsum": (lambda x: lax.cumsum(x, 1), X),
    "dot_general": (lambda x, y: x @ y, X, jax.ShapeDtypeStruct((6, 8), jnp.float32)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 6)), X, jax.ShapeDtypeStruct((), jnp.int32)),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(0))),
        X,
        _image((1, 6)),
        jax.ShapeDtypeStruct((), jnp.int32),
    ),
    "eigh": (lambda x: lax.linalg.eigh(x), M),
    "fft": (lambda x: jnp.fft.rfft(x), X),
    "gather": (lambda x, i: x.at[i].get(mode="clip"), X, I4),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (4, 6), 1),),
    "lu": (lax.linalg.lu, M),
    "pad": (lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 1, 0))), X, S),
    "polynomial": (lambda x: jnp.polyval(jnp.arange(3.0), x), X),
    "qr": (lambda x: lax.linalg.qr(x), M),
    "random_bits": (lambda keys: jax.vmap(lambda k: jax.random.bits(k, (6,)))(keys), KEYS),
    "random_clone": (jax.random.clone, KEYS),
    "random_fold_in": (jax.vmap(jax.random.fold_in), KEYS, I4),
    "random_gamma": (jax.vmap(lambda k, a: jax.random.gamma(k, a)), KEYS, X),
    "random_seed": (jax.vmap(jax.random.key), I4),
    "random_split": (jax.vmap(lambda k: jax.random.split(k, 6)), KEYS),
    "random_unwrap": (jax.random.key_data, KEYS),
    "random_wrap": (jax.random.wrap_key_data, jax.ShapeDtypeStruct((4, 2), jnp.uint32)),
    "reduce_and": (lambda x: jnp.all(x, 1), B),
    "reduce_max": (lambda x: jnp.max(x, 1), X),
    "reduce_min": (lambda x: jnp.min(x, 1), X),
    "reduce_or": (lambda x: jnp.any(x, 1), B),
    "reduce_prod": (lambda x: jnp.prod(x, 1), X),
    "reduce_sum": (lambda x: jnp.sum(x, 1), X),
    "reduce_window_max": (_window(lax.max, -np.inf), X),
    "reduce_window_min": (_window(lax.min, np.inf), X),
    "reduce_window_sum": (_window(lax.add, 0), X),
    "reshape": (lambda x: x.reshape(24), X),
    "rev": (lambda x: lax.rev(x, (1,)), X),
    "scatter": (_scatter("set"), X, I4, X),
    "scatter-add": (_scatter("add"), X, I4, X),
    "scatter-max": (_scatter("max"), X, I4, X),
    "scatter-min": (_scatter("min"), X, I4, X),
    "scatter-mul": (_scatter("multiply"), X, I4, X),
    "scatter-sub": (_scatter("subtract"), X, I4, X),
    "select_and_gather_add": (lambda x: jax.jvp(_window(lax.max, -np.inf), (x,), (x,))[1], X),
    "select_and_scatter_add": (lambda x: jax.grad(lambda x: jnp.sum(_window(lax.max, -np.inf)(x)))(x), X),
    "select_n": (lambda b, x, y: lax.select(b, x, y), B, X, X),
    "slice": (lambda x: x[:, :4], X),
    "sort": (lambda x: lax.sort(x, dimension=1), X),
    "split": (lambda x: lax.split(x, (2, 4), 1), X),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), _image((1, 4, 6))),
    "svd": (lambda x: lax.linalg.svd(x), M),
    "tile": (lambda x: jnp.tile(x, (1, 2)), X),
    "top_k": (lambda x: lax.top_k(x, 2), X),
    "transpose": (lambda x: x.T, X),
    "triangular_solve": (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), M, M),
    "tridiagonal_solve": (lax.linalg.tridiagonal_solve, X, X, X, _image((4, 6, 2))),
}

UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clz conj copy cos cosh"
    " digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic name neg"
    " not one_minus_square population_count real reduce_precision round rsqrt sign sin sinh sqrt square"
    " stop_gradient tan tanh zeros_like"
)
BINARY = (
    "add and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul mulhi ne"
    " nextafter or polygamma pow rem shift_left shift_right_arithmetic shift_right_logical sub xor zeta"
)
TERNARY = "clamp regularized_incomplete_beta"
ARITY = {name: n for n, names in enumerate((UNARY, BINARY, TERNARY), 1) for name in names.split()}

_WINDOW = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
_NAMED = {"axes": ("data",), "axis_index_groups": None}
_GATHERED = {"all_gather_dimension": 0, "tiled": True, "axis_index_groups": None}
# What takes more than a line to write in JAX: the parameters that its rule reads, the shapes that go in and come out.
BY_HAND = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), (_NAMED, [(4, 6)], [(4, 6)])),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), (_GATHERED, [(4, 6)], [(8, 6)])),
    **dict.fromkeys(
        ("ppermute", "all_to_all", "reduce_scatter", "ragged_all_to_all", "pbroadcast", "pvary"),
        ({}, [(4, 6)], [(4, 6)]),
    ),
    **dict.fromkeys(("eig", "geqrf", "hessenberg", "schur", "tridiagonal"), ({}, [(4, 2, 2)], [(4, 2, 2)])),
    **dict.fromkeys(("cholesky_update", "householder_product"), ({}, [(4, 2, 2), (4, 2)], [(4, 2, 2)])),
    **dict.fromkeys(("debug_callback", "debug_print"), ({}, [(4, 6)], [])),
    **dict.fromkeys(("io_callback", "pure_callback"), ({}, [(4, 6)], [(4, 6)])),
    **dict.fromkeys(
        ("device_put", "layout_constraint", "optimization_barrier", "reshard", "sharding_constraint"),
        ({}, [(4, 6)], [(4, 6)]),
    ),
    "axis_index": ({}, [], [()]),
    "empty": ({"shape": (4, 6)}, [], [(4, 6)]),
    "empty2": ({}, [], [()]),
    "iota_2x32_shape": ({"shape": (4, 6)}, [], [(4, 6), (4, 6)]),
    "lu_pivots_to_permutation": ({}, [(4, 2)], [(4, 2)]),
    "ormqr": ({}, [(4, 2, 2), (4, 2), (4, 2, 2)], [(4, 2, 2)]),
    "ragged_dot_general": ({}, [(4, 6), (2, 6, 8), (2,)], [(4, 8)]),
    "reduce": ({"dimensions": (1,)}, [(4, 6), ()], [(4,)]),
    "reduce_window": (_WINDOW, [(4, 6), ()], [(4, 3)]),
    "reduce_xor": ({"axes": (1,)}, [(4, 6)], [(4,)]),
    "rng_bit_generator": ({"shape": (4, 6)}, [(4,)], [(4,), (4, 6)]),
    "rng_uniform": ({"shape": (4, 6)}, [(), ()], [(4, 6)]),
    "select_and_scatter": (_WINDOW, [(4, 6), (4, 3), ()], [(4, 6)]),
    "stacked": ({"piece": Piece(Program((), (), ()), (True, False), 4)}, [(4, 6), (6,)], [(4, 6)]),
    "stack": ({"axis": 0}, [(4, 6), (4, 6)], [(2, 4, 6)]),
    "symmetric_product": ({}, [(4, 2, 6), (4, 2, 2)], [(4, 2, 2)]),
    "threefry2x32": ({}, [(4, 6)] * 4, [(4, 6)] * 2),
    "tie": ({}, [(4, 6), (4, 6)], [(4, 6)]),
    "unstack": ({"axis": 0}, [(2, 4, 6)], [(4, 6), (4, 6)]),
}


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _equations(compat.open_jaxpr(value)[0])


def example(primitive) -> Site:
    """The example of this primitive."""
    name = primitive.name
    if name in TRACED:
        f, *args = TRACED[name]
        eqn = next(e for e in _equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive is primitive)
        inputs, outputs = ([Array(v.aval.shape, v.aval.dtype) for v in side] for side in (eqn.invars, eqn.outvars))
        return Site(primitive, dict(eqn.params), tuple(inputs), tuple(outputs), N)
    array = Array(X.shape, np.dtype(np.float32))
    if name in BY_HAND:
        params, *sides = BY_HAND[name]
        inputs, outputs = (tuple(Array(shape, array.dtype) for shape in side) for side in sides)
        return Site(primitive, params, inputs, outputs, N)
    return Site(primitive, {}, (array,) * ARITY[name], (array,), N)
