"""What the graph of a rank's loss shows, and what that comes to in sums over ranks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_TERMS = 8
"""Numbers by which the terms of a loss are compared among ranks."""


class LossSigns(NamedTuple):
    """What a rank's loss shows before a back-propagation."""

    terms: Sequence[float]
    """What each of its terms divides by; none where the graph does not tell."""
    inverse: Sequence[float]
    """One divided by what each is multiplied by, all numbers together, where all are sums; else none."""
    more: float
    """By how much more its term divides if it is not that of one sample (`torch.stack(losses).mean()`)."""
    samples: int
    """How many samples the rank has."""
    scales: Sequence[float]
    """By what it multiplies means."""
    wrong: float
    """Not 0 where the rank goes through its batch in parts that are not as those of one device."""
    guard: bool | None
    """Whether a divisor of 1 stands for nothing, unless the loss divides by samples; None if that is not known."""
    inverse_guard: bool | None
    """The same of a factor that is one divided by a count."""
    by_samples: bool
    """Whether it may be divided by the number of samples."""
    inverse_by_samples: bool
    """Whether a factor may be one divided by the number of samples."""
    hidden: bool
    """Whether torch.compile hides what it divides by."""
    news: float
    """1 where it has a form that it had not before; more where padding changes it, see `LaterPadding`."""
    numbers: Sequence[float]
    """Its constant numbers, see `LossNumbers`."""

    @property
    def counting(self) -> bool:
        """Whether something counts. Where nothing does the loss may be of another form: that of other ranks holds."""
        return self.samples > 0 and any(self.terms)

    def counts(self, divisors: Sequence[float]) -> torch.Tensor:
        """Return what its terms divide by, `terms` or `inverse`, to be summed over ranks; see `TermCounts`."""
        terms = divisors if self.samples and any(divisors) else ()
        counts = folded(terms)
        known = not self.samples or len(divisors) > 0
        counting = len(terms) > 0
        single = counting and len(terms) % self.samples > 0 and (len(terms) > 1 or terms[0] % self.samples > 0)
        size = len(terms)
        more = torch.tensor([size, size * size, known, counting, single], dtype=torch.float64)
        return torch.cat([counts, counts.square(), counts * counts[0], more])

    def scaled(self) -> list[float]:
        """Return by what it multiplies means as numbers whose sums over ranks tell whether all do by the same."""
        scale = sum(one * (1 + i / 7) for i, one in enumerate(self.scales))
        return [scale, scale * scale, float(scale != 0), self.wrong]


class TermCounts:
    """What the terms of ranks' losses divide by: sums over ranks of `LossSigns.counts`.

    Attributes:
        totals: Over ranks, of each term.
        number: Terms, of all ranks.
        known: Ranks of which it is known what they divide by.
        voters: Ranks of which something counts.
        singles: Ranks whose terms are neither one for each sample nor their mean.
    """

    def __init__(self, sums: torch.Tensor) -> None:
        self.totals, self._squares, self._products = sums[:-5].clone().view(3, _TERMS)
        self.number, self._numbers_squared, self.known, self.voters, self.singles = sums[-5:].tolist()

    @property
    def equally_many(self) -> bool:
        """Whether all ranks' losses have equally many terms."""
        return bool(self.number**2 == self.voters * self._numbers_squared)

    @property
    def alike(self) -> bool:
        """Whether first terms divide by the same on all ranks of which something counts."""
        return math.isclose(self.totals[0] ** 2, self._squares[0] * self.voters, rel_tol=1e-9)

    @property
    def the_same(self) -> bool:
        """Whether all terms of a loss divide by the same."""
        return torch.allclose(self.totals, self.totals[0] * folded([1.0] * int(self.number / self.voters)))

    @property
    def in_proportion(self) -> bool:
        """Whether the counts of each two terms are: if and only if Cauchy and Schwarz's bound is reached."""
        return torch.allclose(self._products.square(), self._squares * self._squares[0], rtol=1e-4)


def folded(terms: Sequence[float]) -> torch.Tensor:
    """Return numbers of terms as _TERMS of them: more are in proportion if they are in these sums, but for chance."""
    found = torch.zeros(_TERMS, dtype=torch.float64)
    for i, one in enumerate(terms):
        found[i % _TERMS] += one * (1 + i // _TERMS / 7)
    return found
