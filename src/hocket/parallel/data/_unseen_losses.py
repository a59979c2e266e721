"""Losses that a program computes of the model by another way than its forward pass, which weights do not follow."""

from collections.abc import Iterable

import torch

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import BatchShard, divisors, due, of_parameters
from ..batches import batch as _batch
from ..mesh import World
from ._coupling import sums_of_samples
from ._exchanged import ExchangedSamples
from ._first_loss import SMALL_SUM
from ._kept import KEPT_APART, unlike
from ._loss_weight import LossWeights

_BATCHES, _EACH = 2, 2
"""Batches whose losses are looked at, and how many of each."""


class UnseenLosses:
    """Looks at the first of them as at other losses, and tells of those that do not divide by samples.

    By their numbers ranks are weighted then.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._tells = world.rank == 0
        self._told = False  # of what may not be that of one device
        self._count = 0
        self._batches = self._looked = 0  # that have come, and whose losses were looked at
        self._left, self._first = 0, True  # losses of this batch that are looked at; whether none was yet

    def next(self) -> None:
        """Take notice of a batch; ranks compare themselves in those whose number is a power of two, and each 32nd."""
        self._batches += 1
        self._first = True
        self._left = _EACH if self._looked < _BATCHES else int(due(self._batches))

    def backward(
        self,
        loss: torch.Tensor,
        parameters: Iterable[torch.Tensor],
        module: torch.nn.Module,
        exchanged: ExchangedSamples,
        losses: LossWeights,
    ) -> None:
        """Look at a loss whose back-propagation begins; in the first ones a collective operation, if it trains these.

        Raises:
            RuntimeError: samples meet in it, it is a sum, or ranks' replicas differ; on every rank alike.
        """
        note = _batch.trained()
        if note is None or note.share is None or _batch.contested():
            return
        self._count += 1
        looks, tells = self._left > 0 and note.share.total > 1, self._tells and not note.stated and due(self._count)
        if not (looks or tells) or loss.numel() != 1 or loss.grad_fn is None or of_parameters(loss.grad_fn):
            return
        if not (readers := torch_adapter.readers(loss, {id(one) for one in parameters})):
            return
        if looks:
            self._left -= 1
            if self._first:
                self._first = False
                losses.unseen(loss, readers, note.share)
                self._looked += 1
            if self._looked <= _BATCHES:
                self._check(loss, readers, exchanged, note, batch_norm=any(map(_is_batch_norm, module.modules())))
        if tells:
            self._tell_count(loss, note.share)

    def _tell_count(self, loss: torch.Tensor, share: BatchShard) -> None:
        samples = share.samples
        if not 0 < samples < share.total:
            return
        odd = [one for one in divisors(loss, samples, once=True) if one and one % samples and samples % one]
        if not odd:
            return
        self._tells = False
        warn(
            f"a loss that is not computed by model(...) (but by another method of it, its module, or "
            f"torch.func.functional_call) divides by {odd[0]:g}, and this rank has {samples} samples, by which ranks "
            "are weighted then: if it is a mean over something else (tokens that count, weights), it is not that of "
            "one device. Compute it from model(...), or pass hocket.distribute(..., loss_weight=)",
        )

    def _check(
        self, loss: torch.Tensor, readers: set[int], exchanged: ExchangedSamples, note: _batch.Note, *, batch_norm: bool
    ) -> None:
        """Refuse a loss that is no mean of one term for each sample; batch norm that trains is told of elsewhere."""
        assert note.share is not None
        samples = note.share.samples
        off = 0.0 if batch_norm else exchanged.meet(loss, samples, stated=note.stated)
        known = note.stated or exchanged.communicates or not samples
        summed = "" if known else sums_of_samples(loss, readers, samples)
        everyone = self._world.from_all((off, exchanged.mixes, summed, exchanged.kept.of(loss)))
        offs, mixes, sums, kept = zip(*everyone, strict=True)
        if differs := unlike(kept, kept=True):
            raise RuntimeError(KEPT_APART.format(differs))
        if max(offs) and not any(mixes):
            raise RuntimeError(
                "the loss of a sample depends on other samples of its batch (in-batch negatives, a ranking, a "
                "statistic of the batch, a step of an inner loop on some of them), and a rank has only some of them: "
                f"with some of this rank's samples exchanged it is {max(offs):.2g} off, relative, from a sum of one "
                "term for each sample. It is not computed by model(...), but by another method of it, its module or "
                "torch.func.functional_call. Gather what it needs with a collective that has a gradient "
                "(torch.distributed.nn.functional.all_gather), take hocket.average of a statistic, or take "
                "hocket.Trainer with a plan that does not cut batches"
            )
        if "sum" in sums:
            raise RuntimeError(
                "a loss that is not computed by model(...) (but by another method of it, its module, or "
                "torch.func.functional_call) is a sum over samples, or has a term that is one, and ranks' losses are "
                'averaged: pass hocket.distribute(..., loss_reduction="sum") if all of it is a sum, and report it by '
                "hocket.total(loss); else make that term a mean over the samples that the loop has"
            )
        if self._told or self._world.rank:
            return
        if max(offs):
            self._told = True
            warn(
                "the loop puts each sample beside another of its batch (mixup, say), which comes from the same rank's "
                f"part of it, and not from all of it as on one device: here the loss is {max(offs):.2g} off, relative, "
                "from one in which samples are alone",
            )
        elif summed == "small":
            self._told = True
            warn(SMALL_SUM.format(samples, note.share.world))


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training
