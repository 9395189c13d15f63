"""The values of a walk: in which layouts each may be read, and what its readers want of it."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.layout import (
    PARTIAL,
    REPLICATED,
    Axis,
    Layout,
    Partial,
    Placement,
    Replicated,
    Split,
    Varying,
    fits,
    is_batch,
    put,
    whole,
)
from ...core.program import Atom, Literal, Var
from ...core.schedule import NO_PREFERENCE, Bundle, Preference, Schedule, Transfer
from .memo import Forms, Memo, Preferences


class Values:
    """What a walk knows of the values it has met, and how it converts them."""

    def __init__(self, axes: tuple[Axis, ...], memo: Memo, preferences: Mapping[Atom, Preferences]):
        self.axes = axes
        self.memo = memo
        self.preferences = preferences
        self.shares = False  # is any state split at rest? If not, this is the replicated program: it all-reduces
        self.forms: dict[Atom, Forms] = {}
        self.moved: list[Bundle] = []  # before the step that is being decided

    def primary(self, atom: Atom) -> Layout:
        return whole(self.axes) if isinstance(atom, Literal) else self.forms[atom].primary

    def usable(self, atom: Atom, k: int) -> list[Placement]:
        if isinstance(atom, Literal):
            return [REPLICATED]
        found = list(dict.fromkeys(f[k] for f in self.forms[atom].usable))
        if self.due(atom, k) and REPLICATED not in found:
            found.append(REPLICATED)
        return found

    def due(self, atom: Atom, k: int) -> bool:
        """Will this block of state be gathered in any case? A new weight that another network follows, say."""
        home = self.primary(atom)[k]
        return isinstance(home, Split) and not home.batch and self.preference(atom, k).due

    def options(self, atom: Atom, k: int) -> list[Placement]:
        """The placements in which an operand may be offered to a rule: as it is held, or as its readers want it."""
        if isinstance(atom, Literal):
            return [REPLICATED]
        found = self.usable(atom, k)
        preference = self.preference(atom, k)
        home = found[0]
        if is_batch(home):
            return [home]  # work on examples is shared, even where they happen to be held whole as well
        if isinstance(home, Replicated | Partial) and preference.splits:
            found = found + [s for s in preference.splits[:2] if s not in found]
        if home == PARTIAL and self.shares and preference.any and not (preference.splits or preference.full):
            found = found + self.some_split(atom, k)  # a norm of it is all that is read: half an all-reduce will do
        if isinstance(home, Partial) and self.preferences[atom].several:
            # reduced once for all its readers, not once after each of them
            reduced: list[Placement] = [p for p in found if p != home]
            found = (reduced or ([REPLICATED] if preference.full else [])) + [home]
        return found

    def some_split(self, atom: Var, k: int) -> list[Placement]:
        splits: list[Placement] = [Split(d) for d in range(atom.array.ndim)]
        return [s for s in splits if fits(atom.array.shape, put(self.primary(atom), k, s), self.axes)][:1]

    def preference(self, atom: Atom, k: int) -> Preference:
        return NO_PREFERENCE if isinstance(atom, Literal) else self.preferences[atom].by_axis[k]

    def write(self, var: Var, layout: Layout) -> None:
        self.forms[var] = self.memo.forms((layout,), (layout,), self.preferences[var])

    def hold(self, atom: Atom, target: Layout) -> Layout:
        """Convert a value for its reader, and remember that it is now held this way too."""
        if isinstance(atom, Var) and target not in self.forms[atom].materialized:
            reduced = tuple(map(_reduced_first, self.primary(atom), target))
            if reduced != target:
                self.hold(atom, reduced)
            forms = self.forms[atom]
            source = forms.source(target, atom.array, self.axes, self.memo.price)
            self.convert(atom, source, target, self.memo.added(forms, target))
        return target

    def convert(self, atom: Atom, source: Layout, target: Layout, forms: Forms) -> None:
        assert isinstance(atom, Var)
        self.moved.append((Transfer(atom, source, target),))
        self.forms[atom] = forms

    def price(self, atom: Atom, target: Layout) -> float:
        """Seconds on the wire to hold a value in this layout."""
        if isinstance(atom, Literal):
            return 0.0
        array, price = atom.array, self.memo.price
        return price.move(self.forms[atom].source(target, array, self.axes, price), target, array, self.axes)

    def seconds(self, body: Schedule) -> float:
        """Of a body, once: on the wire, and in work on state where that is priced."""
        return self.memo.price.schedule(body)

    def moved_so_far(self) -> tuple[Bundle, ...]:
        moved, self.moved = tuple(self.moved), []
        return moved


def _reduced_first(held: Placement, target: Placement) -> Placement:
    """A sum that becomes each replica's own is formed once, and shared with its other readers."""
    return REPLICATED if isinstance(held, Partial) and isinstance(target, Varying) else target
