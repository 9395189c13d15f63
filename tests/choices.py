"""Where a random program's choices come from: Hypothesis, which shrinks them, or a seed, which is quick to try.

Everything is a choice of one number below another, so a program is a list of numbers: `simplified` makes it shorter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st


class Skip(Exception):
    """Nothing to choose from: the line is left out."""


class Choices:
    """What a program is written by."""

    def below(self, n: int) -> int:
        """A number from 0 to n - 1; 0 is the simplest."""
        raise NotImplementedError

    def one_of(self, options: Iterable[Any]) -> Any:
        options = list(options)
        if not options:
            raise Skip
        return options[self.below(len(options))]

    def between(self, low: int, high: int) -> int:
        if high < low:
            raise Skip
        return low + self.below(high - low + 1)

    def coin(self) -> bool:
        return self.below(2) == 1


class Drawn(Choices):
    """Choices that Hypothesis makes."""

    def __init__(self, draw: Callable[..., Any]):
        self.draw = draw

    def below(self, n: int) -> int:
        return self.draw(st.integers(0, n - 1))


class Dice(Choices):
    """Choices by a seed, or those that were made before."""

    def __init__(self, seed: int = 0, made: Sequence[int] | None = None):
        self.random = random.Random(seed)
        self.given = made
        self.made: list[int] = []

    def below(self, n: int) -> int:
        if self.given is None:
            k = self.random.randrange(n)
        else:
            k = self.given[len(self.made)] % n if len(self.made) < len(self.given) else 0
        self.made.append(k)
        return k


def simplified(made: Sequence[int], fails: Callable[[Sequence[int]], bool], tries: int = 200) -> list[int]:
    """Fewer and smaller choices with which `fails` is still true."""
    best, left, width = list(made), tries, max(len(made) // 2, 1)
    while width and left > 0:
        at, shorter = len(best) - width, False
        while at >= 0 and left > 0:
            for candidate in (best[:at] + best[at + width :], best[:at] + [0] * width + best[at + width :]):
                if candidate == best:
                    continue
                left -= 1
                if fails(candidate):
                    best, shorter = candidate, True
                    break
            at -= width
        width = width if shorter and width > 1 else width // 2
    return best
