"""Random small training steps, as Python source: what Hypothesis shrinks is what a person reads.

A `Writer` adds one line after the other to a function, `v3 = lax.dot_general(v1, w0, ...)`, choosing each from the
table of productions below. It knows of every value

  * its shape and dtype, from JAX itself;
  * about how large it is, so that a line is scaled down before it explodes and errors stay far below the tolerance;
  * whether it is *exact*: a multiple of 2**-grain, small enough that no sum of such values is ever rounded, in whatever
    order the replicas add. Integers are exact; so are the examples, which are multiples of 1/8.

Exactness is why a failure is a bug and never noise. An operation that jumps (argmax, comparison, floor, a branch)
reads exact values only. One that has a kink (relu, max, sort) may read rounded values, as it does not jump; but its
derivative does, so inside a loss (`smooth`) it reads exact values, or stands clear of its kink. What is exact depends
on no weight, so that no gradient flows through it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from choices import Choices, Skip
from jax import lax

LARGEST = 4096  # elements of a value
LINES = 8  # of a function, at most
EXAMPLES = {"x", "z"}
DTYPES = {
    **{"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "c64": jnp.complex64},
    **{"i32": jnp.int32, "i8": jnp.int8, "u8": jnp.uint8, "bool": jnp.bool_},
}
SIGNIFICANT = {"f32": 24, "bf16": 8, "f16": 11}  # bits
LARGEST_INTEGER = {"i32": 2.0**31, "i8": 2.0**7, "u8": 2.0**8, "bool": 1.0}


@jax.custom_vjp
def halved_gradient(x):
    return x


halved_gradient.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))

CALLS: list[tuple[int, np.ndarray]] = []  # what the last run told the host


def told(label: int, x: jax.Array) -> jax.Array:
    """`x`, which the host is told of."""
    jax.debug.callback(lambda value: CALLS.append((label, np.asarray(value))), x)
    return x


def hosted(x: jax.Array) -> jax.Array:
    """`x`, by way of the host."""
    shape = jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    return jax.pure_callback(lambda value: np.asarray(value) * 1, shape, x, vmap_method="broadcast_all")


NUMBERS = {"hp": 0.5, "size": 3, "tick": 0}  # Python numbers in the state; `tick` is counted up
NAMESPACE = {
    **{"jax": jax, "jnp": jnp, "lax": lax, "optax": optax},
    **{"halved_gradient": halved_gradient, "told": told, "hosted": hosted},
    **DTYPES,
}


# -- programs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A variable of the program."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a name of DTYPES
    scale: float = 1.0  # about its largest magnitude; a bound where the value is exact
    grain: int | None = None  # exact: a multiple of 2**-grain; None: rounded
    roots: frozenset[str] = frozenset()  # the inputs it is computed from

    @property
    def exact(self) -> bool:
        return self.grain is not None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, DTYPES[self.dtype])

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Line:
    """What defines one name: a line, or a nested function."""

    name: str
    code: str
    uses: frozenset[str]
    is_function: bool = False


@dataclass(frozen=True)
class Dialect:
    """What a program's lines may speak of."""

    n: int  # replicas
    half: str = ""  # "bf16" or "f16": floats may be that small
    complexes: bool = False
    small: bool = False  # int8 and uint8
    empty: bool = False  # dimensions of size 0
    numbers: bool = False  # Python numbers in the state
    calls: bool = False  # calls of the host
    axis_name: str = ""  # a step per replica: its lines see one replica's examples
    own_keys: bool = False  # and its random numbers are its own

    @property
    def odd(self) -> bool:
        """Does JAX itself refuse some lines?"""
        return bool(self.half or self.complexes or self.small or self.empty)


@functools.lru_cache(maxsize=20_000)
def _infer(
    functions: tuple[str, ...], code: str, known: tuple[Value, ...], axis: tuple[str, int] | None
) -> tuple[tuple[int, ...], str]:
    """The shape and dtype of an expression that calls these functions."""

    def run(key, *values):
        scope = {**NAMESPACE, **NUMBERS, "key": key, **{v.name: x for v, x in zip(known, values, strict=True)}}
        exec("\n".join(functions), scope)
        return eval(code, scope)

    abstract = jax.eval_shape(lambda: jax.random.key(0)), *(v.abstract for v in known)
    if axis:
        out = jax.make_jaxpr(run, axis_env=[axis])(*abstract).out_avals[0]
    else:
        out = jax.eval_shape(run, *abstract)
    names = [name for name, dtype in DTYPES.items() if dtype == out.dtype]
    if not names:
        raise Skip
    return out.shape, names[0]


def names_in(code: str) -> frozenset[str]:
    return frozenset(re.findall(r"\b[a-z]\w*", code))


def needed(lines: Sequence[Line], by: str) -> list[Line]:
    """The lines that `by` needs, in order."""
    wanted, kept = set(names_in(by)), []
    for line in reversed(lines):
        if line.name in wanted:
            wanted |= line.uses
            kept.append(line)
    return kept[::-1]


def indent(code: str) -> str:
    return textwrap.indent(code, "    ")


# -- writing a function -------------------------------------------------------------------------------------------


def is_float(v: Value) -> bool:
    return v.dtype in SIGNIFICANT


def is_int(v: Value) -> bool:
    return v.dtype in ("i32", "i8", "u8")


def is_complex(v: Value) -> bool:
    return v.dtype == "c64"


def is_bool(v: Value) -> bool:
    return v.dtype == "bool"


def is_number(v: Value) -> bool:
    return is_float(v) or is_int(v)


def varies(v: Value) -> bool:
    """In a step per replica: does each replica have its own?"""
    return bool(v.roots & EXAMPLES)


@dataclass
class Counter:
    """Fresh names, shared by a function and those nested in it."""

    used: int = 0

    def __call__(self, prefix: str) -> str:
        self.used += 1
        return f"{prefix}{self.used}"


