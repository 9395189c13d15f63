"""Sums in an order that does not depend on the number of replicas (`Options.deterministic`).

A sum over the examples is formed of a power of two of terms, at most `TERMS`, of equally many examples each, added in
pairs: first the neighbours, then the sums of neighbours. Where 2, 4 or 8 replicas share the examples, each adds its own
part of this tree, and the rest of it is added by those who keep the sum. A term is a sum of `LEAST` examples or more:
of a single one it is a product, which compilers multiply and add in one rounding where they can, and so on some numbers
of replicas only. Sums of what is no example (the norm of a weight) are not in this order: on other numbers of replicas
a weight is cut elsewhere, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax.numpy as jnp
from jax import lax

from .layout import PARTIAL, Axis, Split
from .schedule import Schedule, Step

TERMS = 64
LEAST = 2
_PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)


def terms(step: Step, axes: tuple[Axis, ...]) -> int:
    """In how many parts each replica does an equation, one after the other; 0: the order within a replica is XLA's.

    A sum over the examples is then added in pairs. A product with the examples is done in the same parts: for another
    number of rows, a library may add up the columns in another order.
    """
    (axis,) = axes
    equation, ruling = step.equation, step.ruling
    split = [(a, p) for a, (p,) in zip(equation.inputs, ruling.operands, strict=True) if isinstance(p, Split)]
    plain = all(p.batch and not p.extent and not p.permuted for _, p in split)
    if not split or not plain or ruling.emit is not None or dict(ruling.params) != dict(equation.params):
        return 0
    summed = all(p == PARTIAL for (p,) in ruling.results)
    rows = equation.primitive in _PRODUCTS and all(isinstance(p, Split) for (p,) in ruling.results)
    if not summed and not rows:
        return 0
    sizes = [a.array.shape[p.dim] // p.outer for a, p in split]
    whole = math.gcd(TERMS, *sizes)
    while whole > 1 and min(sizes) // whole < LEAST:
        whole //= 2
    return whole // axis.size if whole % axis.size == 0 else 0


def sums(schedule: Schedule) -> Iterator[tuple[Step, int]]:
    """The equations that add up floats over the replicas, and how many terms each replica adds."""
    for step in schedule.steps:
        for body in step.bodies:
            yield from sums(body)
        made = zip(step.equation.outputs, step.results, strict=True)
        if not step.bodies and any(
            PARTIAL in layout and jnp.issubdtype(v.array.dtype, jnp.inexact) for v, layout in made
        ):
            yield step, terms(step, schedule.axes)
