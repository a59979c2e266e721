"""Compares the constant numbers in ranks' losses: a program may make them of its own samples, by `item()`, at any time.

The look at the first losses finds numbers that are computed from samples then; a weight that follows the losses of an
epoch, or a loss that is scaled down where it is large, comes later, and is a number like any other.
"""

import math
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch

from hocket._program import warn

from ..batches import BatchShard, is_one_by_one, is_plain, kind_of, takes_one, terms
from ..mesh import World

_MOST: Final = 64  # operators of a loss that are looked at
_TERMS: Final = 16  # a loss of more has one for each of something
_ELEMENTS: Final = 4096
_ROUNDING: Final = 1e-6
_TOLERANCE: Final = 1e-9  # of a variance, relative: numbers that are alike but for rounding in float32 differ by less

_NUMBERS: Final[dict[str, tuple[str, ...]]] = {
    "Mul": ("other", "self"),
    "Pow": ("exponent",),
    "Clamp": ("min", "max"),
    "ClampMin": ("min",),
    "ClampMax": ("max",),
    "HuberLoss": ("delta",),
    "SmoothL1Loss": ("beta",),
    "NllLoss": ("weight",),
    "NllLoss2D": ("weight",),
    "BinaryCrossEntropy": ("weight",),
    "BinaryCrossEntropyWithLogits": ("weight", "pos_weight"),
}
"""What operators of losses keep of the numbers that they were given."""

_OF_CLASSES: Final = ("NllLoss", "NllLoss2D")  # whose weights are never of samples
_WEIGHTS: Final = ("weight", "pos_weight")  # of classes, that may be several
_LAYERS: Final = ("Addmm", "Convolution", "Native", "ScaledDot", "Embedding", "Cudnn")  # of models: no loss's
_APART: Final = (
    "Stack", "Cat", "Index", "IndexSelect", "MaskedSelect", "Gather", "Unbind", "Split", "SplitWithSizes",
)  # fmt: skip


class LossNumbers:
    """What numbers this rank's losses have, and whether all ranks have the same."""

    SIZE: Final = 10

    def __init__(self) -> None:
        self._told = self._summed = False
        self._mine: list[float] = []  # of the latest loss
        self._peers = 0  # ranks whose numbers are compared

    def numbers(self, loss: torch.Tensor, made: set[int], share: BatchShard, *, summed: bool = False) -> list[float]:
        """Return numbers to be summed over ranks: SIZE of them.

        Compared are ranks that have equally many samples, of which a number may come: all, or the most that do; others'
        are 0, as are those of ranks that have one each.

        Args:
            loss: Of this rank.
            made: Places in the graph of the model's outputs.
            share: This rank's part of the batch.
            summed: Whether the program has told that losses are sums.
        """
        self._mine, self._summed = [], summed
        each, more = divmod(share.total, share.world)
        self._peers = max(more, share.world - more)
        if self._told or self._peers < 2 or share.samples < 2 or loss.numel() != 1 or loss.grad_fn is None:
            return [0.0] * self.SIZE
        self._mine = found = factors(loss, share.samples, summed=summed)
        if share.samples != each + (more > share.world - more):
            return [0.0] * self.SIZE
        counts = {n for one in terms(loss, share.samples) for n in one.wholes if one.is_sum} if found else set()
        within = numbers_within(loss, made, share.samples, counts) if found else None
        size, value = float(len(found)), sum(one * (1 + i / 7) for i, one in enumerate(found))
        form, inner = within or (0.0, 0.0)
        known = [float(bool(found)), size, size * size, value, value * value]
        return [*known, float(within is not None), form, form * form, inner, inner * inner]

    def tell(self, sums: Sequence[float], world: World) -> None:
        """Warn, once and on one rank, of numbers that are not the same on all ranks; `sums` are over these."""
        ranks, *terms_, all_known, form, forms, inner, inners = sums
        size, sizes, value, values = terms_
        if self._told or not ranks or _differ(ranks, size, sizes):
            return
        said = ""
        if _differ(ranks, value, values):
            count = "divide by hocket.total of their number" if self._summed else "pass loss_weight"
            said = (
                "the program multiplies its loss, or a term of it, by a number that differs from rank to rank (here "
                f"{', '.join(f'{one:g}' for one in self._mine)}): if it depends on the values of the batch or on this "
                f"rank's loss, take hocket.average of it; if on how many samples count, {count}; if it is "
                "random, seed it alike"
            )
        elif all_known == self._peers and not _differ(ranks, form, forms) and _differ(ranks, inner, inners):
            said = (
                "the loss depends on a number that is not the same on all ranks (a factor, a limit, the weight of a "
                "class): if the program computes it from samples (by item(), by numpy, as a running mean), one device "
                "does so from all of them; give it hocket.average of the statistic. What is drawn at random may differ"
            )
        if said:
            self._told = True
            if not world.rank:
                warn(said)


