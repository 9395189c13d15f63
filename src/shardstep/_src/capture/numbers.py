"""Python numbers among the arguments: which are constants, and which are traced.

A number that is an argument by itself (a learning rate) is traced, as under `jax.jit`. Of one that stands inside an
argument nobody can say beforehand what it is: `TrainState.step` counts, `scale: float` of a module is a hyperparameter,
which as a tracer would be differentiated and trained. So the step is read with such numbers as constants first, which
is always right for these values. What it hands back as it came stays a constant; what it changes is traced in a second
reading, if that does not change what the step computes.

A constant that has another value in a later call would compile the step anew each time. Those that were seen to vary
are traced too, if the program is then the same one (`_same_program`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.errors import ShardstepError
from ..core.program import Atom, Literal, Program
from .arguments import NUMBERS, Call, Constant
from .find_state import Matching
from .tracing import Keep, Traced


class Reading(Protocol):
    """A step, read with some numbers as constants."""

    call: Call
    traced: Traced
    program: Program

    @property
    def matching(self) -> Matching: ...


Read = Callable[[Call, Keep | None], Any]


def settle(call: Call, read: Read, varying: Collection[int] = ()) -> Any:
    """Read the step with each number as what it is. `varying`: those that had other values in earlier calls."""
    if not call.numbers:
        return read(call, None)
    first, constants = _first(call, read)
    if not constants:
        return first
    returned = _Returned.of(first, call.inner_numbers & constants)
    wanted = returned.changed | (call.inner_numbers & constants & set(varying))
    while wanted:
        second = _attempt(call.fixed(constants - wanted), read, returned.keep(wanted))
        if second is None:
            break
        if not (refused := _refused(first, second, wanted, returned)):
            return second
        wanted = wanted - refused
    if returned.all_kept:
        return first
    return _attempt(first.call, read, returned.keep(frozenset())) or first


def varying(call: Call, earlier: Iterable[Any]) -> frozenset[int]:
    """The numbers of a call that had other values in an earlier one, where they were constants."""
    here = call.merged(call.leaves)
    found = set()
    for captured in earlier:
        there = captured.call.merged(captured.call.leaves)
        found |= {p for p in captured.constants & set(call.numbers) if Constant(here[p]) != Constant(there[p])}
    return frozenset(found)


def _first(call: Call, read: Read) -> tuple[Any, frozenset[int]]:
    """The step with as many constants as it takes; if it cannot be read at all, the error that `jax.jit` would give."""
    inner, everything = call.inner_numbers, frozenset(call.numbers)
    errors: dict[frozenset[int], Exception] = {}
    for constants in dict.fromkeys((inner, everything, frozenset[int]())):
        try:
            return read(call.fixed(constants), _always if constants & inner else None), constants
        except ShardstepError:
            raise
        except Exception as error:  # a shape, a hash, a branch: whatever a tracer cannot be used for, or a number
            errors[constants] = error
    raise errors[frozenset()]


def _always(_: int) -> bool:
    return True


def _attempt(call: Call, read: Read, keep: Keep) -> Any:
    """The step read in this way, or None if it cannot be."""
    try:
        reading = read(call, keep)
        _ = reading.matching
    except Exception:  # the reading with constants stands
        return None
    return reading


@dataclass(frozen=True)
class _Returned:
    """Where the constants come back, in the reading that has all of them."""

    places: dict[int, int]  # number among the arguments -> leaf of the result
    changed: frozenset[int]  # of the numbers, those that come back as something else
    numbers: frozenset[int]  # leaves of the result that are numbers
    occupied: frozenset[int]  # leaves of the result that an argument comes back in
    objects: bool

    @classmethod
    def of(cls, reading: Reading, constants: Collection[int]) -> _Returned:
        out, places = reading.traced.out_leaves, reading.matching.places
        merged = reading.call.merged(reading.call.leaves)
        found = {p: places[p] for p in constants if p in places}
        changed = frozenset(p for p, o in found.items() if out[o] != Constant(merged[p]))
        numbers = {o for o, x in enumerate(out) if isinstance(x, Constant) and isinstance(x.value, NUMBERS)}
        occupied = frozenset(places.values())
        return cls(found, changed, frozenset(numbers), occupied, reading.traced.holds_objects)

    def keep(self, traced: Collection[int]) -> Keep:
        """Numbers come back as numbers in the places of constants; elsewhere as `jax.jit` or `eqx.filter_jit` do."""
        constant = {o for p, o in self.places.items() if p not in traced}
        return lambda o: o in constant or (self.objects and o not in self.occupied)

    @property
    def all_kept(self) -> bool:
        return all(map(self.keep(()), self.numbers))


def _refused(first: Reading, second: Reading, wanted: frozenset[int], returned: _Returned) -> frozenset[int]:
    """The numbers that must stay constants, because as tracers they would change what the step computes.

    Integers are not differentiated: it is enough that they come back as a function of the same arrays as before.
    """
    if _same_program(first, second, wanted):
        return frozenset()
    merged = first.call.merged(first.call.leaves)
    exact = {p for p in wanted & returned.changed if isinstance(merged[p], int)}
    if wanted - exact:
        return wanted - exact
    places = {p: returned.places[p] for p in exact}
    return frozenset(
        p
        for p, o in places.items()
        if not _arrays_behind(second, o) - wanted <= _arrays_behind(first, o) or second.matching.places.get(p) != o
    )


def _arrays_behind(reading: Reading, leaf: int) -> set[int]:
    """The leaves of the arguments that this leaf of the result is computed from."""
    o = reading.traced.out_leaves[leaf]
    if isinstance(o, Constant):
        return set()
    places = [p for p, traced in enumerate(reading.call.traced) if traced]
    behind: dict[Atom, set[int]] = {v: {p} for v, p in zip(reading.program.inputs, places, strict=True)}
    for equation in reading.program.equations:
        together = set().union(*(behind.get(a, ()) for a in equation.inputs))
        behind.update(dict.fromkeys(equation.outputs, together))
    return behind.get(reading.program.outputs[o], set())


def _same_program(first: Reading, second: Reading, traced: Collection[int]) -> bool:
    """Are the two one program, but for what they compute of numbers and constants alone?"""
    if first.traced.out_tree != second.traced.out_tree:
        return False
    return list(_substance(first, traced)) == list(_substance(second, traced))


def _substance(reading: Reading, numbers: Collection[int]) -> Iterator[Any]:
    places = [p for p, traced in enumerate(reading.call.traced) if traced]
    program = reading.program
    names: dict[Atom, Any] = {v: p for v, p in zip(program.inputs, places, strict=True) if p not in numbers}

    def name(atom: Any) -> Any:
        return None if isinstance(atom, Literal | Constant) else names.get(atom)

    for equation in program.equations:
        inputs = tuple(map(name, equation.inputs))
        if all(x is None for x in inputs) and not equation.effects:
            continue
        names.update({v: (len(names), k) for k, v in enumerate(equation.outputs)})
        inner = [e.primitive for body in equation.bodies for e in body.walk()]
        shapes = [(a.array.shape, a.array.dtype) for a in equation.outputs]
        yield equation.primitive, inputs, inner, shapes
    for leaf in reading.traced.out_leaves:
        yield name(leaf if isinstance(leaf, Constant) else program.outputs[leaf])
