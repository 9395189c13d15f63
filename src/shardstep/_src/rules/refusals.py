"""What cannot be rewritten, and what to do instead."""

from __future__ import annotations

from ..core.errors import ShardstepError
from ..core.program import Program
from .effects import REFUSED


def refuse(program: Program) -> None:
    """Say clearly what cannot be rewritten."""
    for equation in program.walk():
        if equation.primitive in REFUSED:
            raise ShardstepError(f"{equation.line}: {REFUSED[equation.primitive]}.")
        refs = [e for e in equation.effects if "Ref" in type(e).__name__ or "Write" in type(e).__name__]
        if refs:
            raise ShardstepError(
                f"{equation.line}: the step reads or writes a mutable array (jax.Ref). Pass its value in and return"
                " the new one instead."
            )
        if any("Ordered" in type(e).__name__ for e in equation.effects):
            raise ShardstepError(
                f"{equation.line}: {equation.primitive} asks for ordered effects, which JAX has on one device only."
                " Leave ordered=True out: it still happens once, on the first replica."
            )