def factors(loss: torch.Tensor, samples: int, *, summed: bool = False) -> list[float]:
    """Return by what a loss multiplies its terms, but for what they divide by, which may be a count.

    Nothing of a loss that has a term for each sample, or so many of something else. If it is `summed`, only sums count,
    and what they are divided by is the same on all ranks.
    """
    if is_one_by_one(loss, samples):
        return []
    parts = terms(loss, samples)
    if len(parts) > _TERMS or len(parts) % samples == 0 or any(one.node is None for one in parts):
        return []
    found = []
    for one in parts:
        if one.is_sum is summed:
            constant = summed or (one.divisor is not None and is_plain(one.divisor))
            found.append(one.scale if constant else one.factor)
        elif one.is_sum and one.divisor is not None:
            counts = math.prod(one.wholes) if is_plain(one.divisor) else 1  # `sum / 2 * (1 / n)`
            found.append(one.factor * counts)
    return found if all(map(math.isfinite, found)) else []


def numbers_within(
    loss: torch.Tensor, made: set[int], samples: int, counts: Collection[int] = ()
) -> tuple[float, float] | None:
    """Return a digest of the operators of a loss beyond the model's outputs, and a sum of the numbers that they keep.

    Factors that are one divided by one of `counts` are left out.

    Returns:
        None where a number may be of one sample: those are taken apart, or put together of such.
    """
    kinds: list[Any] = []
    total = 0.0
    todo, seen = deque([loss.grad_fn]), set[Any]()
    while todo and len(seen) < _MOST:
        node: Any = todo.popleft()
        if node is None or node in seen or node._sequence_nr() in made:
            continue
        seen.add(node)
        kind = kind_of(node)
        if kind in _APART or takes_one(node, samples):
            return None
        if kind.startswith(_LAYERS):
            continue
        for name in _NUMBERS.get(kind, ()):
            number = _number(node, name, samples)
            if number is not None and not (kind == "Mul" and _is_inverse(number, counts)):
                total += number * (1 + len(kinds) / 7)
                kinds.append(name)
        kinds.append(kind)
        todo += [one for one, _ in node.next_functions]
    digest = zlib.crc32(repr(kinds).encode()) % 2**20  # whose square is exact
    return (float(digest), total) if math.isfinite(total) else None


def _number(node: Any, name: str, samples: int) -> float | None:
    """Return a number that an operator keeps, or one that tells of several; None where it has a gradient or is none."""
    if kind_of(node) == "Mul" and [*(one for one, _ in node.next_functions), None][name == "other"] is not None:
        return None
    value = getattr(node, f"_saved_{name}", None)
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.requires_grad or value.is_complex() or not value.numel():
        return None
    if value.numel() == 1:
        return float(value) if not value.dim() or name in _WEIGHTS else None
    of_classes = kind_of(node) in _OF_CLASSES  # also where these are as many as samples
    if name not in _WEIGHTS or (value.shape[0] == samples and not of_classes):
        return None
    some = value.detach().flatten()[:_ELEMENTS].double()
    return float(some @ torch.linspace(1.0, 2.0, len(some), dtype=some.dtype, device=some.device))


def _is_inverse(number: float, counts: Collection[int]) -> bool:
    return any(abs(abs(number) * n - 1) < _ROUNDING for n in counts)


def _differ(ranks: float, total: float, squares: float) -> bool:
    """Return whether so many ranks, of whose numbers these are the sum and that of squares, have unlike ones."""
    return ranks * squares - total * total > _TOLERANCE * ranks * squares
