"""Run loops and branches on local blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from ..core import compat
from ..core.schedule import Schedule, Step
from ..rules.contract import filled
from .blocks import block_of

_SCAN, _WHILE = (compat.primitive(name) for name in ("scan", "while"))

Run = Callable[[Schedule, list[Any]], list[Any]]  # runs a body


def emit(step: Step, arrays: Sequence[Any], run: Run) -> list[Any]:
    """Run control flow, with `run` for its bodies."""
    if step.equation.primitive is _SCAN:
        return _scan(step, arrays, run)
    if step.equation.primitive is _WHILE:
        return _while(step, arrays, run)
    branches = [lambda *xs, body=body: run(body, list(xs)) for body in step.bodies]
    index = arrays[0]
    if index.dtype == bool:
        index = index.astype("int32")
    return lax.switch(index, branches, *arrays[1:])


def _scan(step: Step, arrays: Sequence[Any], run: Run) -> list[Any]:
    (body,) = step.bodies
    params = step.equation.params
    consts, carries = compat.scan_counts(params)
    fixed, init, xs = arrays[:consts], arrays[consts : consts + carries], arrays[consts + carries :]

    def iterate(carry: Any, x: Any) -> tuple[Any, Any]:
        out = run(body, [*fixed, *carry, *x])
        return out[:carries], out[carries:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(iterate, list(init), list(xs), **how)
    return [*carry, *ys]


def _while(step: Step, arrays: Sequence[Any], run: Run) -> list[Any]:
    test, body = step.bodies
    params = step.equation.params
    tests, fixed_count = params["cond_nconsts"], params["body_nconsts"]
    test_consts, fixed = arrays[:tests], arrays[tests : tests + fixed_count]

    answers = test.program.outputs[0].array.shape  # one for each example, if the loop was written under `vmap`

    def goes_on(carry: Sequence[Any]) -> Any:
        """Padding is done from the start."""
        (found,) = run(test, [*test_consts, *carry])
        return filled(found, block_of(answers, test.outputs[0], test.axes), test.outputs[0], "max")

    def iterate(carry: Sequence[Any]) -> list[Any]:
        new, going = run(body, [*fixed, *carry]), goes_on(carry) if answers else None
        return new if not answers else [_where(going, *pair) for pair in zip(new, carry, strict=True)]

    def any_goes_on(carry: Sequence[Any]) -> Any:
        return goes_on(carry).any() if answers else goes_on(carry)

    return lax.while_loop(any_goes_on, iterate, list(arrays[tests + fixed_count :]))


def _where(goes_on: Any, new: Any, old: Any) -> Any:
    """What an example that is done carries stays as it was (its dimensions come first, as `vmap` leaves them)."""
    return lax.select(lax.broadcast_in_dim(goes_on, new.shape, range(goes_on.ndim)), new, old)
