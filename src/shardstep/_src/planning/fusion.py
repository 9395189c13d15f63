"""What a compiler fuses, by primitive.

view     the same bytes under another shape (reshape)
fused    computed wherever it is read (elementwise, broadcasts, slices); see `Buffer.is_written` for the exceptions
sink     fuses what it reads, but writes its result (reductions, lookups, updates of slices)
opaque   reads and writes memory (products, sorts, factorizations, loops, collectives)
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from ..core import compat

Kind = Enum("Kind", "INPUT VIEW FUSED SINK OPAQUE")

_P = compat.primitives

_KINDS = {
    **dict.fromkeys(
        _P(
            "reshape squeeze transpose copy optimization_barrier stop_gradient sharding_constraint reshard device_put"
            " random_wrap random_unwrap random_clone name"
        ),
        Kind.VIEW,
    ),
    **dict.fromkeys(
        _P(
            "reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor reduce argmax argmin gather"
            " dynamic_update_slice concatenate stack tile reduce_window reduce_window_sum reduce_window_max"
            " reduce_window_min select_and_scatter_add select_and_gather_add cumsum cumprod cummax cummin cumlogsumexp"
        ),
        Kind.SINK,
    ),
    **dict.fromkeys(
        _P(
            "add add_jaxvals sub neg real imag conj complex mul div select_n convert_element_type max min abs"
            " acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil"
            " clamp clz cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a"
            " igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to mulhi ne nextafter"
            " not one_minus_square or polygamma polynomial population_count pow reduce_precision"
            " regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical"
            " sign sin sinh sqrt square tan tanh xor zeta broadcast_in_dim iota slice dynamic_slice pad rev split"
            " unstack zeros_like empty empty2"
        ),
        Kind.FUSED,
    ),
}

_EXPENSIVE = frozenset(
    _P(
        "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma div erf erf_inv erfc exp"
        " exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma pow rem rsqrt sin sinh sqrt"
        " tan tanh zeta"
    )
)


def kind_of(primitive: Any) -> Kind:
    """What no list has is taken to read and write memory."""
    return _KINDS.get(primitive, Kind.OPAQUE)


def is_expensive(primitive: Any) -> bool:
    """To compute again for each reader."""
    return primitive in _EXPENSIVE