class Writer:
    """A function being written: its lines, and the values that they can read."""

    def __init__(
        self, choices: Choices, values: Sequence[Value], dialect: Dialect, smooth=False, outer: Writer | None = None
    ):
        self.choices = choices
        self.dialect = dialect
        self.n = dialect.n
        self.straight = True  # every replica passes here, as often as the others
        self.smooth = smooth or (outer is not None and outer.smooth)
        self.values = list(values)
        self.lines: list[Line] = []
        self.outer = outer
        self.fresh: Counter = outer.fresh if outer else Counter()
        self.depth: int = outer.depth + 1 if outer else 0

    def scopes(self) -> Iterable[Writer]:
        """This function and those around it, innermost first."""
        scope: Writer | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    # -- choices

    def one_of(self, options: Iterable[Any]) -> Any:
        return self.choices.one_of(options)

    def between(self, low: int, high: int) -> int:
        return self.choices.between(low, high)

    def coin(self) -> bool:
        return self.choices.coin()

    def visible(self) -> list[Value]:
        """Latest first: a program that goes on with what it has is the more interesting one."""
        found = [v for scope in self.scopes() for v in scope.values[::-1]]
        return list({v.name: v for v in reversed(found)}.values())[::-1]

    def pick(self, accept: Callable[[Value], bool] = is_float) -> Value:
        found = [v for v in self.visible() if accept(v)]
        return self.one_of(found[:3] + [v for v in found if v.roots & EXAMPLES] + found)

    def axis(self, v: Value, at_least: int = 1) -> int:
        """A dimension; most often one that the replicas may share."""
        dims = [d for d, size in enumerate(v.shape) if size >= at_least]
        return self.one_of(dims + [d for d in dims if v.shape[d] > 1 and v.shape[d] % self.n == 0] * 2)

    def axes(self, v: Value) -> tuple[int, ...]:
        """Some of the dimensions, at least one."""
        if not v.ndim:
            raise Skip
        return self.one_of(c for k in range(1, v.ndim + 1) for c in itertools.combinations(range(v.ndim), k))

    def partner(self, v: Value, accept: Callable[[Value], bool] = is_float) -> Value:
        """A value that broadcasts with `v`."""
        return self.pick(lambda u: accept(u) and _broadcast(u.shape, v.shape) is not None)

    def steady(self, v: Value) -> str:
        """`v`, moved off the kink that many values of a degenerate program lie on."""
        return f"{v}" if v.exact or not self.smooth else f"({v} + 0.3713)"

    # -- lines

    def reads(self, code: str) -> tuple[list[Line], list[Value]]:
        """The functions that `code` calls, directly or not, and the values that it and they read."""
        functions = [line for scope in self.scopes() for line in reversed(scope.lines) if line.is_function]
        names, called = set(names_in(code)), []
        for line in functions:
            if line.name in names:
                names |= line.uses
                called.append(line)
        return called[::-1], [v for v in self.visible() if v.name in names]

    def infer(self, functions: tuple[str, ...], code: str, reads: tuple[Value, ...]) -> tuple[tuple[int, ...], str]:
        axis = (self.dialect.axis_name, self.n) if self.dialect.axis_name else None
        try:
            return _infer(functions, code, reads, axis)
        except (ArithmeticError, IndexError, NotImplementedError, TypeError, ValueError):
            if self.dialect.odd:  # the maximum of nothing, the Cholesky decomposition of a float16 matrix
                raise Skip from None
            raise

    def line(
        self, code: str, scale: float = 1.0, grain: int | None = None, roots: frozenset[str] | None = None
    ) -> Value:
        """Write `name = code`. What is large is scaled down by a power of two, which is exact and linear."""
        functions, reads = self.reads(code)
        shape, dtype = self.infer(tuple(f.code for f in functions), code, tuple(reads))
        if math.prod(shape) > LARGEST or len(shape) > 4 or (0 in shape and not self.dialect.empty):
            raise Skip
        if dtype in SIGNIFICANT or dtype == "c64":
            grain = None if dtype == "c64" else grain
            if grain is not None and scale * 2.0**grain >= 2 ** SIGNIFICANT[dtype]:
                grain = None
            largest = 4 if grain is None else 64
            if scale > largest:
                down = math.ceil(math.log2(scale / largest))
                code, scale = f"{2.0**-down} * ({code})", scale * 2.0**-down
                grain = None if grain is None else grain + down
        else:
            scale, grain = min(scale, LARGEST_INTEGER[dtype]), 0
        name = self.fresh("v")
        if roots is None:
            draws = self.dialect.own_keys and any("key" in names_in(c) for c in (code, *(f.code for f in functions)))
            roots = frozenset().union(*(v.roots for v in reads), EXAMPLES if draws else ())
        value = Value(name, shape, dtype, max(scale, 2.0**-6), grain, roots)
        self.lines.append(Line(name, f"{name} = {code}", names_in(code)))
        self.values.append(value)
        return value

    def line_of_call(self, code: str) -> Value:
        """Write `name = code` where code calls a function that was written: how large its integers are is not known."""
        value = self.line(code, 2.0)
        if is_int(value):
            value = self.values[-1] = dataclasses.replace(value, scale=LARGEST_INTEGER[value.dtype])
        return value

    def function(self, parameters: Sequence[Value], returned: Callable[[Writer], str], lines: int = 3) -> str:
        """Write `def f(parameters): ...` and return its name; `returned` says what, given the function's writer."""
        inner = Writer(self.choices, parameters, self.dialect, outer=self)
        inner.straight = False
        inner.write(self.between(1, lines))
        result = returned(inner)
        name = self.fresh("fun")
        body = [line.code for line in needed(inner.lines, result)] + [f"return {result}"]
        code = f"def {name}({', '.join(p.name for p in parameters)}):\n" + indent("\n".join(body))
        own = {p.name for p in parameters} | {line.name for line in inner.lines}
        self.lines.append(Line(name, code, names_in(code) - own, is_function=True))
        return name

    def parameter(self, like: Value, **changes: Any) -> Value:
        return dataclasses.replace(like, name=self.fresh("p"), **changes)

    def write(self, lines: int) -> None:
        table = [p for p in PRODUCTIONS if self.depth < 2 or p not in NESTING] + self.extras()
        for _ in range(lines):
            with contextlib.suppress(Skip):
                self.one_of(table)(self)

    def extras(self) -> list[Callable[[Writer], None]]:
        """The productions of this dialect."""
        dialect = self.dialect
        return [
            *(COMPLEX * 2 if dialect.complexes else []),
            *([nothing] * 2 if dialect.empty else []),
            *(WITH_NUMBERS * 2 if dialect.numbers else []),
            *(CALLS_OF_THE_HOST * 3 if dialect.calls else []),
            *([collective] * 8 if dialect.axis_name and self.straight else []),
        ]

    def fit(self, v: Value, shape: tuple[int, ...]) -> str:
        """`v` summed over such dimensions that the rest broadcasts to `shape`."""
        subsets = (c for k in range(v.ndim + 1) for c in itertools.combinations(range(v.ndim), k))
        axes = self.one_of(c for c in subsets if _broadcast(_without(v.shape, c), shape) == shape)
        count = math.prod(v.shape[a] for a in axes)
        scale = v.scale * math.sqrt(count)
        factor = "" if scale <= 2 else f"{2.0 ** -math.ceil(math.log2(scale / 2))} * "
        return f"{factor}jnp.sum({v}, axis={axes})" if axes else f"{factor}{v}"

    def next_of(self, old: Value, accept: Callable[[Value], bool] = lambda v: True) -> str:
        """A new value for a state leaf or a carry: as large as the old one, of the same shape and dtype."""
        if is_int(old):
            terms = [v for v in self.visible() if is_int(v) and accept(v) and v.name != old.name and v.size]
            if not terms or self.coin():
                return f"{old} + 1"
            return f"(({old} + jnp.sum({self.one_of(terms)})) % 7).astype({old.dtype})"
        floats = [v for v in self.visible() if accept(v) and (is_number(v) or v.dtype == old.dtype)]
        floats = [v for v in floats if v.name != old.name]
        same = [v for v in floats if v.shape == old.shape]
        if not floats:
            return f"0.5 * {old}"
        update = self.fit(self.one_of(same[:2] + floats[:4] if same else floats), old.shape)
        forms = [f"0.5 * {old} - 0.25 * {update}"]
        code = self.one_of(forms if is_complex(old) else [f"0.5 * {old} + 0.5 * jnp.tanh({update})", *forms])
        return f"({code}).astype({old.dtype})"


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


