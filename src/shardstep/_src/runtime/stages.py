"""A step that is traced, lowered and compiled ahead of time: what `jax.jit` gives, with the user's own pytrees.

The program itself takes a flat list of arrays as they lie at rest. These classes stand between it and the user: they
answer with the structure of the step's arguments and results, and `Compiled` is called as the step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..capture.arguments import Call, signature_of
from ..core import trees
from .rewritten import Rewritten


class _Stage:
    """What all stages know of the step."""

    def __init__(self, program: Rewritten, inner: Any):
        self._program = program
        self._inner = inner

    @property
    def in_tree(self) -> Any:
        """The structure of `(args, kwargs)`, without static arguments."""
        return self._program.captured.call.treedef

    @property
    def in_avals(self) -> Any:
        return self._like_arguments([jax.typeof(leaf) for leaf in self._program.captured.call.leaves])

    @property
    def args_info(self) -> Any:
        donated = set(self.donate_argnums)
        leaves = enumerate(self._program.captured.call.leaves)
        return self._like_arguments([jax.stages.ArgInfo(jax.typeof(x), i in donated) for i, x in leaves])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The leaves whose memory is given away, counted as `jax.jit` counts them."""
        return tuple(self._program.donated)

    @property
    def out_tree(self) -> Any:
        return self._program.captured.out_tree

    @property
    def out_info(self) -> Any:
        """What the step returns, as `jax.ShapeDtypeStruct`s."""
        return self._program.out_info()

    def _like_arguments(self, leaves: Sequence[Any]) -> Any:
        call = self._program.captured.call
        return trees.like(call.treedef, call.merged(leaves))


class Traced(_Stage, jax.stages.Traced):
    """The rewritten step as a jaxpr, on arrays as they lie at rest."""

    @property
    def jaxpr(self) -> Any:
        return self._inner.jaxpr

    @property
    def fun_name(self) -> str:
        return self._program.name

    @property
    def out_avals(self) -> Any:
        return [jax.typeof(x) for x in self._program.out_shapes()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(self._program.place(taken_apart(self._program, args, kwargs).leaves))

    def lower(self, **how: Any) -> Lowered:
        return Lowered(self._program, self._program.under_mesh(lambda: self._inner.lower(**how)))


class Lowered(_Stage, jax.stages.Lowered):  # type: ignore[override]
    """The rewritten step, lowered for arguments of some shapes."""

    def compile(self, *args: Any, **how: Any) -> Compiled:
        return Compiled(self._program, self._program.under_mesh(lambda: self._inner.compile(*args, **how)))

    def as_text(self, *args: Any, **how: Any) -> str:
        return self._inner.as_text(*args, **how)

    def compiler_ir(self, *args: Any, **how: Any) -> Any:
        return self._inner.compiler_ir(*args, **how)

    def cost_analysis(self) -> Any:
        return self._inner.cost_analysis()


class Compiled(_Stage, jax.stages.Compiled):  # type: ignore[override]
    """The rewritten step, compiled: called with the step's own arguments, static ones left out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = taken_apart(self._program, args, kwargs)
        return self._program.run(self._inner, self._program.place(call.leaves))

    @property
    def input_shardings(self) -> Any:
        """Of the arrays that hold the arguments."""
        return self._like_arguments([rest.sharding for rest in self._program.rests])

    @property
    def output_shardings(self) -> Any:
        return self._like_results(self._inner.output_shardings)

    @property
    def input_formats(self) -> Any:
        formats, _ = self._inner.input_formats
        return self._like_arguments(formats[: len(self._program.rests)])

    @property
    def output_formats(self) -> Any:
        return self._like_results(self._inner.output_formats)

    def as_text(self) -> str | None:
        return self._inner.as_text()

    def cost_analysis(self) -> Any:
        return self._inner.cost_analysis()

    def memory_analysis(self) -> Any:
        return self._inner.memory_analysis()

    def runtime_executable(self) -> Any:
        return self._inner.runtime_executable()

    def _like_results(self, leaves: Sequence[Any]) -> Any:
        captured = self._program.captured
        return trees.like(captured.out_tree, captured.with_constants(leaves))


def taken_apart(program: Rewritten, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments for a program that was made ahead of time; a TypeError, as JAX's, if it was made for others."""
    known = program.captured.call
    leaves, treedef = jax.tree.flatten((args, kwargs))
    if treedef != known.treedef:
        raise TypeError(
            f"the step was lowered for arguments of another structure: {known.treedef}, and was called with {treedef}."
            " Static arguments are left out when it is called"
        )
    call = Call.of(treedef, leaves, known.static_arguments, program.captured.constants)
    if not call.is_like(known):
        raise TypeError("the step was lowered for other constants (numbers, strings, functions) among its arguments")
    if any(isinstance(x, jax.core.Tracer) for x in call.leaves):
        raise TypeError("a compiled step cannot be traced (jit, grad, vmap): call the sharded step itself there")
    for path, now, then in zip(program.captured.paths, call.leaves, known.leaves, strict=True):
        (shape, dtype, _), (wanted, kind, _) = signature_of(now), signature_of(then)
        if (tuple(shape), dtype) != (tuple(wanted), kind):
            raise TypeError(f"{path} is {dtype}{list(shape)}, but the step was lowered for {kind}{list(wanted)}")
    return call
