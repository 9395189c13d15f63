"""A training step as data: a flat list of equations.

JAX nests calls (`jit`, `custom_jvp`, `remat`, ...) that mean nothing to layouts, so they are inlined here, once, and
every later stage sees one flat program. Only control flow keeps bodies, as programs of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from . import compat
from .layout import Array, describe


class Var:
    """A value of the program. Compared by identity."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array


class Names:
    """a, b, ..., z, aa, ...: a name for each value, in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._given: dict[Any, str] = {}

    def __getitem__(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return "constant" if atom.array.shape else _number(atom.value)
        return self._given.setdefault(atom, _letters(len(self._given)))

    def typed(self, atoms: Sequence[Atom]) -> str:
        """`a:f32[8,4] b:i32[]`"""
        return " ".join(f"{self[a]}:{describe(a.array)}" for a in atoms)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _letters(i: int) -> str:
    return (_letters(i // 26 - 1) if i >= 26 else "") + chr(ord("a") + i % 26)


class Literal:
    """A constant written into the program."""

    __slots__ = ("array", "value")

    def __init__(self, value: Any, array: Array):
        self.value = value
        self.array = array


Atom = Var | Literal
Emit = Callable[..., Sequence[jax.Array]]  # what is done with local blocks in place of binding a primitive


@dataclass(frozen=True, eq=False)
class Equation:
    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    sources: tuple[Any, ...]  # JAX's SourceInfo of the equation, then of the calls around it
    bodies: tuple[Program, ...] = ()
    effects: frozenset[Any] = field(default_factory=frozenset)

    @functools.cached_property
    def pattern(self) -> tuple[int, ...]:
        """Which operands are one value (`x * x` reads x once): the first place of each, -1 for a literal."""
        return tuple(-1 if isinstance(a, Literal) else self.inputs.index(a) for a in self.inputs)

    @property
    def call(self) -> str:
        """`transpose[permutation=(1, 0)]`: the primitive, with those parameters that fit on a line."""
        simple = {k: str(v) for k, v in self.params.items() if _is_plain(v)}
        shown = ", ".join(f"{k}={v}" for k, v in simple.items() if len(v) <= 60)
        return f"{self.primitive}[{shown}]" if shown else str(self.primitive)

    @functools.cached_property
    def is_differentiated(self) -> bool:
        """Is it part of a function that is differentiated, forward or backward?"""
        return compat.is_differentiated(self.sources)

    @property
    def line(self) -> str:
        """The user's source line: of the equation, or of the call that it was inlined from."""
        return compat.source_line(self.sources)