def _without(shape: tuple[int, ...], axes: Iterable[int]) -> tuple[int, ...]:
    return tuple(s for d, s in enumerate(shape) if d not in set(axes))


def _sum_grain(*values: Value) -> int | None:
    return max(v.grain for v in values) if all(v.exact for v in values) else None


def _product_grain(*values: Value) -> int | None:
    return sum(v.grain for v in values) if all(v.exact for v in values) else None


def _total(v: Value, count: int) -> float:
    """How large a sum of `count` elements is: at most, if that must be known, else about."""
    return v.scale * (count if v.exact else math.sqrt(count))


def _count(v: Value, axes: Iterable[int]) -> int:
    return math.prod(v.shape[a] for a in axes)


# -- elementwise --------------------------------------------------------------------------------------------------

SMOOTH = [
    *("jnp.tanh({})", "jnp.sin({})", "jnp.cos({})", "jnp.arctan({})", "jax.nn.sigmoid({})", "lax.erf({})"),
    *("jnp.exp(-jnp.square({}))", "jnp.expm1(jnp.tanh({}))", "jnp.log1p(jnp.square({}))"),
    *("lax.rsqrt(1.0 + jnp.square({}))", "1.0 / (1.0 + jnp.square({}))"),
    *("jax.nn.silu({})", "jax.nn.softplus({})", "jax.nn.gelu({})", "halved_gradient({})"),
    *("lax.stop_gradient({})", "lax.optimization_barrier({})"),
]
KINKED = [
    *("jax.nn.relu({})", "jnp.abs({})", "jnp.maximum({}, 0.25)"),
    *("jnp.clip({}, -0.5, 0.75)", "lax.clamp(-0.5, ({}).astype(f32), 0.5)"),
]
JUMPING = ["jnp.floor({})", "jnp.sign({})", "jnp.round({})", "jnp.ceil({})"]
INTEGER = [
    *("{} * 3 - 1", "{} % 5", "{} // 2", "{} ^ 3", "{} << 1", "{} & 1", "-{}"),
    *("jnp.abs({})", "lax.population_count({})", "jnp.minimum({}, 2)"),
]


def smooth(w: Writer) -> None:
    v = w.pick()
    w.line(w.one_of(SMOOTH).format(v), max(1.0, v.scale))


def square(w: Writer) -> None:
    v = w.pick()
    w.line(f"jnp.square({v})", v.scale**2, _product_grain(v, v))


def linear(w: Writer) -> None:
    v = w.pick()
    w.line(w.one_of(["-{}", "0.5 * {}", "{} / 4", "{} + 0.5", "1.0 - {}"]).format(v), v.scale + 1, _plus(v.grain, 2))


def _plus(grain: int | None, k: int) -> int | None:
    return None if grain is None else grain + k


def kinked(w: Writer) -> None:
    v = w.pick()
    w.line(w.one_of(KINKED).format(w.steady(v)), v.scale + 1, None if v.grain is None else max(v.grain, 2))


def jumping(w: Writer) -> None:
    v = w.pick(lambda v: is_float(v) and v.exact)
    w.line(w.one_of(JUMPING).format(v), v.scale + 1, 0)


def integer(w: Writer) -> None:
    v = w.pick(is_int)
    w.line(w.one_of(INTEGER).format(v), 3 * v.scale + 32)


def arithmetic(w: Writer) -> None:
    a = w.pick(is_number)
    b = w.partner(a, is_number)
    operator = w.one_of("+-*")
    if a.dtype != b.dtype and max(a.scale, b.scale) > 2**8:  # an integer that may not convert exactly
        raise Skip
    if operator == "*":
        w.line(f"{a} * {b}", a.scale * b.scale, _product_grain(a, b))
    else:
        w.line(f"{a} {operator} {b}", a.scale + b.scale, _sum_grain(a, b))


def ratio(w: Writer) -> None:
    a = w.pick()
    b = w.partner(a)
    form = w.one_of(["{} / (1.0 + jnp.square({}))", "{} * lax.rsqrt(1.0 + jnp.square({}))", "jnp.logaddexp({}, {})"])
    w.line(form.format(a, b), max(a.scale, b.scale))


