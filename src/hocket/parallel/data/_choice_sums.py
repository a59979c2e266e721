"""How far a loss that is computed for several choices of samples is from a sum of one term for each sample."""

import math
from collections.abc import Sequence

import torch

from ._choices import off
from ._counts import COUNT


def factors_off(factors: Sequence[Sequence[float]], counts: Sequence[Sequence[float]]) -> float:
    """Return how far factors of a loss's means depend on which samples meet, relative.

    A factor may be constant, a count, or a share of what all means count: their product is a sum over samples then.
    """
    worst = 0.0
    for i in range(min(map(len, (*factors, *counts)))):
        known = [(f[i], n[i], sum(n)) for f, n in zip(factors, counts, strict=True) if n[i] and math.isfinite(f[i])]
        ways = [[f for f, _, _ in known], [f / n for f, n, _ in known], [f * all_ / n for f, n, all_ in known]]
        worst = max(worst, min((max(one) - min(one)) / (max(one) or 1.0) if one else 0.0 for one in ways))
    return worst


def sums_off(some: Sequence[torch.Tensor], counts: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return how far a loss is from a sum over samples, and from one that places do not matter to; then its size."""
    by = [one[0] if one else 1.0 for one in counts]
    values = [float(one.detach()) for one in some]  # 0 / 0 adds nothing, 1 / 0 what is not known
    *four, last = [v * n if n or v == v else 0.0 for v, n in zip(values, by, strict=True)]
    whole = all(one > 1 or one <= COUNT * max(by) for one in by)  # and no guard, as of `count.clamp(min=1)`
    far = max(off(four), off(by[:4]) if whole else 0.0)
    return far, off([four[0], last, last, last]), max(map(abs, values))


def in_proportion(counts: Sequence[Sequence[float]]) -> bool:
    """Return whether what terms divide by is in proportion with all choices of samples, but where nothing counts."""
    shares = [[one / (some[0] or 1.0) for one in some] for some in counts if any(some)]
    return all(math.isclose(one, each[0]) for each in zip(*shares, strict=True) for one in each)
