"""The only file that knows JAX versions or touches `jax._src`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import primitives as exported

from .errors import ShardstepError

# Primitives that training steps contain and JAX does not export, with the module that defines them.
_HOMES = {
    "all_gather_invariant": "lax.parallel",
    "call_hi_primitive": "hijax",
    "cholesky_update": "lax.linalg",
    "composite": "lax.lax",
    "custom_lin": "custom_derivatives",
    "custom_vmap": "custom_batching",
    "debug_callback": "debugging",
    "debug_print": "debugging",
    "empty": "lax.lax",
    "from_edtype": "lax.lax",
    "geqrf": "lax.linalg",
    "inspect_sharding": "debugging",
    "io_callback": "callback",
    "iota_2x32_shape": "random.prng",
    "layout_constraint": "pjit",
    "linear_call": "custom_derivatives",
    "lu_pivots_to_permutation": "lax.linalg",
    "mulhi": "lax.lax",
    "optimization_barrier": "lax.lax",
    "ormqr": "lax.linalg",
    "platform_index": "lax.control_flow",
    "pbroadcast": "lax.parallel",
    "psum_invariant": "lax.parallel",
    "pure_callback": "callback",
    "pvary": "core",
    "ragged_dot_general": "lax.lax",
    "random_clone": "random",
    "random_unwrap": "random.prng",
    "random_wrap": "random.prng",
    "reduce_scatter": "lax.parallel",
    "remat_opt": "custom_derivatives",
    "reshard": "pjit",
    "scatter_sub": "lax",
    "shard_map": "shard_map",
    "split": "lax",
    "stack": "lax.lax",
    "symmetric_product": "lax.linalg",
    "tie": "lax.lax",
    "tile": "lax.lax",
    "to_edtype": "lax.lax",
    "unstack": "lax.lax",
    "zeros_like": "ad_util",
}


class Lifetime(NamedTuple):
    """The JAX versions that are known to have a primitive: from `since` on, and no longer in `until`."""

    since: tuple[int, int] = (0, 10)
    until: tuple[int, int] | None = None

    def includes(self, version: tuple[int, int]) -> bool:
        return self.since <= version and (self.until is None or version < self.until)


# Primitives that not every supported JAX has. All others must be there.
_LIFETIMES = {
    "log2": Lifetime(since=(0, 12)),
    "one_minus_square": Lifetime(since=(0, 12)),
    "polynomial": Lifetime(since=(0, 12)),
}


def primitive(name: str) -> Any:
    """The primitive `<name>_p`; None only where `_LIFETIMES` says that this JAX does not have it.

    Any other name that is not found was misspelled, or JAX renamed or moved it: its rule would silently be lost.
    """
    found = getattr(exported, f"{name}_p", None)
    if found is None and name in _HOMES:
        found = _at_home(name)
    if found is None and _LIFETIMES.get(name, Lifetime()).includes(_VERSION):
        raise ShardstepError(
            f"JAX {jax.__version__} has no primitive {name!r}. If it was renamed, moved or removed, say so in _HOMES or"
            " _LIFETIMES of shardstep/_src/core/compat.py; otherwise install a JAX that shardstep supports"
        )
    return found


_VERSION: tuple[int, int] = jax.__version_info__[:2]

CPU_DROPS_BARRIERS = _VERSION < (0, 12)  # XLA:CPU then merges what a barrier kept apart, before it decides on memory
CPU_MULTIPLIES_WIDE = _VERSION < (0, 12)  # XLA:CPU then copies 16-bit operands of products to float32


def _at_home(name: str) -> Any:
    try:
        module = importlib.import_module(f"jax._src.{_HOMES[name]}")
    except ModuleNotFoundError:  # JAX moved the module
        return None
    return getattr(module, f"{name}_p", None)


def primitives(names: str) -> list[Any]:
    """The primitives of these space-separated names, without those that are newer or older than this JAX."""
    return [p for p in map(primitive, names.split()) if p is not None]


def source_line(sources: Sequence[Any]) -> str:
    """`train.py:31 (loss_fn)`: where in the user's program an equation was written.

    The innermost frame outside installed packages, of the equation or else of the calls around it: users want to see
    their own line, not Flax's or Optax's.
    """
    innermost = []
    for source in sources:
        lines = _lines(source.traceback)
        innermost += lines[:1]
        if own := next((line for line in lines if not any(package in line for package in _PACKAGES)), None):
            return own
    return innermost[0] if innermost else "unknown"


_PACKAGES = [f"{os.sep}{kind}-packages{os.sep}" for kind in ("site", "dist")]


@functools.lru_cache(maxsize=1024)  # one line of a step makes equations for every leaf
def _lines(traceback: Any) -> list[str]:
    """Where an equation was written, innermost first."""
    source = source_info_util.new_source_info().replace(traceback=traceback)
    return source_info_util.summarize(source, num_frames=100).splitlines()[::-1]


def is_backward(sources: Sequence[Any]) -> bool:
    """Is it part of a backward pass? JAX's name stack says `transpose(jvp(...))` there."""
    return any("transpose(" in str(s.name_stack) for s in sources)


