"""Other choices of a rank's samples, and what shows in what is computed for them.

Ranks' losses make that of one device only if a loss, times what it divides by, is a sum of one term for each sample.
Such a sum does not mind which samples meet: with halves a and b of a rank's samples, `f(a, b) + f(b', a') = f(a, a') +
f(b', b)`, where a' is the first of a as often as b has samples, and b' the other way. A statistic of the batch without
a gradient, weights of classes by how often the batch has them, or samples combined with others break it. Nor does it
mind where samples are: what takes the first few of them, or those that numpy or a list has ranked, does.
"""

import math
from collections.abc import Sequence

import torch

from hocket.comm import torch_adapter
from hocket.sharding import same_values

OTHERS = 4
"""How many other choices there are; with the last each sample is in the next place."""

_NEAR = 5e-2  # relative: as far as half precision rounds
_SAME = 1e-9  # relative: sums of the same numbers in another order
_MEAN = 1e-6  # how near a mean that the program has made 0 or 1 is to that
_SHORT = 2**10  # numbers that are whole, times this, are written by hand: labels may have any mean


def has_rows(one: torch.Tensor, samples: int) -> bool:
    """Return whether a tensor has a row for each sample."""
    return bool(one.dim()) and len(one) == samples and one.layout is torch.strided


def choices(rows: torch.Tensor, samples: int) -> list[torch.Tensor]:
    """Return what stands for the rows of samples: halves a and b as b' and a', a and a', b' and b; all one further."""
    a, b = list(range(samples // 2)), list(range(samples // 2, samples))
    like_a, like_b = b[:1] * len(a), (a or b)[:1] * len(b)
    return [rows[some] for some in (like_a + like_b, a + like_b, like_a + b, [*(a + b)[1:], 0])]


def unlike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors differ."""
    with torch_adapter.unsaved():
        return one.shape != other.shape or not same_values(one.detach(), other.detach())


def places(one: torch.Tensor, others: Sequence[torch.Tensor], samples: int) -> set[int]:
    """Return the dims in which a tensor has a place for each sample, as shows in what it is with other choices."""
    found = set[int]()
    with torch_adapter.unsaved():
        for dim in (dim for dim, size in enumerate(one.shape) if size == samples):
            rows = [other.detach().movedim(dim, 0) for other in others if other.shape == one.shape]
            if len(rows) == OTHERS and all(map(_near, rows, choices(one.detach().movedim(dim, 0), samples))):
                found.add(dim)
    return found


def is_normalised(one: torch.Tensor, samples: int) -> bool:
    """Return whether numbers, one for each sample, have the mean or sum that a program gives what it normalises."""
    if samples < 2 or one.numel() != samples or not one.is_floating_point():
        return False
    values = one.detach().double().flatten()
    scaled, mean, size = values * _SHORT, float(values.mean()), float(values.abs().mean())
    alike = bool((values == values[0]).all()) or torch.equal(scaled, scaled.round())
    return not alike and any(abs(mean - normal) < _MEAN * size for normal in (0.0, 1.0, 1.0 / samples))


def off(four: Sequence[float]) -> float:
    """Return how far the sum of the first two is from that of the others, relative; 0 where one is no number."""
    a, b, c, d = four
    size = max(map(abs, four))
    return abs(a + b - c - d) / size if all(map(math.isfinite, four)) and size else 0.0


def sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row."""
    return _real(rows).double().reshape(len(rows), -1).sum(1)


def rows_off(four: Sequence[torch.Tensor]) -> float:
    """Return how far rows that a model is given are from a selection that goes by each sample alone, relative.

    The sums of such rows, and of their cubes, are sums of one term for each sample (those of squares are so where rows
    are normalised over a batch), and so are cubes of a sum over each row, which tell of parts of rows that have gone to
    others (cutmix). Where not even the numbers of rows are, nothing is said: repeated rows may have been
    left out.
    """
    sizes = [len(one) if one.dim() else 0 for one in four]
    if len({one.shape[1:] for one in four}) > 1 or sizes[0] + sizes[1] != sizes[2] + sizes[3] or not min(sizes):
        return 0.0
    with torch_adapter.unsaved():
        flat = [_real(one).double().reshape(len(one), -1) for one in four]
        a, b, c, d = (torch.cat([one.sum(0), one.pow(3).sum(0)]) for one in flat)
        size = max(float(one.abs().max()) for one in (a, b, c, d)) if a.numel() else 0.0
        far = float((a + b - c - d).abs().max()) / size if size else 0.0
        weights = torch.arange(flat[0].shape[1], dtype=torch.float64, device=flat[0].device).cos()
        cubes = [(one @ weights).pow(3) for one in flat]
        a, b, c, d = (one.sum() for one in cubes)
        size = max(float(one.abs().sum()) for one in cubes)
        far = max(far, float((a + b - c - d).abs()) / size) if size else far
        if not math.isfinite(far):  # divided by a deviation that other choices have not, if it is finite as it is
            return float(bool(a.isfinite().all()))
    return far


class GivenRows:
    """Adds up what models are given of a batch, in one or more passes: all samples, or those in some places alone."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # by place among the arguments: with samples as they are, and moved
        self._unknown = False

    def add(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]) -> None:
        """Take a pass into account, with what its tensors are where samples are in other places; None if unknown."""
        self._unknown |= all(one is None for one in others)
        with torch_adapter.unsaved():
            for i, (one, other) in enumerate(zip(tensors, others, strict=True)):
                if other is not None:
                    some = torch.stack([_summary(one), _summary(other)])
                    self._sums[i] = some + self._sums.get(i, torch.zeros_like(some))

    @property
    def placed(self) -> bool:
        """Whether the places of samples decide which ones models were given."""
        found = (torch.stack(list(self._sums.values())) if self._sums else torch.zeros(0, 2, 3)).cpu()
        one, other = found.unbind(1)
        return not self._unknown and bool(((one - other).abs() > _SAME * found[..., -1:].amax(1)).any())


def _summary(rows: torch.Tensor) -> torch.Tensor:
    values = _real(rows).double().flatten()
    return torch.stack([values.sum(), values.pow(3).sum(), values.abs().sum() + values.abs().pow(3).sum()])


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool((one - other).norm() <= _NEAR * other.norm())


def _real(one: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(one.detach()) if one.is_complex() else one.detach()
