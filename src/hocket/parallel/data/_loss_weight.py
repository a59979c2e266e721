"""By what a rank's loss is weighted, as its graph tells; a loss that no weight makes that of one device is refused."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from hocket import comm
from hocket.comm import torch_adapter

from ..batches import GUARDED, BatchShard, divides_by_samples, divisor_of_shares, divisors, guarded, is_one_by_one
from ..batches import batch as _batch
from ..mesh import World
from ._apart import PADDED, Apart
from ._coupling import (
    bends_one,
    constant_divisors,
    form_of,
    gathered,
    is_listed,
    outputs_apart,
    samples_compete,
    samples_meet,
    samples_paired,
    scale_of_means,
    sums_of_samples,
    taken_beside,
)
from ._exchanged import ExchangedSamples
from ._kept import unlike
from ._later_padding import FOUND, LATENT, LaterPadding
from ._loss_numbers import LossNumbers
from ._replica_marks import ReplicaMarks

_TERMS = 8
"""Numbers by which the terms of a loss are compared among ranks."""

_LOOKED_AT = 4
"""Batches in whose losses constant factors are looked at."""

_APART = 2.0**20  # says so in a sum over ranks; 1 says that the losses of single samples add up wrongly


class BatchParts:
    """Follows a loop that goes through its batch in parts, each with a back-propagation."""

    def __init__(self) -> None:
        self._note: Any = None
        self._seen = self._scaled = 0.0
        self._told = self._told_updates = False
        self._updates = 0

    def apart(self, note: Any, part: float, updates: int, *, anew: bool) -> bool:
        """Return whether the gradient of a part of a batch is taken by itself; tell where a part makes an update.

        `updates` is how often the optimizer has updated, and `anew` whether there is no gradient before this one.
        """
        before, self._updates = self._updates, updates
        if self._note is not note or not 0 < part < 0.999 or not anew:
            return False
        if updates == before:
            return True
        if not self._told_updates:
            self._told_updates = True
            warnings.warn(
                "the loop updates the model after a part of its batch: the first parts of all ranks are other samples "
                "than one device's first part, so that losses differ from its own: make the loader's batch as large as "
                "one update takes",
                stacklevel=5,
            )
        return False

    def add(self, note: Any, part: float, scale: float, samples: int) -> bool:
        """Take a part of a batch into account.

        `part` says how much of a batch, and `scale` by what constant its mean is multiplied; 0 where that is not known.

        Returns:
            Whether parts are single samples whose factors do not add up to one.
        """
        if self._note is not note:
            self._note, self._seen, self._scaled = note, 0.0, 0.0
        if not scale or not 0 < part < 0.999:
            return False
        second = self._seen > 0
        self._seen, self._scaled = self._seen + part, self._scaled + scale
        if abs(part * samples - 1) < 1e-3:
            return second and abs(scale * samples - 1) > 1e-3
        if self._seen > 0.999 and abs(self._scaled - 1) > 1e-3 and not self._told:
            self._told = True
            warnings.warn(
                f"the loop goes through its batch in parts whose losses add up to {self._scaled:g} times the mean: "
                "right if there are as many parts on one device; if parts are of a fixed size there are more of them "
                "there, so divide each loss by their number",
                stacklevel=5,
            )
        return False


class LossWeights:
    """Finds the weight of this rank's loss in each back-propagation; its calls are collective operations."""

    def __init__(self, world: World, marks: ReplicaMarks, padding: LaterPadding) -> None:
        self._world, self._marks, self._padding = world, marks, padding
        self._parts = BatchParts()
        self._numbers = LossNumbers()
        self._looked_at = 0
        self._constants = set[float]()  # by which all ranks have divided a sum
        self._takes_counts = False  # whether some rank's loss has divided by a count that is a number of Python
        self._told = False  # of what is not the same on all ranks
        self._told_scales = self._told_places = False
        self._scales: dict[int, list[tuple[float, ...]]] = {}  # of the first losses of batches of each size
        # the first batch of a size for which they differ from those of another, which are the second, and its own
        self._changed: tuple[BatchShard, tuple[float, ...], tuple[float, ...]] | None = None
        self._counts = False  # whether the loss has divided by something else than samples
        self._by_samples = False  # whether it has always divided by samples, as far as that was sure
        self._forms = set[frozenset[Any]]()  # of this rank's losses so far
        self._fresh = False  # whether it has a new one that was not told to other ranks yet
        self.is_new = False  # whether some rank's loss has a form that it had not before, and is to be looked at again
        self._otherwise = False  # whether a loss has had another weight on this rank than by samples
        self._gathered = False  # whether the loop gathers what ranks' losses have in common
        self._one_by_one = False  # whether the loop adds up the losses of single samples
        self._by_passes = False  # whether it calls the model for each sample, which has rows of its own

    @property
    def looks_at_parts(self) -> bool:
        """Whether it matters what part of a batch the model is called with."""
        return self._looked_at < _LOOKED_AT

    def of(
        self,
        loss: torch.Tensor,
        made: set[int],
        note: _batch.Note,
        part: float,
        samples: int,
        anew: bool,
        otherwise: bool = False,
    ) -> float | None:
        """Return the weight of this rank's loss; None where its graph does not tell.

        `loss` is a scalar, or the root of a back-propagation that is none; `part` says with how much of the batch the
        model was called, 0 where it is not known; `anew` whether there is no gradient before this one; `otherwise`
        whether the model, looked at by itself, gives a loss that divides by something else than samples.

        Raises:
            RuntimeError: no one weight is right for all terms, parts are wrong, or torch.compile hides what the loss
                divides by; on every rank alike.
        """
        single = loss.numel() == 1
        self._one_by_one |= single and is_one_by_one(loss, samples)
        terms = divisors(loss, samples) if single and not self._one_by_one else ()
        if len(terms) > 1 and divides_by_samples(loss, samples):  # of classes, say, of which a rank may have some
            terms = terms[:1]
        shares = divisor_of_shares(loss, samples) if len(terms) > 1 else 0.0
        terms = (shares,) if shares else terms
        more = 0.0
        if len(terms) == samples == 1 and terms[0] > 1 and is_listed(loss, made):  # of one sample, or of one batch
            terms, more = (1.0,), terms[0] - 1.0
        assert note.share is not None
        new_size = single and len(self._scales.get(note.share.total, ())) < 2
        if single and (new_size or self._changed is not None) and not 0 < part < 0.999:
            self._tell_changes(scale_of_means(loss, made, samples, learned=False), note.share)
        scales = scale_of_means(loss, made, samples) if self.looks_at_parts and single else ()
        scales = (1.0,) if scales and shares else scales
        wrong = _APART * self._parts.apart(note, part, self._marks.updates, anew=anew)
        wrong += self._parts.add(note, part, scales[0] if scales else 0.0, samples)
        self._looked_at += not 0 < part < 1
        guard = samples > 0 and 1.0 in terms and guarded(loss, samples)
        self._otherwise |= otherwise
        hidden = single and samples > 0 and not terms and torch_adapter.is_compiled(loss)
        new = self._takes_form(loss, made, samples) + self._padding.number(loss, samples)
        numbers = self._numbers.numbers(loss, made, note.share)
        weight = self._weight_by(terms, samples, scales, wrong, guard, new, more, hidden, numbers)
        self._otherwise |= weight is not None and abs(weight - note.share.weight) > 1e-6
        return weight

    def _tell_changes(self, scales: tuple[float, ...], share: BatchShard) -> None:
        """Warn if what multiplies means is another number in a batch of another size alone.

        It was the same in two batches of a size before, and is so in the next: no schedule is like that.
        """
        before, changed = self._scales.get(share.total), self._changed
        if changed is not None and changed[0] == share:
            return  # another loss of the same batch
        self._changed = None
        if changed is not None and _alike(changed[1], scales) and not self._told_scales:
            odd = changed[0]
            usual, number = next(pair for pair in zip(scales, changed[2], strict=True) if not _close(*pair))
            self._told_scales = True
            if not self._world.rank:
                warnings.warn(
                    f"the program multiplies its mean loss by {usual:g}, and by {number:g} in a batch of another size, "
                    f"of which this rank has {odd.samples} of {odd.total} samples: if it computes the number from "
                    "len(batch), compute it from hocket.total(len(batch)), as one device does",
                    stacklevel=5,
                )
        if before is None:
            pairs = [some for some in self._scales.values() if len(some) == 2 and _alike(*some)]
            first = next((one for one, _ in pairs if len(one) == len(scales) and not _alike(one, scales)), None)
            self._changed = None if first is None else (share, first, scales)
        self._scales.setdefault(share.total, []).append(scales)

    def stated(self, loss: torch.Tensor, made: set[int], weight: float, share: BatchShard) -> None:
        """Take notice of a loss of which the program has told the weight.

        Raises:
            RuntimeError: ranks count differently where the loop gathers, or their replicas differ; on every rank alike.
        """
        self.check_alike(weight)
        self._fresh |= self._takes_form(loss, made, share.samples)
        fresh = self._compare(loss, made, share, float(self._fresh), summed=False)
        self.is_new = fresh is not None and fresh % LATENT > 0
        self._fresh &= fresh is None

    def summed(self, loss: torch.Tensor, made: set[int], share: BatchShard | None) -> None:
        """Take notice of a loss that is a sum, or of one of no batch of a loader.

        Raises:
            RuntimeError: see `stated`.
        """
        self._compare(loss, made, share, 0.0, summed=True)

    def _compare(
        self, loss: torch.Tensor, made: set[int], share: BatchShard | None, more: float, *, summed: bool
    ) -> float | None:
        """Compare what a loss shows besides its weight, in some calls; return the sum of `more` over ranks then."""
        if share is not None:
            more += self._padding.number(loss, share.samples)

        def numbers() -> list[float]:
            none = [0.0] * LossNumbers.SIZE
            return [more, *(none if share is None else self._numbers.numbers(loss, made, share, summed=summed))]

        if (found := self._marks.compare(self._world, numbers)) is None:
            return None
        if found[0] >= LATENT:
            self._padding.refuse(self._world)
        self._numbers.tell(found[1:], self._world)
        return found[0]

    def _takes_form(self, loss: torch.Tensor, made: set[int], samples: int) -> bool:
        """Return whether this rank's loss has a form that it had not before."""
        form = form_of(loss, made, samples)
        new = form not in self._forms
        self._forms.add(form)
        return new

    def check_first(
        self,
        loss: torch.Tensor,
        outputs: Sequence[list[torch.Tensor]],
        kept: Sequence[torch.Tensor],
        made: set[int],
        share: BatchShard,
        apart: Apart | None,
    ) -> None:
        """Refuse a loss that no weights of ranks make that of one device.

        `outputs` are what the model gave in each forward pass for the first batch, `kept` what it has in attributes
        after the last of them, and `made` places in the graph of what that gave; `apart` is what the model computes for
        a sample from others, None where that was not found out.

        Raises:
            RuntimeError: samples meet in it, or it is a sum; on every rank alike.
        """
        samples, single = share.samples, loss.numel() == 1
        together = gathered(loss, made, self._world.size)  # then no second derivative: it would be a collective, too
        taken = taken_beside(loss, kept, made)
        rows = (
            [one for i, one in enumerate(taken, apart.outputs) if i in apart.rows and one is not None] if apart else []
        )
        meet = not together and (
            samples_meet(loss, outputs_apart(outputs) + rows, samples) or samples_paired(loss, made, samples)
        )
        summed = sums_of_samples(loss, made, samples) if single else ""
        given = [one for some in outputs for one in some if one.dim()]
        self._by_passes = len(outputs) >= samples > 1 and any(len(one) != samples for one in given)
        looked = single and share.total > 1 and not together and not self._by_passes
        ranked = samples_compete(loss, made, samples) if looked else ""
        mixed, padded = ("", "") if apart is None else apart.relevant(outputs[-1], taken, loss)
        second = apart is not None and apart.batch_second
        blind = looked and samples == 1 and (not divisors(loss, samples) or bends_one(loss, made))
        length = 0 if apart is None else apart.length
        everyone = self._world.from_all((meet, summed, ranked, (mixed, second), (padded, length), blind, together))
        self._gathered = any(one[-1] for one in everyone)
        if said := next((one[3] for one in everyone if one[3][0]), None):
            how, second = said
            if second:
                raise RuntimeError(
                    "the model computes what it gives for a sample from other samples of its batch: it has recurrent "
                    "layers or attention that take the batch as the second dimension, and hocket divides the first "
                    "among ranks. Have the loader give samples first, or say batch_first=True if that is what was meant"
                )
            if how.endswith("as a sum over samples is"):
                raise RuntimeError(
                    f"the model computes a loss that is a sum over samples ({how}), and ranks' losses are averaged: "
                    'pass hocket.distribute(..., loss_reduction="sum"), or divide it by the number of samples'
                )
            raise RuntimeError(
                "the model computes what it gives for a sample, or its loss, from other samples of its batch (a "
                f"statistic or ranking of the batch, in-batch negatives), and a rank has only some of them: {how}. "
                "Compute it within each sample, gather what it needs with a collective that has a gradient, or take "
                "hocket.Trainer with a plan that does not cut batches"
            )
        lengths = {one[4][1] for one in everyone} - {0}  # alike where a loop pads to one length
        if padded := next((said for *_, (said, n), _, _ in everyone if said and (not n or len(lengths) > 1)), ""):
            raise RuntimeError(PADDED.format(padded))
        if operator := next((one[2] for one in everyone if one[2]), ""):
            raise RuntimeError(
                f"the loss ranks the samples of the batch (by {operator}), and a rank has only some of them: gather "
                "what it ranks with a collective that has a gradient, rank within each sample, take it "
                "of a detached tensor if it is there for stability alone, or take hocket.Trainer with a plan that does "
                "not cut batches"
            )
        found = [(meet, summed) for meet, summed, *_ in everyone]
        if any(one for one, _ in found):
            raise RuntimeError(
                "samples of the batch meet in the loss (in-batch negatives, a root, absolute value or largest of "
                "means, a statistic of the batch), so that it is not that of one device when ranks have parts each: "
                "gather what it needs with a collective that has a gradient (torch.distributed.nn.functional."
                "all_gather), or take hocket.Trainer with a plan that does not cut batches"
            )
        if any(one == "weights" for _, one in found):
            raise RuntimeError(
                "the loss is a sum weighted by what adds up to one over this rank's samples, so that nothing tells how "
                "much other ranks' samples weigh: pass hocket.distribute(..., loss_weight=) with the sum of a batch's "
                "weights before, or divide the weighted sum by it (loss = (losses * w).sum() / w.sum())"
            )
        if any(one == "sum" for _, one in found):
            raise RuntimeError(
                "the loss is a sum over samples, or has a term that is one, and ranks' losses are averaged: pass "
                'hocket.distribute(..., loss_reduction="sum") if all of it is a sum, and report it by '
                "hocket.total(loss); else make that term a mean over the samples that the loop has"
            )
        if self._world.rank == 0 and all(one[5] for one in everyone):
            warnings.warn(
                "each rank has one sample of the batch, so that nothing shows whether samples meet in the loss, which "
                "is none of the usual means (a root, norm or logarithm of a mean, or a dice of the whole batch, is not "
                "that of one device): right if each sample has a loss of its own, and the loss is their mean. A first "
                "batch with two samples for each rank shows it; hocket.Trainer compares such a loss with that of the "
                "whole batch",
                stacklevel=4,
            )
        if self._world.rank == 0 and summed == "small":
            warnings.warn(
                f"a term of the loss is a sum over this rank's {samples} samples times a constant: if that is not one "
                f"divided by how many the loop has, the term counts 1/{self._world.size} of what it does on one "
                "device, since ranks' losses are averaged: make it a mean over the samples that the loop has",
                stacklevel=4,
            )

    def check_exchanged(
        self, loss: torch.Tensor, exchanged: ExchangedSamples, share: BatchShard, *, stated: bool
    ) -> None:
        """Refuse a loss in which samples meet as no derivative shows, by what other choices of them give; or tell.

        `stated` says whether the program has told by what the loss is weighted.

        Raises:
            RuntimeError: a statistic of the batch is in it, or a count to which something is added, or what the loop
                keeps; on every rank alike.
        """
        mine, samples, constants = (0.0, *[False] * 7), share.samples, set[float]()
        ratio = 0.0
        if loss.numel() == 1:
            now, later = exchanged.guards(loss, samples, self._world.size)
            off = 0.0 if now or later or self._by_passes else exchanged.meet(loss, samples, stated=stated)
            ratio = 0.0 if exchanged.communicates or self._by_passes else exchanged.sizes.off(loss, samples)
            constants = constant_divisors(loss, samples, share.total)
            mine = off, exchanged.mixes, now, later, *exchanged.taken(constants), exchanged.placed, exchanged.normalised
        exchanged.mixes = False
        everyone = self._world.from_all((mine, constants, exchanged.kept.of(loss)))
        findings = zip(*(one for one, *_ in everyone), strict=True)
        off, mixes, now, later, counted, other, placed, normalised = (max(some) for some in findings)
        constants = set.intersection(*(one for _, one, _ in everyone))
        sizes = [some for *_, some in everyone]
        if differs := unlike(sizes, kept=True):
            raise RuntimeError(
                "the loss depends on what the loop keeps from batch to batch and computes from samples (a center, a "
                f"queue, a bank, a running mean), which is not the same on all ranks ({differs}): each has it from its "
                "own samples. Give it hocket.average of a statistic, or all ranks' samples (torch.distributed."
                "all_gather), or take hocket.Trainer with a plan that does not cut batches; if each rank is to have "
                "its own (a replay buffer, say), keep hocket.own(...) of it"
            )
        before, self._constants = self._constants, constants
        self._takes_counts |= bool(counted)
        if now or (other and self._takes_counts):
            raise RuntimeError(
                "the loss divides by more than it counts (`sum / (count + 1)`, `sum / max(int(count), 10)`), and a "
                'rank counts a part of the batch: say loss_reduction="sum", and compute the divisor from '
                "hocket.total(count)"
            )
        if off and not mixes:
            raise RuntimeError(
                "the loss of a sample depends on other samples of its batch without a gradient (a statistic of "
                "detached outputs or of the batch, weights of classes by how often the batch has them, samples above "
                "a median), or is multiplied by how many count: with some of this rank's samples exchanged it is "
                f"{off:.2g} off, relative, from a sum of one term for each sample. Take hocket.average of the "
                "statistic, which is the same on all ranks, make it of the whole data set before training, divide by "
                "counts, or take hocket.Trainer with a plan that does not cut batches"
            )
        if self._world.rank:
            return
        if ratio and not self._told_scales:
            self._told_scales = True
            warnings.warn(
                f"the program multiplies its loss by what it computes from len(batch), or divides it by other than a "
                f"count, and len(batch) is how many samples this rank has: computed from those of the whole batch it "
                f"would be {ratio:.4g} times the loss. Divide a sum by len(batch), or compute it from "
                "hocket.total(len(batch))",
                stacklevel=5,
            )
        if (differs := unlike(sizes, kept=False)) and not self._told:
            self._told = True
            warnings.warn(
                f"the loss depends on a number or a tensor that is not the same on all ranks ({differs}), and is not "
                "of the batch: if the program computes it from samples (by item(), by numpy, as a running mean), one "
                "device does so from all of them; give it hocket.average of the statistic. What is drawn at random may "
                "differ",
                stacklevel=5,
            )
        if normalised and not self._told:
            self._told = True
            warnings.warn(
                "the loss depends on numbers, one for each sample, whose mean over a rank's samples is 0 or 1, or "
                "their sum 1: if the program has normalised them (advantages or weights, by numpy), one device does so "
                "over all samples. Normalise by hocket.average of the statistic, or before the loader",
                stacklevel=5,
            )
        if placed and not off:
            self.tell_places()
        if off:
            warnings.warn(
                "the loop puts each sample beside another of its batch (mixup, say), which comes from the same rank's "
                f"part of it, and not from all of it as on one device: here the loss is {off:.2g} off, relative, from "
                "one in which samples are alone",
                stacklevel=5,
            )
        if by := [one for one in constants if one == share.total or one in before]:
            size = ", the size of the global batch," if by[0] == share.total else " on every rank and in each batch,"
            warnings.warn(
                f"the loss divides by {by[0]:g}{size} and this rank has {samples} samples: if the number stands "
                "for the size of a batch, divide by len(batch) instead; if it is a constant, the loss is a sum: say "
                'loss_reduction="sum"',
                stacklevel=5,
            )
        if later:
            warnings.warn(
                "the loss divides by more than it counts where a rank counts little (`sum / count.clamp(min=10)`): "
                'in such batches it is not that of one device. Say loss_reduction="sum", and compute the divisor from '
                "hocket.total(count)",
                stacklevel=5,
            )

    def tell_places(self) -> None:
        """Warn, once and on one rank, that the places of samples in the batch decide what is trained with."""
        if self._told_places or self._world.rank:
            return
        self._told_places = True
        warnings.warn(
            "the loop chooses or weighs samples by the places that they have in the batch (the first few), or by "
            "numbers of numpy or a list. That is right if each is chosen by itself. If the loop ranks them, or takes a "
            "number or a share of them, one device chooses among all, and a rank among its own: choose by "
            "hocket.average of a threshold, or by each sample's values, or have the loader choose",
            stacklevel=6,
        )

    def check_alike(self, weight: float) -> None:
        """Refuse ranks that count differently where the loop gathers: other ranks' gradients come unweighted.

        A collective operation where it does.
        """
        if not self._gathered:
            return
        off = torch.tensor(float(abs(weight - 1.0) > 1e-6), device=self._world.device)
        self._world.all_reduce(off)
        if off:
            raise RuntimeError(
                "the loss gathers from all ranks, which then must have equally many samples and things that count: "
                f"choose a batch size that {self._world.size} divides, and drop_last=True, or gather all that is "
                "averaged"
            )

    def _weight_by(
        self,
        terms: Sequence[float],
        samples: int,
        scales: Sequence[float] = (),
        wrong: float = 0.0,
        guard: bool | None = False,
        new: float = 0.0,
        more: float = 0.0,
        hidden: bool = False,
        numbers: Sequence[float] = (),
    ) -> float | None:
        """Return the weight of this rank's loss whose terms divide by these numbers; None where they do not tell.

        Means are multiplied by `scales`; `wrong` says whether this rank goes through its batch in parts that add up to
        another multiple than one device's, or takes the gradient of each by itself, and `guard` whether 1 stands for
        nothing, unless the loss divides by samples; None if that is not known. `new` is 1 if its form is, more
        by `FOUND` or `LATENT` if padding changes it, and `more` by how much more its term divides if it is not that of
        one sample (`torch.stack(losses).mean()`); `hidden` whether torch.compile hides what it divides by;
        `numbers` are those of `LossNumbers`.

        Raises:
            RuntimeError: no one weight is right for all terms, or parts are wrong; on every rank alike.
        """
        scale = sum(one * (1 + i / 7) for i, one in enumerate(scales))
        # Where nothing counts, the loss may be of another form: that of others holds.
        votes = float(samples > 0 and any(terms))
        counts = _folded(terms if votes else ())
        size = len(terms) * votes
        # Whether these are not one for each sample, or their mean.
        single = float(votes > 0 and len(terms) % samples > 0 and (len(terms) > 1 or terms[0] % samples > 0))
        known = [size, size * size, float(not samples or len(terms) > 0), votes, single]
        mine = torch.cat([counts, counts.square(), counts * counts[0], torch.tensor(known, dtype=torch.float64)])
        guards = [float(guard is True), float(guard is None), float(votes > 0 and samples not in terms)]
        length = self._padding.length * (samples > 0)
        lengths = [float(samples > 0), length, length * length]
        scaled = [scale, scale * scale, float(scale != 0), wrong]
        looked = [float(hidden), float(self._otherwise), float(more > 0), more, new]
        numbers = numbers or [0.0] * LossNumbers.SIZE
        said = torch.tensor([*numbers, *lengths, *looked, *guards, *scaled], dtype=torch.float64)
        apart = mine * bool(guard)  # counts that may be none
        sums = torch.cat([mine - apart, apart, said, self._marks.numbers()]).to(self._world.device)
        with comm.label("loss weights"):
            self._world.all_reduce(sums)
        sums = sums.cpu()
        self._marks.check(sums[-ReplicaMarks.SIZE :], self._world)
        sums = sums[: -ReplicaMarks.SIZE]
        self._check_scales(sums[-4:].tolist(), scales, samples)
        if not self._told_scales:
            self._numbers.tell(sums[-15 - LossNumbers.SIZE : -15].tolist(), self._world)
        hiding, otherwise, listed, added, fresh, guarding, unsure, off = sums[-12:-4].tolist()
        ranks, length, squared = sums[-15:-12].tolist()
        if fresh >= FOUND or (fresh >= LATENT and ranks * squared != length * length):
            self._padding.refuse(self._world)
        self.is_new = fresh % LATENT > 0
        if hiding and otherwise:
            raise RuntimeError(_HIDDEN)
        sums, apart = sums[: -15 - LossNumbers.SIZE].view(2, -1)
        world, all_known = self._world.size, float((sums + apart)[-3])
        self._counts |= off > 0 and all_known == world
        if self._counts and unsure and all_known == world:
            raise RuntimeError(GUARDED)
        if not self._counts:
            sums, guarding = sums + apart, 0.0
        totals, squares, products = sums[:-5].view(3, _TERMS)
        number, number_squared, _, voters, singles = sums[-5:].tolist()
        self._by_samples |= not self._counts and voters > listed
        if self._counts or not self._by_samples:
            totals[0] += added
            counts[0] += more
        alike = number**2 == voters * number_squared
        if all_known == world and not alike and singles:
            raise RuntimeError(
                "the losses of ranks have different numbers of terms, as where a rank leaves out what it has no "
                'samples of: no one weight is right. Say loss_reduction="sum", and divide each sum by '
                "hocket.total(count)"
            )
        if all_known < world or not alike or not (totals[0] or guarding):
            return None
        if guarding and voters and not torch.allclose(totals, totals[0] * _folded([1.0] * int(number / voters))):
            raise RuntimeError(GUARDED)
        # The counts of two terms are in proportion on all ranks if and only if Cauchy and Schwarz's bound is reached.
        if not torch.allclose(products.square(), squares * squares[0], rtol=1e-4):
            raise RuntimeError(
                "the terms of the loss are means over different things, whose numbers are not in proportion on all "
                f"ranks (together {', '.join(f'{one:g}' for one in totals[: len(terms)])}): no one weight is right. "
                'Say loss_reduction="sum", and divide each sum by hocket.total(count)'
            )
        # What ranks of which nothing counts have divided by 1 is divided by what counts on others, if anything does.
        divided = 1.0 if guarding and guard else float(counts[0])
        weight = divided / (float(totals[0]) or 1.0) * world
        return 1.0 if abs(weight - 1.0) < 1e-12 else weight

    def _check_scales(self, sums: list[float], scales: Sequence[float], samples: int) -> None:
        """Refuse single samples that are not divided by their number.

        Tell of factors that differ from rank to rank, or are the number of this rank's samples.
        """
        total, squares, ranks, wrong = sums
        if wrong >= _APART:
            raise RuntimeError(
                "the loop takes the gradient of a part of its batch by itself (to clip that of each sample, say: it is "
                "zero again before the next part), and backward() has averaged it with those of other ranks' samples: "
                "do it inside `with model.no_sync():`, and give hocket.average of the batch's gradient to the optimizer"
            )
        if wrong:
            raise RuntimeError(
                "the loop goes through its batch sample by sample, and the losses of these add up to a multiple of the "
                "mean that depends on their number, which is smaller on a rank: divide each loss by len(batch)"
            )
        differ = ranks * squares - total * total > 1e-6 * ranks * squares
        if differ and self._world.rank == 0 and not self._told_scales:
            self._told_scales = True
            warnings.warn(
                f"the program multiplies its mean loss by a number that differs from rank to rank (here "
                f"{', '.join(f'{one:g}' for one in scales)}): if it depends on the values of the batch, take "
                "hocket.average of it; if on how many of them count, pass loss_weight; if it is random, seed it alike",
                stacklevel=5,
            )
        elif samples > 1 and self._world.rank == 0 and not self._told_scales and samples in scales:
            self._told_scales = True
            warnings.warn(
                f"the program multiplies its mean loss by {samples}, which is how many samples this rank has: if it is "
                'len(batch), that of one device is larger, and the loss a sum: say loss_reduction="sum"; if it is a '
                "constant, all is right",
                stacklevel=5,
            )


_HIDDEN = (
    "the loss is a mean over something else than samples (tokens that count, weights), and is computed within "
    "torch.compile, so that nothing tells how much a rank's part of it weighs: compute the loss outside of what is "
    "compiled (compile the model, and have the loop compute the loss from its outputs), or pass "
    "hocket.distribute(..., loss_weight=) with what the mean of a batch divides by"
)


def _folded(terms: Sequence[float]) -> torch.Tensor:
    """Return numbers of terms as _TERMS of them: more are in proportion if they are in these sums, but for chance."""
    folded = torch.zeros(_TERMS, dtype=torch.float64)
    for i, one in enumerate(terms):
        folded[i % _TERMS] += one * (1 + i // _TERMS / 7)
    return folded


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _alike(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(map(_close, some, others))
