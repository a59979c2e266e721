"""Refuses losses in which samples meet as no derivative shows, by what other choices of them give; or tells of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hocket._program import warn

from ..batches import BatchShard
from ..mesh import World
from ._coupling import constant_divisors
from ._exchanged import ExchangedSamples
from ._kept import KEPT_APART, unlike


class _Shown(NamedTuple):
    """What other choices of samples show of a rank's loss; see `ExchangedSamples`."""

    off: float = 0.0
    beside: float | None = None
    """The same of a rank with one sample, which is put beside that of the batch before; None if it is not known."""
    mixes: bool = False
    guards: bool = False
    """Whether it divides by more than it counts."""
    may_guard: bool = False
    """Whether it does so where less counts."""
    counted: bool = False
    """Whether it divides by a count that the program has taken."""
    other: bool = False
    """Whether it divides by a larger number instead."""
    placed: bool = False
    normalised: bool = False
    constants: set[float] | None = None
    """By which it divides sums; None where that is not known."""
    kept: Any = None
    ratio: float = 0.0
    """By what it would be multiplied if sizes were those of the whole batch; 0 if that is no matter."""
    besides: tuple[float, ...] = ()
    """By what else it divides sums that it divides by `len(batch)`."""
    by_one: bool = False
    """Whether a sum is divided by 1, or this rank has no samples."""


