"""A `shard_map` over the data axes inside a step for the whole batch: a piece that is written per replica.

    y = shard_map(f, in=P("data"), out=P("data"))(x)   becomes   y = join(vmap(f, axis_name="data")(cut(x)))

`cut` makes a dimension of the replicas, `[B, ...]` -> `[N, B/N, ...]`, and `vmap` gives collectives over the axis their
meaning along it: that is what the piece computes, on any mesh. The rules then split that dimension as they split any
batch, so that each replica runs the piece on its own rows, and reductions over it are sums of partial values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from ..core import compat
from ..core.pieces import evaluate
from ..core.program import Atom, Equation, Literal, Program, Var, flatten, prune

_SHARD_MAP, _PVARY = compat.primitive("shard_map"), compat.primitive("pvary")

# What JAX's types make of collectives: under vmap there is one kind.
_UNTYPED = {compat.primitive(f"{name}_invariant"): compat.primitive(name) for name in ("psum", "all_gather")}


def without_maps(program: Program, names: Collection[str]) -> Program:
    """The program with every shard_map over no other axes than these written out; what cannot be stays as it is."""
    if all(equation.primitive is not _SHARD_MAP for equation in program.walk()):
        return program
    rename: dict[Var, Atom] = {}
    equations: list[Equation] = []
    constants = list(program.constants)
    for equation in program.equations:
        equation = replace(equation, inputs=tuple(map(_renaming(rename), equation.inputs)))
        piece = _written_out(equation, names) if equation.primitive is _SHARD_MAP else None
        if piece is None:
            bodies = tuple(without_maps(body, names) for body in equation.bodies)
            equations.append(replace(equation, bodies=bodies))
            continue
        rename.update(zip(piece.inputs, equation.inputs, strict=True))
        equations += [replace(e, inputs=tuple(map(_renaming(rename), e.inputs))) for e in piece.equations]
        constants += piece.constants
        rename.update(zip(equation.outputs, map(_renaming(rename), piece.outputs), strict=True))
    outputs = tuple(map(_renaming(rename), program.outputs))
    return Program(program.inputs, outputs, tuple(equations), tuple(constants))


def _renaming(rename: Mapping[Var, Atom]) -> Callable[[Atom], Atom]:
    return lambda atom: atom if isinstance(atom, Literal) else rename.get(atom, atom)


def _written_out(equation: Equation, names: Collection[str]) -> Program | None:
    """What a shard_map computes, as a program on whole values; None if `vmap` cannot say it."""
    mapped = _Mapped.of(equation)
    if not set(mapped.axes) <= set(names) or not all(map(_each_by_itself, mapped.body.walk())):
        return None
    avals = [jax.ShapeDtypeStruct(a.array.shape, a.array.dtype) for a in equation.inputs]
    for shared in (True, False):
        try:
            with compat.at_source(equation.sources):
                jaxpr = jax.make_jaxpr(lambda *arrays, shared=shared: mapped.on_whole(arrays, shared))(*avals)
        except (AssertionError, NotImplementedError, TypeError, ValueError):  # a collective that vmap does not know
            continue
        return flatten(jaxpr, equation.sources)
    return None


def _each_by_itself(equation: Equation) -> bool:
    """Does `vmap` draw for each replica what the replica would draw alone? Of threefry keys, it does."""
    keys = (a.array.dtype for a in (*equation.inputs, *equation.outputs))
    typed = [dtype for dtype in keys if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)]
    known = all(compat.key_impl_name(dtype) == "threefry2x32" for dtype in typed)
    return known and equation.primitive is not _GENERATOR


_GENERATOR = compat.primitive("rng_bit_generator")


@dataclass(frozen=True)
class _Mapped:
    """A shard_map: its body, its axes with their sizes, and over which of them each dimension is cut."""

    body: Program
    axes: dict[str, int]
    inputs: tuple[tuple[tuple[str, ...], ...], ...]  # for each input, for each of its dimensions
    outputs: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def of(cls, equation: Equation) -> _Mapped:
        params = equation.params
        mesh, manual = params["mesh"], compat.manual_axes(params)
        body = _untyped(flatten(params["jaxpr"], equation.sources))
        return cls(
            body,
            {name: mesh.shape[name] for name in mesh.axis_names if name in manual},
            tuple(_cuts(s, a.array.ndim) for s, a in zip(params["in_specs"], equation.inputs, strict=True)),
            tuple(_cuts(s, v.array.ndim) for s, v in zip(params["out_specs"], equation.outputs, strict=True)),
        )

    def on_whole(self, arrays: Sequence[jax.Array], shared: bool) -> list[jax.Array]:
        """The piece on whole arrays.

        `shared`: an output that is not cut over an axis is the same along it. Where the program does not show that,
        `vmap` raises, and the first replica's value counts, as in `shard_map`.
        """

        def run(*blocks: jax.Array) -> list[jax.Array]:
            return evaluate(self.body, blocks, lambda x: x)

        for name, size in reversed(self.axes.items()):
            run = jax.vmap(
                run,
                in_axes=[0 if _over(name, cuts) else None for cuts in self.inputs],
                out_axes=[0 if _over(name, cuts) or not shared else None for cuts in self.outputs],
                axis_name=name,
                axis_size=size,
            )
        blocks = run(*(self._cut(x, cuts) for x, cuts in zip(arrays, self.inputs, strict=True)))
        return [self._joined(y, cuts, shared) for y, cuts in zip(blocks, self.outputs, strict=True)]

    def _cut(self, x: jax.Array, cuts: Sequence[tuple[str, ...]]) -> jax.Array:
        """`[B, ...]` -> `[N, B/N, ...]`: dimensions for the axes first, in their order."""
        shape: list[int] = []
        places: dict[str, int] = {}
        for size, names in zip(x.shape, cuts, strict=True):
            for name in names:
                places[name] = len(shape)
                shape.append(self.axes[name])
                size //= self.axes[name]
            shape.append(size)
        found = [places[name] for name in self.axes if name in places]
        others = [dim for dim in range(len(shape)) if dim not in found]
        return lax.transpose(lax.reshape(x, shape), found + others)

    def _joined(self, y: jax.Array, cuts: Sequence[tuple[str, ...]], shared: bool) -> jax.Array:
        """The inverse of `_cut`."""
        if not shared:
            first = [k for k, name in enumerate(self.axes) if not _over(name, cuts)]
            y = lax.squeeze(lax.slice(y, [0] * y.ndim, [1 if d in first else n for d, n in enumerate(y.shape)]), first)
        leading = [name for name in self.axes if _over(name, cuts)]
        order: list[int] = []
        shape: list[int] = []
        for dim, names in enumerate(cuts):
            order += [*(leading.index(name) for name in names), len(leading) + dim]
            shape.append(y.shape[len(leading) + dim])
            for name in names:
                shape[-1] *= self.axes[name]
        return lax.reshape(lax.transpose(y, order), shape)


def _over(name: str, cuts: Sequence[tuple[str, ...]]) -> bool:
    return any(name in names for names in cuts)


def _cuts(spec: Sequence[Any], ndim: int) -> tuple[tuple[str, ...], ...]:
    named = [(n,) if isinstance(n, str) else tuple(n or ()) for n in spec]
    return (*named, *[()] * (ndim - len(named)))


def _untyped(program: Program) -> Program:
    """Without JAX's types of what differs between replicas."""
    rename: dict[Var, Atom] = {}
    equations = []
    for equation in program.equations:
        inputs = tuple(map(_renaming(rename), equation.inputs))
        if equation.primitive is _PVARY:
            rename.update(zip(equation.outputs, inputs, strict=True))
            continue
        primitive = _UNTYPED.get(equation.primitive, equation.primitive)
        params = compat.untyped_collective(equation.primitive.name, equation.params)
        bodies = tuple(map(_untyped, equation.bodies))
        equations.append(replace(equation, primitive=primitive, params=params, inputs=inputs, bodies=bodies))
    outputs = tuple(map(_renaming(rename), program.outputs))
    return prune(replace(program, outputs=outputs, equations=tuple(equations)))
