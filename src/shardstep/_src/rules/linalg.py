"""Linear algebra: one answer per matrix.

A matrix is needed whole; a stack of them is not.

    cholesky(split on a leading dimension)   -> split      one example after the other; so all factorizations
    cholesky(split on a matrix dimension)    -> gather     there is no way around it
    solve(a, b split on right-hand sides)    -> split      A X = B, column by column
    solve(a, b partial)                      -> partial    the solution is linear in b; so is the Fourier transform
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core import compat
from .contract import Rule, Site, Split, register
from .contraction import Index, by_index


def _leading(site: Site, rank: int) -> Iterator[Index]:
    """The dimensions before the first operand's own `rank`: all operands and results begin with them."""
    shape = site.inputs[0].shape
    for d in range(len(shape) - rank):
        yield Index(shape[d], (Split(d),) * len(site.inputs), (Split(d),) * len(site.outputs))


def per_example(rank: int, linear: tuple[int, ...] = ()) -> Rule:
    """Stacked problems. `rank`: how many dimensions the first operand of a single problem has."""
    return by_index(lambda site: _leading(site, rank), linear)


def _triangular_solve(site: Site) -> Iterator[Index]:
    """A X = B keeps the columns of B apart, X A = B its rows (transposing A changes neither)."""
    yield from _leading(site, 2)
    b = site.inputs[1]
    free = b.ndim - 1 if site.left_side else b.ndim - 2
    yield Index(b.shape[free], (None, Split(free)), (Split(free),))


def _tridiagonal_solve(site: Site) -> Iterator[Index]:
    """Three diagonals, then the right-hand sides as columns."""
    yield from _leading(site, 1)
    b = site.inputs[3]
    yield Index(b.shape[-1], (None, None, None, Split(b.ndim - 1)), (Split(b.ndim - 1),))


def _fft(site: Site) -> Iterator[Index]:
    """The last dimensions are transformed, as many as there are lengths."""
    yield from _leading(site, len(site.fft_lengths))


_P = compat.primitives

register(per_example(2), *_P("cholesky eig eigh geqrf hessenberg lu qr schur svd tridiagonal"))
register(per_example(2), *_P("cholesky_update householder_product symmetric_product"))
register(per_example(2, linear=(2,)), *_P("ormqr"))
register(per_example(1), *_P("lu_pivots_to_permutation"))
register(by_index(_triangular_solve, linear=(1,)), *_P("triangular_solve"))
register(by_index(_tridiagonal_solve, linear=(3,)), *_P("tridiagonal_solve"))
register(by_index(_fft, linear=(0,)), *_P("fft"))
