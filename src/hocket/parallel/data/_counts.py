"""What a program counts of its batch, and whether its loss divides by more than that."""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..batches import mapped, terms

COUNT: Final = 1e-5
"""How far what is taken for a count may be from it, relative: `count + 1e-8` is one."""

_MANY: Final = 4096.0


class Counts:
    """Knows how numbers of a batch were computed of one other each, and which whole numbers the program has taken."""

    def __init__(self) -> None:
        self._numbers: Any = WeakTensorKeyDictionary()
        self._taken = set[float]()

    def next(self) -> None:
        """Begin a batch."""
        self._taken = set()

    def add(self, count: float) -> None:
        """Take notice of a whole number that the program has taken."""
        self._taken.add(count)

    def computed(self, number: torch.Tensor, source: torch.Tensor, func: Any, given: Any) -> None:
        """Take notice of a number that an operator has computed of another, and of what it was given."""
        self._numbers[number] = source, func, given

    def guards(self, loss: torch.Tensor, samples: int, ranks: int) -> tuple[bool, bool]:
        """Return whether a loss divides by more than it counts (`count + 1`), and whether it may where less counts."""
        now = later = False
        for by in (one.divisor for one in terms(loss, samples) if one.divisor is not None):
            for one in [one for one in self._numbers if one.data_ptr() == by.data_ptr()]:
                count = one
                while count in self._numbers:
                    count = self._numbers[count][0]
                n = float(count.detach())
                values = (n or _MANY, n * ranks or _MANY, 2.0, _MANY)
                each = [self._with(one, torch.full_like(count, v)) / v for v in values]
                now |= abs(each[0] - each[1]) > COUNT * abs(each[1])
                later |= abs(each[2] - each[3]) > COUNT * abs(each[3])
        return now, later and not now

    def taken(self, divisors: Iterable[float]) -> tuple[bool, bool]:
        """Return whether a loss divides by a count that the program has taken, and whether by a larger number instead.

        Args:
            divisors: Numbers of the program, by some of which the loss divides sums.
        """
        least = min((one for one in self._taken if one > 0), default=math.inf)
        known = {one for one in divisors for n in self._taken if n > 0 and _is_times(one, n)}
        return bool(known), any(one > least and one not in known for one in divisors)

    def _with(self, number: torch.Tensor, count: torch.Tensor) -> float:
        """Return what a number would be if what it was computed of were another count."""
        steps = [number]
        while steps[-1] in self._numbers:
            steps.append(self._numbers[steps[-1]][0])
        for one in reversed(steps[:-1]):
            source, func, given = self._numbers[one]
            args, kwargs = mapped(given, functools.partial(_put, source, count))
            count = func(*args, **kwargs)
        return float(count.detach())


def _put(source: torch.Tensor, instead: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return instead if one is source else one


def _is_times(one: float, count: float) -> bool:
    return round(one / count) > 0 and abs(one / count - round(one / count)) < COUNT
