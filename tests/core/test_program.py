"""A program as text."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from shardstep._src.core.program import flatten


def test_parameters_are_printed_where_they_are_numbers_and_words():
    program = flatten(jax.make_jaxpr(lambda x: x.T)(np.ones((2, 3))))
    (equation,) = program.equations
    assert equation.call == "transpose[permutation=(1, 0)]"
    more = {"tables": (np.arange(3), np.arange(3)), "empty": (), "pairs": ((), (1,)), "flag": True}
    assert (
        replace(equation, params={**equation.params, **more}).call == "transpose[permutation=(1, 0), pairs=((), (1,))]"
    )