def extremum(w: Writer) -> None:
    a = w.pick(lambda v: v.exact or not w.smooth)
    b = w.partner(a, lambda v: (v.exact or not w.smooth) and v.dtype == a.dtype)
    w.line(f"{w.one_of(['jnp.maximum', 'jnp.minimum'])}({a}, {b})", max(a.scale, b.scale), _sum_grain(a, b))


def comparison(w: Writer) -> None:
    a = w.pick(lambda v: v.exact and is_number(v))
    b = w.one_of([0, 1, w.partner(a, lambda v: v.exact and is_number(v))])
    w.line(f"{a} {w.one_of(['<', '>=', '==', '!='])} {b}")


def logic(w: Writer) -> None:
    a = w.pick(is_bool)
    b = w.partner(a, is_bool)
    w.line(w.one_of(["~{}", "{} & {}", "{} | {}", "{} ^ {}"]).format(a, b))


def where(w: Writer) -> None:
    test = w.pick(is_bool)
    a = w.partner(test, is_number)
    shape = _broadcast(test.shape, a.shape)
    b = w.one_of([0, w.pick(lambda v: v.dtype == a.dtype and _broadcast(v.shape, shape) is not None)])
    others = [b] if isinstance(b, Value) else []
    w.line(f"jnp.where({test}, {a}, {b})", max(v.scale for v in [a, *others]), _sum_grain(a, *others))


def cast(w: Writer) -> None:
    half = [w.dialect.half] if w.dialect.half else []
    v = w.pick(lambda v: not is_complex(v) and (not is_float(v) or v.exact or bool(half)))
    small = ["i8", "u8"] * 2 if w.dialect.small and not is_float(v) else []  # of floats out of range: undefined
    to = w.one_of(["f32", *(["i32"] if v.exact else []), *half, *small])
    w.line(f"{v}.astype({to})", v.scale, v.grain if to in SIGNIFICANT else 0)


# -- shapes -------------------------------------------------------------------------------------------------------


def anything(w: Writer) -> Value:
    return w.pick(lambda v: True)


def same(w: Writer, v: Value, code: str) -> None:
    """Elements are moved, not changed."""
    w.line(code, v.scale, v.grain)


def expand(w: Writer) -> None:
    v = anything(w)
    d = w.between(0, v.ndim)
    k = w.one_of([1, 2, 3, w.n])
    shape = (*v.shape[:d], k, *v.shape[d:])
    same(w, v, f"jnp.broadcast_to(jnp.expand_dims({v}, {d}), {shape})" if w.coin() else f"jnp.expand_dims({v}, {d})")


def repeat(w: Writer) -> None:
    v = anything(w)
    d = w.axis(v)
    reps = tuple(2 if i == d else 1 for i in range(v.ndim))
    same(w, v, w.one_of([f"jnp.repeat({v}, 2, axis={d})", f"jnp.tile({v}, {reps})"]))


