"""Reductions, scans, sorting and pooling.

What happens to a split depends on whether the primitive works along that dimension or beside it:

    reduce_sum(split), that dimension reduced     -> partial      each replica sums its block
    reduce_max(split), that dimension reduced     -> partial max
    all, any(split), that dimension reduced       -> partial min, partial max: is every gradient finite?
    reduce_*(split), another dimension reduced    -> split        dimensions are renumbered
    argmax, cumsum, sort along the split          -> gather       the answer needs all of the dimension
    argmax, cumsum, sort along another dimension  -> split
    pooling over a window of 1                    -> split        batch and channels; space is gathered
    reduce_sum, cumsum, sum pooling(partial)      -> partial      linear; likewise max of partial max
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import compat
from .contract import Rule, Site, Split, register
from .contraction import Index, by_index

Indices = Callable[[Site], Iterator[Index]]


def _kept(site: Site, dims: Collection[int], arrays: int) -> Iterator[Index]:
    """The dimensions outside `dims`, which the results no longer have. Operands after `arrays` are scalars."""
    shape = site.inputs[0].shape
    scalars = (None,) * (len(site.inputs) - arrays)
    kept = [d for d in range(len(shape)) if d not in dims]
    for position, d in enumerate(kept):
        yield Index(shape[d], (Split(d),) * arrays + scalars, (Split(position),) * len(site.outputs))


def _reduced(site: Site, dims: Collection[int]) -> Iterator[Index]:
    """The dimensions `dims` themselves: a block of them gives one term of the result."""
    for d in dims:
        yield Index(site.inputs[0].shape[d], (Split(d),), (None,))


def _axes(as_terms: Callable[[Any], bool]) -> Indices:
    """A reduction over `axes`; `as_terms(dtype)`: may replicas reduce their blocks and combine the terms later?"""

    def indices(site: Site) -> Iterator[Index]:
        yield from _kept(site, site.axes, arrays=1)
        if as_terms(site.inputs[0].dtype):
            yield from _reduced(site, site.axes)

    return indices


def _any(dtype: Any) -> bool:
    return True


def _none(dtype: Any) -> bool:
    """There is no partial product, and the place of a maximum is no maximum of places."""
    return False


def _ordered(dtype: Any) -> bool:
    """JAX compares complex numbers lexicographically, collectives do not compare them at all."""
    return not jnp.issubdtype(dtype, np.complexfloating)


def _boolean(dtype: Any) -> bool:
    """`any` is the maximum of booleans and `all` their minimum; bitwise on integers they are neither."""
    return dtype == np.bool_


def _reduce(site: Site) -> Iterator[Index]:
    """The operands, then one initial value for each. What the user's function does is not known here."""
    yield from _kept(site, site.dimensions, arrays=len(site.inputs) // 2)


def _beside(parameter: str) -> Indices:
    """Every dimension but the one that this parameter names: the primitive works along that one, line by line."""

    def indices(site: Site) -> Iterator[Index]:
        along = site.params[parameter] % site.inputs[0].ndim
        for d, size in enumerate(site.inputs[0].shape):
            if d != along:
                yield Index(size, (Split(d),) * len(site.inputs), (Split(d),) * len(site.outputs))

    return indices


def _outside_windows(arrays: Callable[[Site], int]) -> Indices:
    """The dimensions that a sliding window leaves alone: batch and channels of a pooling layer."""

    def indices(site: Site) -> Iterator[Index]:
        scalars = (None,) * (len(site.inputs) - arrays(site))
        for d, size in enumerate(site.inputs[0].shape):
            if _window_is_trivial(site, d):
                yield Index(size, (Split(d),) * arrays(site) + scalars, (Split(d),) * len(site.outputs))

    return indices


def _window_is_trivial(site: Site, d: int) -> bool:
    dilated = "base_dilation" in site.params and site.base_dilation[d] != 1
    moves = site.window_strides[d] != 1 or tuple(site.padding[d]) != (0, 0)
    return site.window_dimensions[d] == 1 and not moves and not dilated


def _pooling(linear: tuple[int, ...] = (), op: str = "add") -> Rule:
    return by_index(_outside_windows(lambda site: len(site.inputs)), linear, op)


_P = compat.primitives

register(by_index(_axes(_any), linear=(0,)), *_P("reduce_sum"))
register(by_index(_axes(_ordered), linear=(0,), op="max"), *_P("reduce_max"))
register(by_index(_axes(_ordered), linear=(0,), op="min"), *_P("reduce_min"))
register(by_index(_axes(_boolean), linear=(0,), op="max"), *_P("reduce_or"))
register(by_index(_axes(_boolean), linear=(0,), op="min"), *_P("reduce_and"))
register(by_index(_axes(_none)), *_P("reduce_prod reduce_xor argmax argmin"))
register(by_index(_reduce), *_P("reduce"))

register(by_index(_beside("axis"), linear=(0,)), *_P("cumsum"))
register(by_index(_beside("axis"), linear=(0,), op="max"), *_P("cummax"))
register(by_index(_beside("axis"), linear=(0,), op="min"), *_P("cummin"))
register(by_index(_beside("axis")), *_P("cumprod cumlogsumexp top_k"))
register(by_index(_beside("dimension")), *_P("sort"))
register(by_index(_beside("reduction_dimension")), *_P("approx_top_k"))

register(_pooling(linear=(0,)), *_P("reduce_window_sum select_and_scatter_add select_and_gather_add"))
register(_pooling(linear=(0,), op="max"), *_P("reduce_window_max"))
register(_pooling(linear=(0,), op="min"), *_P("reduce_window_min"))
register(by_index(_outside_windows(lambda site: 2)), *_P("select_and_scatter"))
register(by_index(_outside_windows(lambda site: len(site.inputs) // 2)), *_P("reduce_window"))