def is_differentiated(sources: Sequence[Any]) -> bool:
    """Is it part of a function that is differentiated, forward or backward?"""
    return any(word in str(s.name_stack) for s in sources for word in ("jvp(", "transpose("))


def at_source(sources: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Trace under the user's source line, so that profiles of the rewritten step point at the user's code."""
    traceback = next((s.traceback for s in sources if s.traceback is not None), None)
    return source_info_util.user_context(traceback, name_stack=sources[0].name_stack)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """(jaxpr, constants) of a jaxpr in either of its forms: since JAX 0.12 the two are one class."""
    if hasattr(jaxpr, "consts"):
        return getattr(jaxpr, "jaxpr", jaxpr), list(jaxpr.consts)
    return jaxpr, []


def expanded(eqn: Any) -> Any:
    """The jaxpr of what JAX 0.12 keeps as one primitive until it is lowered (`jnp.nonzero`); None for anything else."""
    kind = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if kind is None or not all(hasattr(v.aval, "shape") and hasattr(v.aval, "dtype") for v in eqn.invars):
        return None

    def expand(*leaves: Any) -> Any:
        return jax.tree.leaves(kind.expand(*jax.tree.unflatten(kind.in_tree, leaves)))

    return jax.make_jaxpr(expand)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))


def manual_axes(params: Any) -> frozenset[str]:
    """The mesh axes that a shard_map gives its body."""
    return frozenset(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])


def untyped_collective(name: str, params: Any) -> Any:
    """The parameters of `psum_invariant` or `all_gather_invariant` as the untyped collective has them."""
    return {**params, "axis_index_groups": None} if name.endswith("_invariant") else params


def key_impl_name(dtype: Any) -> str:
    """`threefry2x32`, `rbg`, ...: the generator that a key array's dtype belongs to."""
    return dtype._impl.name


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes along which JAX's types say that `x` differs between replicas."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def scan_counts(params: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has, first among its operands."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carry)


def with_scan_counts(params: Any, consts: int, carries: int) -> dict[str, Any]:
    """The parameters of a scan that has so many of both, as `scan_counts` reads them."""
    return {**params, "num_consts": consts, "num_carry": carries}


def register_array_type(kind: type, as_array: Callable[[Any], jax.Array]) -> None:
    """Let `jax.jit`, `jnp` functions and `jax.device_put` take objects of this type in place of arrays."""
    from jax._src import core, dtypes
    from jax._src.array import ArrayImpl
    from jax._src.interpreters import pxla

    def shard_args(xs: Any, *rest: Any) -> Any:
        return pxla.shard_arg_handlers[ArrayImpl]([as_array(x) for x in xs], *rest)

    core.pytype_aval_mappings[kind] = lambda x: core.ShapedArray(x.shape, x.dtype)
    pxla.shard_arg_handlers[kind] = shard_args
    dtypes.canonicalize_value_handlers[kind] = as_array


def static_arguments(step: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The `static_argnums` and `static_argnames` that a function was jitted with."""
    info = _jit_info(step)
    return tuple(getattr(info, "static_argnums", ())), tuple(getattr(info, "static_argnames", ()))


def debugs_nans() -> bool:
    """Does JAX look for NaNs (or infinities) in what a program returns?"""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # type: ignore[attr-defined]


def jitted_mesh(step: Any) -> jax.sharding.Mesh | None:
    """The mesh of the `in_shardings` that a function was jitted with, if it was."""
    shardings = getattr(_jit_info(step), "in_shardings_leaves", ())
    meshes = (s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, jax.sharding.Mesh)), None)


def coordination_client() -> Any:
    """The service through which processes find each other; None where there is only one. Its words need no device."""
    return importlib.import_module("jax._src.distributed").global_state.client


def _jit_info(step: Any) -> Any:
    """What `jax.jit` was told, also where functions are wrapped around the jitted one; None without a jit."""
    while step is not None:
        if (info := getattr(step, "_jit_info", None)) is not None:
            return info
        step = getattr(step, "__wrapped__", None)
    return None