def reshape(w: Writer) -> None:
    v = anything(w)
    shapes = [(v.size,)]
    for d in range(v.ndim - 1):
        shapes.append((*v.shape[:d], v.shape[d] * v.shape[d + 1], *v.shape[d + 2 :]))
    for d, size in enumerate(v.shape):
        shapes += [(*v.shape[:d], k, size // k, *v.shape[d + 1 :]) for k in range(2, size) if size % k == 0]
    if v.size % 2 == 0:
        shapes.append((2, v.size // 2))
    same(w, v, f"{v}.reshape({w.one_of(shapes)})")


def transpose(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 1)
    same(w, v, f"{v}.transpose({w.one_of(list(itertools.permutations(range(v.ndim)))[1:])})")


def concatenate(w: Writer) -> None:
    a = w.pick(lambda v: v.ndim > 0)
    d = w.axis(a)
    b = w.pick(lambda v: v.dtype == a.dtype and v.ndim == a.ndim and _without(v.shape, [d]) == _without(a.shape, [d]))
    grain = _sum_grain(a, b)
    how = "stack" if a.shape == b.shape and w.coin() else "concatenate"
    w.line(f"jnp.{how}([{a}, {b}], axis={d})", max(a.scale, b.scale), grain)


def slice_(w: Writer) -> None:
    v = anything(w)
    d = w.axis(v)
    start = w.between(0, v.shape[d] - 1)
    stop = w.between(start + 1, v.shape[d])
    cut = w.one_of([f"{start}", f"{start}:{stop}", f"{start}::2", "::-1"])
    same(w, v, f"{v}[{':, ' * d}{cut}]")


def split(w: Writer) -> None:
    v = anything(w)
    d = w.axis(v, at_least=2)
    parts = w.one_of(k for k in (2, 3, v.shape[d]) if v.shape[d] % k == 0)
    same(w, v, f"jnp.split({v}, {parts}, axis={d})[{w.between(0, parts - 1)}]")


def pad(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    d = w.axis(v)
    low, high = w.one_of([(1, 0), (0, 2), (1, 1)])
    widths = tuple((low, high) if i == d else (0, 0) for i in range(v.ndim))
    forms = [f"jnp.pad({v}, {widths})", f'jnp.pad({v}, {widths}, mode="edge")']
    if is_float(v):
        forms.append(f"lax.pad({v}, jnp.asarray(0.5, {v.dtype}), {tuple((*p, 1) for p in widths)})")
        forms.append(f"lax.pad({v}, jnp.asarray(0, {v.dtype}), {tuple((-p[0], p[1] + 1, 0) for p in widths)})")
    w.line(w.one_of(forms), max(v.scale, 1.0), None if v.grain is None else max(v.grain, 1))


def flip(w: Writer) -> None:
    v = anything(w)
    d = w.axis(v)
    same(w, v, w.one_of([f"jnp.flip({v}, {d})", f"jnp.roll({v}, 1, axis={d})"]))


def triangle(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 1)
    same(w, v, f"{w.one_of(['jnp.tril', 'jnp.triu'])}({v})")


def create(w: Writer) -> None:
    v = anything(w)
    k = w.one_of([2, 3, w.n, *v.shape])
    forms = [f"jnp.arange({k})", f"jnp.full({v.shape}, 0.5)", f"jnp.eye({k})", f"jnp.zeros({v.shape}, jnp.int32)"]
    if v.ndim:
        forms.append(f"lax.broadcasted_iota(jnp.int32, {v.shape}, {w.axis(v)})")
    w.line(w.one_of(forms), float(max(k, *v.shape, 1)), 1)


# -- reductions ---------------------------------------------------------------------------------------------------


def total(w: Writer) -> None:
    v = w.pick(is_number)
    axes, keep = w.axes(v), w.coin()
    count = _count(v, axes)
    w.line(f"jnp.sum({v}, axis={axes}, keepdims={keep})", _total(v, count), v.grain)


def average(w: Writer) -> None:
    v = w.pick()
    w.line(f"{w.one_of(['jnp.mean', 'jnp.var'])}({v}, axis={w.axes(v)}, keepdims={w.coin()})", v.scale**2 + v.scale)


def product(w: Writer) -> None:
    v = w.pick()
    w.line(f"jnp.prod(jnp.tanh({v}), axis={w.axes(v)})")


def greatest(w: Writer) -> None:
    v = w.pick(lambda v: is_number(v) and (v.exact or not w.smooth))
    w.line(f"{w.one_of(['jnp.max', 'jnp.min'])}({v}, axis={w.axes(v)}, keepdims={w.coin()})", v.scale, v.grain)


def truth(w: Writer) -> None:
    v = w.pick(is_bool)
    w.line(f"{w.one_of(['jnp.any', 'jnp.all', 'jnp.sum'])}({v}, axis={w.axes(v)})", float(v.size), 0)


def position(w: Writer) -> None:
    v = w.pick(lambda v: is_number(v) and v.exact)
    d = w.axis(v)
    forms = [f"jnp.argmax({v}, axis={d})", f"jnp.argmin({v}, axis={d})", f"jnp.argsort({v}, axis={d})"]
    w.line(w.one_of([*forms, f"lax.top_k({v}, 1)[1]"]), float(v.shape[d]), 0)


def order(w: Writer) -> None:
    v = w.pick(lambda v: is_number(v) and (v.exact or not w.smooth))
    d = w.axis(v)
    k = w.between(1, v.shape[-1])
    same(w, v, w.one_of([f"jnp.sort({v}, axis={d})", f"lax.top_k({v}, {k})[0]", f"lax.cummin({v}, axis={d})"]))


def sort_by(w: Writer) -> None:
    a = w.pick(lambda v: is_number(v) and v.exact and v.ndim > 0)
    b = w.pick(lambda v: is_number(v) and v.shape == a.shape)
    same(w, b, f"lax.sort(({a}, {b}), dimension={w.axis(a)}, num_keys=1)[1]")


def cumulative(w: Writer) -> None:
    v = w.pick()
    d, reverse = w.axis(v), w.coin()
    if w.coin():
        w.line(f"lax.cumsum({v}, axis={d}, reverse={reverse})", _total(v, v.shape[d]), v.grain)
        return
    forms = [f"lax.cumprod(jnp.tanh({v}), axis={d})", f"lax.cumlogsumexp({v}, axis={d}, reverse={reverse})"]
    forms.append(f"{1 / v.shape[d]:.3} * lax.associative_scan(jnp.add, {v}, axis={d})")
    if v.exact or not w.smooth:
        forms.append(f"lax.cummax({v}, axis={d})")
    w.line(w.one_of(forms), v.scale + 2)


def normalise(w: Writer) -> None:
    v = w.pick()
    d = w.axis(v)
    calls = ["jax.nn.softmax({}, axis={})", "jax.nn.log_softmax({}, axis={})", "jax.nn.logsumexp({}, axis={})"]
    calls += ["jax.nn.standardize({}, axis={}, epsilon=0.1)"]
    w.line(w.one_of(calls).format(v, d), v.scale + 3)


# -- contractions -------------------------------------------------------------------------------------------------


def dot(w: Writer) -> None:
    a = w.pick(lambda v: is_number(v) and v.ndim > 0)
    b = w.pick(lambda v: v.dtype == a.dtype and set(v.shape) & set(a.shape))
    pairs = [(i, j) for i in range(a.ndim) for j in range(b.ndim) if a.shape[i] == b.shape[j]]
    contract = [w.one_of(pairs)]
    batch = []
    for wanted in (batch, contract):
        used_a, used_b = ({p[k] for p in contract + batch} for k in (0, 1))
        left = [(i, j) for i, j in pairs if i not in used_a and j not in used_b]
        if left and w.coin():
            wanted.append(w.one_of(left))
    numbers = tuple(tuple(tuple(p[k] for p in ps) for k in (0, 1)) for ps in (contract, batch))
    count = _count(a, [i for i, _ in contract])
    scale = a.scale * b.scale * (count if a.exact and b.exact else math.sqrt(count))
    w.line(f"lax.dot_general({a}, {b}, {numbers})", scale, _product_grain(a, b))


def matmul(w: Writer) -> None:
    a = w.pick(lambda v: is_float(v) and v.ndim > 0)
    b = w.pick(lambda v: v.dtype == a.dtype and v.ndim == 2 and v.shape[0] == a.shape[-1])
    scale = a.scale * b.scale * (b.shape[0] if a.exact and b.exact else math.sqrt(b.shape[0]))
    w.line(f"{a} @ {b}", scale, _product_grain(a, b))


def convolution(w: Writer) -> None:
    """Along dimension 1; a matrix serves as (width, out), (width, channels) or (1, channels, out) kernel."""
    v = w.pick(lambda v: is_float(v) and v.ndim in (2, 3))
    k = w.pick(lambda u: u.dtype == v.dtype and u.ndim in (2, 3) and u.name != v.name)
    groups, shown = 1, str(v)
    channels = v.shape[2] if v.ndim == 3 else 1
    if v.ndim == 2:
        shown = f"{v}[:, :, None]"
    if k.ndim == 2 and channels == 1:
        kernel, width = f"{k}[:, None, :]", k.shape[0]
    elif k.ndim == 2 and k.shape[1] == channels:
        kernel, width, groups = f"{k}[:, None, :]", k.shape[0], channels
    elif k.ndim == 2 and k.shape[0] == channels:
        kernel, width = f"{k}[None]", 1
    elif k.ndim == 3 and k.shape[1] == channels:
        kernel, width = str(k), k.shape[0]
    else:
        raise Skip
    stride, dilation = w.one_of([1, 2]), w.one_of([1, 2])
    w.line(
        f"lax.conv_general_dilated({shown}, {kernel}, ({stride},), 'SAME', rhs_dilation=({dilation},),"
        f" dimension_numbers=('NWC', 'WIO', 'NWC'), feature_group_count={groups})",
        v.scale * k.scale * width * channels,
        _product_grain(v, k),
    )


def pooling(w: Writer) -> None:
    v = w.pick(lambda v: v.dtype == "f32" and v.ndim > 0)
    d = w.axis(v)
    window, stride = (tuple(2 if i == d else 1 for i in range(v.ndim)) for _ in range(2))
    stride = w.one_of([stride, (1,) * v.ndim])
    forms = [("0.0, lax.add", 2 * v.scale)] + ([("-jnp.inf, lax.max", v.scale)] if v.exact or not w.smooth else [])
    how, scale = w.one_of(forms)
    padding = w.one_of(["VALID", "SAME"]) if "add" in how else "SAME"
    w.line(f"lax.reduce_window({v}, {how}, {window}, {stride}, '{padding}')", scale, v.grain)


# -- indexing -----------------------------------------------------------------------------------------------------


def take(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    i = w.pick(is_int)
    d = w.axis(v)
    modes = ['"clip"', '"wrap"', *(['"fill", fill_value=0'] if is_number(v) else [])]
    same(w, v, f"jnp.take({v}, {i}, axis={d}, mode={w.one_of(modes)})")


def take_along(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    d = w.axis(v)
    i = w.pick(lambda u: is_int(u) and u.ndim in (v.ndim, v.ndim - 1))
    index = f"{i} % {v.shape[d]}"
    if i.ndim < v.ndim:
        index, shape = f"jnp.expand_dims({index}, {d})", (*i.shape[:d], 1, *i.shape[d:])
    else:
        shape = i.shape
    if _broadcast(_without(shape, [d]), _without(v.shape, [d])) is None:
        raise Skip
    same(w, v, f"jnp.take_along_axis({v}, {index}, axis={d})")


def scatter(w: Writer) -> None:
    i = w.pick(lambda v: is_int(v) and v.ndim == 1)
    u = w.pick(lambda v: v.dtype == "f32" and v.ndim > 0 and v.shape[0] == i.shape[0])
    tables = [v for v in w.visible() if v.dtype == "f32" and v.ndim and v.shape[1:] == u.shape[1:]]
    count = i.shape[0]
    if tables and w.coin():
        v = w.one_of(tables)
        w.line(f"{v}.at[{i} % {v.shape[0]}].add({u})", v.scale + u.scale * count, _sum_grain(v, u))
        return
    k = w.one_of([1, 3, w.n, 2 * w.n])
    call = w.one_of(["jax.ops.segment_sum({u}, {i} % {k}, {k})", "jnp.zeros({shape}).at[{i} % {k}].add({u})"])
    w.line(call.format(u=u, i=i, k=k, shape=(k, *u.shape[1:])), u.scale * count, u.grain)


def count(w: Writer) -> None:
    i = w.pick(lambda v: is_int(v) and v.ndim == 1)
    w.line(f"jnp.bincount({i} % 4, length=4)", float(i.size), 0)


def update(w: Writer) -> None:
    v = w.pick(lambda v: is_number(v) and v.ndim > 0)
    d = w.axis(v)
    start = w.between(0, v.shape[d] - 1)
    method = w.one_of(["set", "add", "multiply", "max" if v.exact else "set"])
    w.line(f"{v}.at[{':, ' * d}{start}:].{method}(2)", 2 * v.scale + 2, v.grain)


def scalar_index(w: Writer, size: int) -> str:
    """A position that only the step itself knows, perhaps from the examples."""
    i = w.pick(is_int)
    return f"{i} % {size}" if not i.ndim else f"jnp.sum({i}) % {size}"


def dynamic_slice(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    d = w.axis(v)
    k = w.between(1, v.shape[d])
    start = scalar_index(w, v.shape[d])
    if w.coin():
        same(w, v, f"lax.dynamic_slice_in_dim({v}, {start}, {k}, axis={d})")
    else:
        same(w, v, f"lax.dynamic_update_slice_in_dim({v}, {v}[{':, ' * d}:{k}], {start}, axis={d})")


def one_hot(w: Writer) -> None:
    i = w.pick(is_int)
    w.line(f"jax.nn.one_hot({i}, {w.one_of([3, 4, w.n])})", 1.0, 0)


# -- random numbers -----------------------------------------------------------------------------------------------


def random(w: Writer) -> None:
    shape = anything(w).shape
    key = f"jax.random.fold_in(key, {w.between(0, 9)})"
    forms = ["bernoulli({}, 0.5, {})", "normal({}, {})", "randint({}, {}, 0, 5)", "uniform({}, {})"]
    w.line(f"jax.random.{w.one_of(forms)}".format(key, shape), 5.0)


def dropout(w: Writer) -> None:
    v = w.pick()
    w.line(f"jnp.where(jax.random.bernoulli(key, 0.75, {v.shape}), {v}, 0)", v.scale, v.grain)


def permutation(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    if w.coin():
        same(w, v, f"jax.random.permutation(key, {v})")
    else:
        w.line(f"jax.random.permutation(key, {v.shape[0]})", float(v.shape[0]), 0)


# -- linear algebra -----------------------------------------------------------------------------------------------


def linalg(w: Writer) -> None:
    v = w.pick(lambda v: v.dtype == "f32" and v.ndim > 1 and v.shape[-2] <= 8)
    spd = f"(jnp.tanh({v}) @ jnp.tanh({v}).mT / {v.shape[-1]} + jnp.eye({v.shape[-2]}))"
    forms = [f"jnp.linalg.cholesky{spd}", f"jnp.linalg.inv{spd}", f"jnp.linalg.solve({spd}, {v})"]
    forms.append(f"lax.linalg.triangular_solve(jnp.linalg.cholesky{spd}, {v}, left_side=True, lower=True)")
    if not w.smooth:
        forms.append(f"jnp.linalg.eigvalsh{spd}")
    w.line(w.one_of(forms), 2 * v.scale + 1)


def fourier(w: Writer) -> None:
    v = w.pick(lambda v: v.dtype == "f32" and v.ndim > 0)
    d = w.axis(v)
    call = w.one_of(
        [f"jnp.fft.fft({v}, axis={d}).imag", f"jnp.fft.rfft({v}, axis={d}).real", f"jnp.fft.ifft({v}, axis={d}).real"]
    )
    w.line(call, v.scale * math.sqrt(v.shape[d]))


# -- the optimizer's usual lines ----------------------------------------------------------------------------------


def moment(w: Writer) -> None:
    m = w.pick()
    g = w.pick(lambda v: is_float(v) and v.shape == m.shape)
    w.line(w.one_of([f"0.9 * {m} + 0.1 * {g}", f"0.75 * {m} + 0.25 * jnp.square({g})"]), m.scale + g.scale**2)


def by_norm(w: Writer) -> None:
    """Clipping by the norm of one or two values, and trust ratios."""
    g, other = w.pick(), w.pick()
    norm = f"jnp.sqrt(1.0 + jnp.sum(jnp.square({g})) + jnp.sum(jnp.square({other})))"
    w.line(
        w.one_of([f"{g} / {norm}", f"jnp.minimum(1.0, 2.0 / {norm}) * {g}" if not w.smooth else f"2 * {g} / {norm}"])
    )


def by_rows(w: Writer) -> None:
    g = w.pick(lambda v: is_float(v) and v.ndim > 1)
    d = w.axis(g)
    w.line(f"{g} * lax.rsqrt(0.5 + jnp.mean(jnp.square({g}), axis={d}, keepdims=True))")


# -- functions in functions ---------------------------------------------------------------------------------------


def result_of(inner: Writer) -> str:
    """What a nested function returns: preferably something it computed."""
    found = [v for v in inner.values if is_float(v)] or inner.values
    return str(inner.one_of(found[::-1]))


def typed(v: Value) -> Value:
    """Around a loop only the dtype says whether a value is exact; integers grow a little (`next_of`)."""
    return dataclasses.replace(v, grain=None if is_float(v) else 0, scale=v.scale if is_float(v) else v.scale + 100)


def nested_call(w: Writer) -> None:
    values = [anything(w) for _ in range(w.between(1, 2))]
    f = w.function([w.parameter(v) for v in values], result_of)
    how = w.one_of(["jax.checkpoint({})", "jax.jit({})", "{}"])
    w.line_of_call(f"{how.format(f)}({', '.join(map(str, values))})")


def vmap(w: Writer) -> None:
    v = w.pick(lambda v: v.ndim > 0)
    d = w.axis(v)
    values, axes = [v], [d]
    if w.coin():
        u = anything(w)
        fitting = [None, *(e for e, size in enumerate(u.shape) if size == v.shape[d])]
        values, axes = [v, u], [d, w.one_of(fitting)]
    parameters = [
        w.parameter(u, shape=u.shape if a is None else _without(u.shape, [a]))
        for u, a in zip(values, axes, strict=True)
    ]
    f = w.function(parameters, result_of)
    w.line_of_call(f"jax.vmap({f}, in_axes={tuple(axes)})({', '.join(map(str, values))})")


def scan(w: Writer) -> None:
    xs = w.pick(lambda v: v.ndim > 0)
    init = w.pick(is_number)
    carry = w.parameter(typed(init))
    x = w.parameter(xs, shape=xs.shape[1:])

    def returned(inner: Writer) -> str:
        return f"{inner.next_of(carry)}, {result_of(inner)}"

    f = w.function([carry, x], returned)
    reverse = w.coin()
    w.line_of_call(f"lax.scan({f}, {init}, {xs}, reverse={reverse})[{w.one_of([0, 1])}]")


def repeated(w: Writer) -> None:
    init = w.pick(is_number)
    carry = w.parameter(typed(init))
    if w.smooth or w.coin():
        i = Value(w.fresh("p"), (), "i32", 3.0, 0)
        f = w.function([i, carry], lambda inner: inner.next_of(carry))
        w.line_of_call(f"lax.fori_loop(0, 3, {f}, {init})")
        return
    f = w.function([carry], lambda inner: inner.next_of(carry))
    times = w.line(scalar_index(w, 4), 4.0)
    body = f"lambda c: (c[0] - 1, {f}(c[1]))"
    w.line_of_call(f"lax.while_loop(lambda c: c[0] > 0, {body}, ({times}, {init}))[1]")


def branch(w: Writer) -> None:
    v = w.pick(is_number)
    p = w.parameter(typed(v))
    f, g = (w.function([p], lambda inner: inner.next_of(p)) for _ in range(2))
    if w.coin():
        w.line_of_call(f"lax.cond({scalar_index(w, 2)} == 0, {f}, {g}, {v})")
    else:
        w.line_of_call(f"lax.switch({scalar_index(w, 3)}, [{f}, {g}, lambda p: p], {v})")


def loop_per_example(w: Writer) -> None:
    """Each example goes round as often as it says itself."""
    times = w.pick(lambda v: is_int(v) and v.ndim > 0 and v.size > 0)
    v = w.pick(lambda v: is_number(v) and v.ndim > 0 and times.shape[0] in v.shape)
    d = w.one_of(e for e, size in enumerate(v.shape) if size == times.shape[0])
    if w.smooth:
        raise Skip  # a while loop has no gradient
    carry = w.parameter(typed(v), shape=_without(v.shape, [d]))
    f = w.function([carry], lambda inner: inner.next_of(carry))
    step = f"lambda c: (c[0] - 1, {f}(c[1]))"
    loop = f"lambda k, c: lax.while_loop(lambda c: jnp.any(c[0] > 0), {step}, ((k % 4).astype(i32), c))[1]"
    w.line_of_call(f"jax.vmap({loop}, in_axes=(0, {d}), out_axes={d})({times}, {v})")


# -- some programs only -------------------------------------------------------------------------------------------


def make_complex(w: Writer) -> None:
    a = w.pick(lambda v: v.dtype == "f32")
    forms = [f"{a} * (0.5 - 1j)", f"jnp.exp(1j * {a})", f"lax.complex({a}, 0.5 * {a})"]
    if a.ndim:
        d = w.axis(a)
        forms += [f"{1 / a.shape[d]:.3} * jnp.fft.fft({a}, axis={d})"] * 2
    w.line(w.one_of(forms), 2 * a.scale)


def of_complex(w: Writer) -> None:
    v = w.pick(is_complex)
    forms = ["jnp.conj({})", "({} * jnp.conj({})).real", "jnp.real({})", "jnp.imag({})", "1j * {}", "jnp.square({})"]
    w.line(w.one_of(forms).format(v, v), v.scale**2 + v.scale)


def with_complex(w: Writer) -> None:
    a = w.pick(is_complex)
    b = w.partner(a, lambda v: is_complex(v) or v.dtype == "f32")
    w.line(f"{a} {w.one_of('+-*')} {b}", a.scale * b.scale + a.scale + b.scale)


def over_complex(w: Writer) -> None:
    v = w.pick(lambda v: is_complex(v) and v.ndim > 0)
    axes, d = w.axes(v), w.axis(v)
    forms = [f"jnp.mean({v}, axis={axes})", f"jnp.sum({v}, axis={axes}, keepdims=True)", f"lax.cumsum({v}, axis={d})"]
    w.line(w.one_of([*forms, f"jnp.fft.ifft({v}, axis={d})"]), _total(v, v.size))


def complex_dot(w: Writer) -> None:
    a = w.pick(lambda v: is_complex(v) and v.ndim > 0)
    b = w.pick(lambda v: is_complex(v) and bool(set(v.shape) & set(a.shape)))
    i, j = w.one_of((i, j) for i in range(a.ndim) for j in range(b.ndim) if a.shape[i] == b.shape[j])
    w.line(f"jnp.tensordot({a}, {b}, ({i}, {j}))", a.scale * b.scale * math.sqrt(a.shape[i]))


def nothing(w: Writer) -> None:
    v = anything(w)
    d = w.axis(v)
    same(w, v, f"{v}[{':, ' * d}0:0]")


def by_number(w: Writer) -> None:
    v = w.pick()
    forms = ["hp * {}", "({0} if hp > 0.25 else -{0})", "{} / (tick + 1)", "{} ** (size - 1)"]
    w.line(w.one_of(forms).format(v), v.scale**2 + v.scale)


def of_size(w: Writer) -> None:
    v = anything(w)
    forms = [f"jnp.broadcast_to({v}, (size, *{v}.shape))", "jnp.arange(size)", "jnp.full((size,), hp)"]
    forms += [f"jnp.concatenate([{v}] * size, axis={w.axis(v)})"] if v.ndim else []
    code = w.one_of(forms)
    w.line(code, max(v.scale, 3.0), v.grain if str(v) in names_in(code) else 1)


def tell(w: Writer) -> None:
    same(w, v := anything(w), f"told({w.fresh.used}, {v})")


def host(w: Writer) -> None:
    if w.smooth:
        raise Skip  # no gradient
    same(w, v := w.pick(is_number), f"hosted({v})")


def collective(w: Writer) -> None:
    """What replicas know of one another: a sum or all of it is shared by all, unless it is each one's own."""
    axis = f'"{w.dialect.axis_name}"'
    v = w.pick(lambda v: is_number(v) and varies(v))
    ring = [(i, (i + 1) % w.n) for i in range(w.n)]
    shared = [(f"lax.psum({v}, {axis})", _total(v, w.n)), (f"lax.all_gather({v}, {axis})", v.scale)]
    shared += [(f"lax.pmean({v}, {axis})", v.scale)] * 4 if is_float(v) else []
    if v.exact or not w.smooth:
        shared.append((f"lax.pmax({v}, {axis})", v.scale))
    if v.ndim:
        shared.append((f"lax.all_gather({v}, {axis}, axis={w.axis(v)}, tiled=True)", v.scale))
    own = [(f"lax.ppermute({v}, {axis}, {ring})", v.scale), (f"{v} + lax.axis_index({axis})", v.scale + w.n)]
    if v.ndim and v.shape[0] % w.n == 0:
        own.append((f"lax.all_to_all({v}, {axis}, 0, 0, tiled=True)", v.scale))
        own.append((f"lax.psum_scatter({v}, {axis}, tiled=True)", _total(v, w.n)))
    code, scale = w.one_of([*shared, *own])
    grain = None if "pmean" in code else v.grain
    w.line(code, scale, grain, frozenset() if (code, scale) in shared else v.roots)


# -- the table ----------------------------------------------------------------------------------------------------

ELEMENTWISE = [smooth, linear, square, kinked, arithmetic, ratio, extremum, where, cast]
EXACT = [jumping, integer, comparison, logic]
SHAPES = [expand, repeat, reshape, transpose, concatenate, slice_, split, pad, flip, triangle, create]
REDUCTIONS = [total, average, product, greatest, truth, position, order, sort_by, cumulative, normalise]
CONTRACTIONS = [dot, dot, dot, matmul, matmul, convolution, pooling]
INDEXING = [take, take_along, scatter, count, update, dynamic_slice, one_hot]
DRAWS = [random, dropout, permutation]
LINALG = [linalg, fourier]
UPDATES = [moment, by_norm, by_rows]
NESTING = [nested_call, vmap, scan, repeated, branch, loop_per_example]
COMPLEX = [make_complex, of_complex, of_complex, with_complex, over_complex, complex_dot]
WITH_NUMBERS = [by_number, of_size]
CALLS_OF_THE_HOST = [tell, tell, host]

PRODUCTIONS = [
    *ELEMENTWISE, *EXACT, *SHAPES, *REDUCTIONS, *CONTRACTIONS, *INDEXING, *DRAWS, *LINALG, *UPDATES, *NESTING, *NESTING
]  # fmt: skip