class ExchangeCheck:
    """Looks at the first losses of a loop, as `ExchangedSamples` has followed them, on all ranks together.

    Attributes:
        told_scales: Whether it was told that a loss is multiplied by what it is not on one device.
        told_beside: Whether it was told that a loss of one sample seems to compare samples.
        blind: How many losses are looked at before it is told that no two samples of a rank show whether they meet.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._constants = set[float]()  # by which all ranks have divided a sum
        self._takes_counts = False  # whether some rank's loss has divided by a count that is a number of Python
        self._told = self._told_places = False  # of what is not the same on all ranks, and of places
        self.told_scales = False
        self.blind, self.told_beside = 0, False

    def check(
        self, loss: torch.Tensor, exchanged: ExchangedSamples, share: BatchShard, *, stated: bool, by_passes: bool
    ) -> None:
        """Refuse such a loss, or tell of it; a collective operation.

        Args:
            loss: The root of a back-propagation.
            exchanged: Has followed it.
            share: Of the batch.
            stated: Whether the program has told by what the loss is weighted.
            by_passes: Whether the loop calls the model for each sample, which has rows of its own.

        Raises:
            RuntimeError: a statistic of the batch is in it, or a count to which something is added, or what the loop
                keeps; on every rank alike.
        """
        mine = self._look(loss, exchanged, share, stated=stated, by_passes=by_passes)
        exchanged.mixes = False
        everyone: list[_Shown] = self._world.from_all(mine)
        constants = set.intersection(*(one.constants for one in everyone if one.constants is not None))
        before, self._constants = self._constants, constants
        self._refuse(everyone)
        if self._world.rank == 0:
            self._tell(everyone, share, [one for one in constants if one == share.total or one in before])

    def _look(
        self, loss: torch.Tensor, exchanged: ExchangedSamples, share: BatchShard, *, stated: bool, by_passes: bool
    ) -> _Shown:
        samples, kept = share.samples, exchanged.kept.of(loss)
        if loss.numel() != 1:
            return _Shown(constants=set() if samples else None, kept=kept, by_one=not samples)
        guards, may_guard = exchanged.guards(loss, samples, self._world.size)
        looks = share.total > 1 and not (guards or may_guard or by_passes)
        off = exchanged.meet(loss, samples, stated=stated) if looks else 0.0
        follows = not exchanged.communicates and not by_passes
        constants = constant_divisors(loss, samples, share.total) if samples else None
        counted, other = exchanged.counts.taken(constants or ())
        return _Shown(
            off=off if samples > 1 else 0.0,
            beside=off if samples > 1 or off or exchanged.is_mean(loss) else None,
            mixes=exchanged.mixes,
            guards=guards,
            may_guard=may_guard,
            counted=counted,
            other=other,
            placed=exchanged.placed,
            normalised=exchanged.normalised,
            constants=constants,
            kept=kept,
            ratio=exchanged.sizes.off(loss, samples) if follows else 0.0,
            besides=exchanged.sizes.besides(loss, samples) if follows else (),
            by_one=not samples or (follows and not stated and exchanged.sizes.by_one(loss, samples)),
        )

    def _refuse(self, everyone: Sequence[_Shown]) -> None:
        if differs := unlike([one.kept for one in everyone], kept=True):
            raise RuntimeError(KEPT_APART.format(differs))
        self._takes_counts |= any(one.counted for one in everyone)
        if any(one.guards or (one.other and self._takes_counts) for one in everyone):
            raise RuntimeError(
                "the loss divides by more than it counts (`sum / (count + 1)`, `sum / max(int(count), 10)`), and a "
                'rank counts a part of the batch: say loss_reduction="sum", and compute the divisor from '
                "hocket.total(count)"
            )
        off = max(one.off for one in everyone)
        if off and not any(one.mixes for one in everyone):
            raise RuntimeError(
                "the loss of a sample depends on other samples of its batch without a gradient (a statistic of "
                "detached outputs or of the batch, weights of classes by how often the batch has them, samples above "
                "a median), or is multiplied by how many count: with some of this rank's samples exchanged it is "
                f"{off:.2g} off, relative, from a sum of one term for each sample. Take hocket.average of the "
                "statistic, which is the same on all ranks, make it of the whole data set before training, divide by "
                "counts, or take hocket.Trainer with a plan that does not cut batches"
            )

    def _tell(self, everyone: Sequence[_Shown], share: BatchShard, constants: Sequence[float]) -> None:
        """Tell, on one rank; `constants` are numbers by which all divide sums that may stand for the batch's size."""
        ratio, besides = everyone[0].ratio, everyone[0].besides
        off = max(one.off for one in everyone)
        if ratio and not self.told_scales:
            self.told_scales = True
            warn(
                f"the program multiplies its loss by what it computes from len(batch), or divides it by other than a "
                f"count, and len(batch) is how many samples this rank has: computed from those of the whole batch it "
                f"would be {ratio:.4g} times the loss. Divide a sum by len(batch), or compute it from "
                "hocket.total(len(batch))",
            )
        twice = [one.besides for one in everyone if len(one.besides) == len(besides) > 0]
        if any(not alike(one, besides) for one in twice) and not self.told_scales:
            self.told_scales = True
            warn(
                "the loss divides a sum by len(batch), and by another number that differs from rank to rank (here "
                f"{', '.join(f'{one[0]:g}' for one in twice)}): a count, say. One device divides by both of the whole "
                'batch. Divide by one of them, or say loss_reduction="sum", and divide by hocket.total of both',
            )
        beside = max(one.beside or 0.0 for one in everyone)
        if self.blind and share.samples:
            self.blind -= 1
            if not self.blind and not beside and any(one.beside is None for one in everyone):
                warn(
                    "each rank has one sample of the batch, so that nothing shows whether samples meet in the loss, "
                    "which is none of the usual means (a root, norm or logarithm of a mean, or a dice of the whole "
                    "batch, is not that of one device): right if each sample has a loss of its own, and the loss is "
                    "their mean. A first batch with two samples for each rank shows it; hocket.Trainer compares such a "
                    "loss with that of the whole batch",
                )
        if beside and not self.told_beside and not any(one.mixes for one in everyone):
            self.told_beside = True
            warn(
                "a rank has one sample of the batch, and its loss seems to compare samples, or to be multiplied by how "
                "many count (a statistic of the batch, weights of classes by how often the batch has them): with the "
                f"sample of the batch before beside it the loss is {beside:.2g} off, relative, from the mean of both. "
                "One device has it of the whole batch. Take hocket.average of the statistic, divide by counts, or take "
                "hocket.Trainer with a plan that does not cut batches",
            )
        if all(one.by_one for one in everyone) and not self.told_scales:
            self.told_scales = True
            warn(
                "each rank has one sample of the batch, and the loss divides a sum by 1, which is not computed from "
                "len(batch): if it counts what the sum is over (`sum / max(1, int(mask.sum()))`), one device divides "
                "by the count of the whole batch. Divide by a tensor (`mask.sum().clamp(min=1)`), or pass "
                "hocket.distribute(..., loss_weight=) with that count",
            )
        if (differs := unlike([one.kept for one in everyone], kept=False)) and not self._told:
            self._told = True
            warn(
                f"the loss depends on a number or a tensor that is not the same on all ranks ({differs}), and is not "
                "of the batch: if the program computes it from samples (by item(), by numpy, as a running mean), one "
                "device does so from all of them; give it hocket.average of the statistic. What is drawn at random may "
                "differ",
            )
        if any(one.normalised for one in everyone) and not self._told:
            self._told = True
            warn(
                "the loss depends on numbers, one for each sample, whose mean over a rank's samples is 0 or 1, or "
                "their sum 1: if the program has normalised them (advantages or weights, by numpy), one device does so "
                "over all samples. Normalise by hocket.average of the statistic, or before the loader",
            )
        if any(one.placed for one in everyone) and not off:
            self.tell_places()
        if off:
            warn(
                "the loop puts each sample beside another of its batch (mixup, say), which comes from the same rank's "
                f"part of it, and not from all of it as on one device: here the loss is {off:.2g} off, relative, from "
                "one in which samples are alone",
            )
        if constants:
            whole = constants[0] == share.total
            warn(
                f"the loss divides by {constants[0]:g}"
                f"{', the size of the global batch,' if whole else ' on every rank and in each batch,'} and this rank "
                f"has {share.samples} samples: if the number stands for the size of a batch, divide by len(batch) "
                'instead; if it is a constant, the loss is a sum: say loss_reduction="sum"',
            )
        if any(one.may_guard for one in everyone):
            warn(
                "the loss divides by more than it counts where a rank counts little (`sum / count.clamp(min=10)`): "
                'in such batches it is not that of one device. Say loss_reduction="sum", and compute the divisor from '
                "hocket.total(count)",
            )

    def tell_places(self) -> None:
        """Warn, once and on one rank, that the places of samples in the batch decide what is trained with."""
        if self._told_places or self._world.rank:
            return
        self._told_places = True
        warn(
            "the loop chooses or weighs samples by the places that they have in the batch (the first few), or by "
            "numbers of numpy or a list. That is right if each is chosen by itself. If the loop ranks them, or takes a "
            "number or a share of them, one device chooses among all, and a rank among its own: choose by "
            "hocket.average of a threshold, or by each sample's values, or have the loader choose",
        )


def alike(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether numbers are the same, but for rounding."""
    return len(some) == len(others) and all(map(close, some, others))


def close(one: float, other: float) -> bool:
    """Return whether two numbers are the same, but for rounding."""
    return math.isclose(one, other, rel_tol=1e-6)
