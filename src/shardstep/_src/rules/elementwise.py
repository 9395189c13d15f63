"""Elementwise primitives: every result element reads the operand elements at its own index.

f(split, split)          -> split         one split rules them all; replicated operands are sliced (free)
f(batch split, split)    -> batch split   the state yields
linear(partial)          -> partial       sum_i f(x_i) = f(sum_i x_i)
                         -> reduce first, where that sends no more: it is what the step says, it is smaller before a
                            widening cast, and the compiler can fuse f with who reads it; in a sum with something
                            replicated, a large term among small ones would cost their last bits
nonlinear(partial)       -> reduce first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from ..core import compat
from .contract import PARTIAL, REPLICATED, Decision, Partial, Placement, Rule, Site, Split, partials, register, splits

# Given the placements, may the sum be left for later? Answers the placement every operand then has.
Linearity = Callable[[Site, tuple[Placement, ...]], tuple[Placement, ...] | None]


def align(shape: tuple[int, ...], whole: tuple[int, ...], split: Split) -> Placement:
    """The placement of an operand of `shape` under a split of the broadcast shape `whole`.

    Scalars and size-1 dimensions that are broadcast are never sliced.
    """
    broadcast = not shape or (shape[split.dim] == 1 and whole[split.dim] != 1)
    return REPLICATED if broadcast else split


def elementwise(linear: Linearity | None = None) -> Rule:
    def rule(site: Site, placements: tuple[Placement, ...]) -> Sequence[Decision]:
        whole = site.outputs[0].shape
        results = len(site.outputs)
        offers = [
            Decision(tuple(align(x.shape, whole, s) for x in site.inputs), (s,) * results) for s in splits(placements)
        ]
        if offers:
            return offers
        reduced = Decision((REPLICATED,) * len(placements), (REPLICATED,) * results)
        if linear and partials(placements) and (operands := linear(site, placements)):
            return [reduced, Decision(operands, (partials(placements)[0],) * results)]
        return [reduced]

    return rule


def _jointly(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """f(x, y) is linear in (x, y) together: a replicated operand becomes a term that one replica holds."""
    return (PARTIAL,) * len(placements) if partials(placements) == [PARTIAL] else None


def _in_one_factor(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """f(x, y) is linear in each of x and y: one of them may be partial."""
    return placements if partials(placements) == [PARTIAL] and placements.count(PARTIAL) == 1 else None


def _in_numerator(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    inexact = jnp.issubdtype(site.inputs[0].dtype, np.inexact)  # integer division rounds
    return placements if inexact and placements == (PARTIAL, REPLICATED) else None


def _in_cases(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """select(pred, x, y) is linear in (x, y) for a predicate that every replica knows."""
    cases = _jointly(site, placements[1:]) if placements[0] == REPLICATED else None
    return (REPLICATED, *cases) if cases else None


def _unless_rounded(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
    """A cast commutes with the sum when it loses nothing: rounding each term would round N times."""
    old, new = site.inputs[0].dtype, site.params["new_dtype"]
    return _jointly(site, placements) if jnp.promote_types(old, new) == new and old != np.bool_ else None


def _idempotent(op: str) -> Linearity:
    """max of partial maxima: a replicated operand may take part on every replica."""

    def linear(site: Site, placements: tuple[Placement, ...]) -> tuple[Placement, ...] | None:
        return (Partial(op),) * len(placements) if partials(placements) == [Partial(op)] else None

    return linear


_P = compat.primitives

register(elementwise(_jointly), *_P("add add_jaxvals sub neg real imag conj complex copy name"))
register(elementwise(_in_one_factor), *_P("mul"))
register(elementwise(_in_numerator), *_P("div"))
register(elementwise(_in_cases), *_P("select_n"))
register(elementwise(_unless_rounded), *_P("convert_element_type"))
register(elementwise(_idempotent("max")), *_P("max"))
register(elementwise(_idempotent("min")), *_P("min"))
register(
    elementwise(),
    *_P(
        "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz"
        " cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac"
        " integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to mulhi ne nextafter not"
        " one_minus_square or polygamma polynomial population_count pow reduce_precision"
        " regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin"
        " sinh sqrt square tan tanh threefry2x32 xor zeta"
    ),
)