class Kinds(dict[Equation, int]):
    """A number for each kind of equation: equations of one kind differ only in which values they read and write."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __missing__(self, equation: Equation) -> int:
        arrays = tuple(a.array for a in equation.inputs), tuple(v.array for v in equation.outputs)
        key = (equation.primitive, tuple(sorted(equation.params.items())), arrays, equation.pattern)
        try:
            number = self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # parameters that cannot be compared: a kind of its own
            number = self._numbers.setdefault(equation, len(self._numbers))
        self[equation] = number
        return number


@dataclass(frozen=True, eq=False)
class Program:
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[Equation, ...]
    constants: tuple[tuple[Var, Any], ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines(Names()))

    def lines(self, names: Names, indent: str = "") -> Iterator[str]:
        """The program as text; bodies of loops and branches are indented."""
        yield f"{indent}inputs {names.typed(self.inputs)}"
        if self.constants:
            yield f"{indent}constants {names.typed([var for var, _ in self.constants])}"
        for e in self.equations:
            read = " ".join(names[a] for a in e.inputs)
            yield f"{indent}{names.typed(e.outputs)} = {e.call} {read}  # {e.line}"
            for body in e.bodies:
                yield f"{indent}  body"
                yield from body.lines(names, indent + "    ")
        yield f"{indent}outputs {' '.join(names[a] for a in self.outputs)}"

    def walk(self) -> Iterator[Equation]:
        """Every equation, those inside loops and branches included."""
        for equation in self.equations:
            yield equation
            for body in equation.bodies:
                yield from body.walk()

    @functools.cached_property
    def uses(self) -> Mapping[Atom, int]:
        """How often each value is read."""
        uses: dict[Atom, int] = dict.fromkeys(self.inputs, 0)
        for equation in self.equations:
            for atom in equation.inputs:
                uses[atom] = uses.get(atom, 0) + 1
            uses.update(dict.fromkeys(equation.outputs, 0))
        for atom in self.outputs:
            uses[atom] = uses.get(atom, 0) + 1
        return uses


def _is_plain(value: Any) -> bool:
    """Is this parameter worth printing: numbers, words, and tuples of them?"""
    if isinstance(value, tuple):
        return bool(value) and type(value) is tuple and all(_is_plain(v) or (type(v) is tuple and not v) for v in value)
    return isinstance(value, int | str) and not isinstance(value, bool)


_P = compat.primitive
_CAST, _CONSTRAINT, _REMAT = _P("convert_element_type"), _P("sharding_constraint"), _P("remat")
_SOLVE = _P("linear_solve")  # JAX prints it as custom_linear_solve

# Calls that are inlined, with the parameter that holds what they call.
_CALLS: dict[Any, str] = {
    _P("jit"): "jaxpr",
    _P("closed_call"): "call_jaxpr",
    _P("call"): "call_jaxpr",
    _P("custom_jvp_call"): "call_jaxpr",
    _P("custom_vjp_call"): "call_jaxpr",
    _P("custom_vmap"): "call",
    _P("composite"): "jaxpr",
    _P("linear_call"): "callee",
    _REMAT: "jaxpr",
}

# Collectives, by what they do to dimensions that vmap gave a name (`axis_name="batch"`) and left as numbers.
_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(compat.primitives("psum psum_invariant"), lax.reduce_sum),
    **dict.fromkeys(compat.primitives("pmax"), lax.reduce_max),
    **dict.fromkeys(compat.primitives("pmin"), lax.reduce_min),
}

# Control flow keeps its bodies.
_BODIES: dict[Any, Callable[[Mapping[str, Any]], Sequence[Any]]] = {
    _P("scan"): lambda params: (params["jaxpr"],),
    _P("while"): lambda params: (params["cond_jaxpr"], params["body_jaxpr"]),
    _P("cond"): lambda params: params["branches"],
}


def flatten(jaxpr: Any, calls: tuple[Any, ...] = ()) -> Program:
    """Inline the calls of a closed jaxpr and drop what nothing reads.

    `calls` say where the loop or branch was written that it is the body of.
    """
    closed, constants = compat.open_jaxpr(jaxpr)
    inputs = tuple(Var(_array(v)) for v in closed.invars)
    builder = _Builder()
    outputs = builder.inline(closed, constants, inputs, calls)
    return prune(Program(inputs, tuple(outputs), tuple(builder.equations), tuple(builder.constants)))


def prune(program: Program) -> Program:
    """Drop the equations whose results nobody reads."""
    read = {a for a in program.outputs if isinstance(a, Var)}
    kept = []
    for equation in reversed(program.equations):
        if equation.effects or any(v in read for v in equation.outputs):
            kept.append(equation)
            read.update(a for a in equation.inputs if isinstance(a, Var))
    constants = tuple((v, value) for v, value in program.constants if v in read)
    return Program(program.inputs, program.outputs, tuple(reversed(kept)), constants)


@dataclass
class _Builder:
    equations: list[Equation] = field(default_factory=list)
    constants: list[tuple[Var, Any]] = field(default_factory=list)

    def inline(
        self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Atom], calls: tuple[Any, ...] = ()
    ) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            env[var] = self._constant(_array(var), value)

        def read(atom: Any) -> Atom:
            return Literal(atom.val, _array(atom)) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            sources = (eqn.source_info, *calls)
            outputs: Sequence[Atom]
            if eqn.primitive in _CALLS:
                outputs = self._call(eqn, inputs, sources)
            elif eqn.primitive is _SOLVE:
                outputs = self._solve(eqn, inputs, sources)
            elif eqn.primitive is _CAST and inputs[0].array.dtype == eqn.outvars[0].aval.dtype:
                outputs = inputs  # only a weak type was dropped
            elif eqn.primitive in _REDUCTIONS and not any(isinstance(a, str) for a in eqn.params["axes"]):
                outputs = [self._reduced(eqn, x, sources) for x in inputs]
            elif (expanded := compat.expanded(eqn)) is not None:
                outputs = self._expanded(expanded, inputs, sources)
            else:
                outputs = self._equation(eqn, inputs, sources)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _call(self, eqn: Any, inputs: list[Atom], sources: tuple[Any, ...]) -> Sequence[Atom]:
        callee, constants = compat.open_jaxpr(eqn.params[_CALLS[eqn.primitive]])
        if eqn.primitive is _REMAT and eqn.params["prevent_cse"] and eqn.params["differentiated"]:
            # What JAX lowers a rematerialised block to: a barrier that keeps XLA from merging it with the forward pass.
            outputs = tuple(Var(a.array) for a in inputs)
            barrier = _P("optimization_barrier")
            self.equations.append(Equation(barrier, {}, tuple(inputs), outputs, sources))
            inputs = list(outputs)
        return self.inline(callee, constants, inputs, sources)

    def _expanded(self, jaxpr: Any, inputs: list[Atom], sources: tuple[Any, ...]) -> Sequence[Atom]:
        """Written where the one primitive stood that it was."""
        start, (callee, constants) = len(self.equations), compat.open_jaxpr(jaxpr)
        outputs = self.inline(callee, constants, inputs)
        self.equations[start:] = [replace(e, sources=sources) for e in self.equations[start:]]
        return outputs

    def _solve(self, eqn: Any, inputs: list[Atom], sources: tuple[Any, ...]) -> Sequence[Atom]:
        """A linear solver (`jnp.linalg.solve`, conjugate gradients) runs as its user's `solve(*its constants, *b)`.

        What else it holds, the products and the transposed solver, is for derivatives, and those are taken by now.
        """
        counts = eqn.params["const_lengths"]
        before = counts.matvec + counts.vecmat
        arguments = [*inputs[before : before + counts.solve], *inputs[sum(counts) :]]
        solver, constants = compat.open_jaxpr(eqn.params["jaxprs"].solve)
        return self.inline(solver, constants, arguments, sources)

    def _reduced(self, eqn: Any, x: Atom, sources: tuple[Any, ...]) -> Atom:
        """A collective over an axis that vmap named: it reduces dimensions of the value, or nothing."""
        axes = tuple(eqn.params["axes"])
        if not axes:
            return x
        aval = jax.ShapeDtypeStruct(x.array.shape, x.array.dtype)
        closed, _ = compat.open_jaxpr(jax.make_jaxpr(lambda x: _REDUCTIONS[eqn.primitive](x, axes))(aval))
        return self.inline(closed, (), [x], sources)[0]

    def _equation(self, eqn: Any, inputs: list[Atom], sources: tuple[Any, ...]) -> Sequence[Atom]:
        outputs = tuple(Var(_array(v)) for v in eqn.outvars)
        bodies = tuple(flatten(body, sources) for body in _BODIES.get(eqn.primitive, lambda _: ())(eqn.params))
        effects = frozenset(eqn.effects)
        params = eqn.params if eqn.primitive is _CONSTRAINT else _unplaced(eqn.params)
        self.equations.append(Equation(eqn.primitive, params, tuple(inputs), outputs, sources, bodies, effects))
        return outputs

    def _constant(self, array: Array, value: Any) -> Var:
        for var, known in self.constants:
            if known is value:
                return var
        self.constants.append((Var(array), value))
        return self.constants[-1][0]


def _unplaced(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the sharding that an equation's result was to have on the user's mesh: layouts say where values are."""
    named = [name for name in ("sharding", "out_sharding") if params.get(name) is not None]
    return {**params, **dict.fromkeys(named)} if named else params


def _array(atom: Any) -> Array:
    return Array(tuple(atom.aval.shape), atom.aval.dtype)
