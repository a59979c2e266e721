"""By what a rank's loss is weighted, as its graph tells; a loss that no weight makes that of one device is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket import comm
from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import (
    GUARDED,
    BatchShard,
    divides_by_samples,
    divisor_of_shares,
    divisors,
    guarded,
    inverses,
    is_one_by_one,
    wholes,
)
from ..batches import batch as _batch
from ..mesh import World
from ._batch_parts import BatchParts
from ._coupling import form_of, is_listed, scale_of_means
from ._exchange_check import ExchangeCheck, alike, close
from ._exchanged import ExchangedSamples
from ._first_loss import FirstLoss, check_first
from ._later_padding import LATENT, LaterPadding
from ._loss_numbers import LossNumbers
from ._loss_signs import LossSigns, TermCounts
from ._replica_marks import ReplicaMarks

_LOOKED_AT = 4
"""Batches in whose losses constant factors are looked at."""

_APART = 2.0**20  # says so in a sum over ranks; 1 says that the losses of single samples add up wrongly


class LossWeights:
    """Finds the weight of this rank's loss in each back-propagation; its calls are collective operations."""

    def __init__(self, world: World, marks: ReplicaMarks, padding: LaterPadding) -> None:
        self._world, self._marks, self._padding = world, marks, padding
        self._parts = BatchParts()
        self._numbers = LossNumbers()
        self._looked_at = 0
        self.exchange = ExchangeCheck(world)
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
        self._inverse = False  # whether a sum has been multiplied by one divided by its count
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
        inverse = inverses(loss, samples) if single and not self._one_by_one and samples else ()
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
        each = (*terms, *(divisors(loss, samples, once=True) if terms and not shares and not more else ()))
        looks = samples > 0 and bool(terms or inverse)
        self._otherwise |= otherwise
        hidden = single and samples > 0 and not terms and torch_adapter.is_compiled(loss)
        signs = LossSigns(
            terms=terms,
            inverse=inverse,
            more=more,
            samples=samples,
            scales=scales,
            wrong=wrong,
            guard=looks and guarded(loss, samples),
            inverse_guard=looks and guarded(loss, samples, inverse=True),
            by_samples=samples in each,
            inverse_by_samples=bool(inverse) and samples in (*inverse, *wholes(loss, samples)),
            hidden=hidden,
            news=self._takes_form(loss, made, samples) + self._padding.number(loss, samples),
            numbers=self._numbers.numbers(loss, made, note.share),
        )
        weight = self._weight_by(signs)
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
        if changed is not None and alike(changed[1], scales) and not self.exchange.told_scales:
            odd = changed[0]
            usual, number = next(pair for pair in zip(scales, changed[2], strict=True) if not close(*pair))
            self.exchange.told_scales = True
            if not self._world.rank:
                warn(
                    f"the program multiplies its mean loss by {usual:g}, and by {number:g} in a batch of another size, "
                    f"of which this rank has {odd.samples} of {odd.total} samples: if it computes the number from "
                    "len(batch), compute it from hocket.total(len(batch)), as one device does",
                )
        if before is None:
            pairs = [some for some in self._scales.values() if len(some) == 2 and alike(*some)]
            first = next((one for one, _ in pairs if len(one) == len(scales) and not alike(one, scales)), None)
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

    def unseen(self, loss: torch.Tensor, readers: set[int], share: BatchShard) -> None:
        """Compare replicas, and numbers in a loss that is computed by another way, now; a collective operation.

        Raises:
            RuntimeError: replicas differ; on every rank alike.
        """
        found = self._marks.compare(self._world, lambda: self._numbers.numbers(loss, readers, share), now=True)
        self._numbers.tell(found or [0.0] * LossNumbers.SIZE, self._world)

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

    def check_first(self, first: FirstLoss, share: BatchShard) -> bool:
        """Refuse a loss of the first batch that no weights of ranks make that of one device; see `check_first`.

        Returns:
            Whether nothing counts on any rank, so that the next loss is to be looked at.
        """
        self._by_passes = first.by_passes
        losses = check_first(first, share, self._world)
        self._gathered = losses.gathers
        self.exchange.blind, self.exchange.told_beside = 2 * losses.blind, losses.compares
        return losses.empty

    def check_exchanged(
        self, loss: torch.Tensor, exchanged: ExchangedSamples, share: BatchShard, *, stated: bool
    ) -> None:
        """Refuse a loss in which samples meet as no derivative shows; see `ExchangeCheck.check`."""
        self.exchange.check(loss, exchanged, share, stated=stated, by_passes=self._by_passes)

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

    def _weight_by(self, mine: LossSigns) -> float | None:
        """Return the weight of this rank's loss; None where ranks' losses do not tell.

        Raises:
            RuntimeError: no one weight is right for all terms, or parts are wrong; on every rank alike.
        """
        counts, inverse = mine.counts(mine.terms), mine.counts(mine.inverse)
        guard = mine.guard
        guarded, guarded_inverse = counts * bool(guard), inverse * bool(mine.inverse_guard)  # may stand for nothing
        off = mine.counting and not mine.by_samples
        sums = self._sums(
            {
                "counts": counts - guarded,
                "guarded counts": guarded,
                "inverse counts": inverse - guarded_inverse,
                "guarded inverse counts": guarded_inverse,
                "guards": [guard is True, guard is None, off],
                "inverse guards": [mine.inverse_guard is True, mine.inverse_guard is None],
                "inverse": [any(mine.inverse) and not mine.inverse_by_samples, bool(mine.inverse) > any(mine.inverse)],
                "listed": [mine.more > 0, mine.more],
                "hidden": [mine.hidden, self._otherwise],
                "news": [mine.news],
                "lengths": self._padding.lengths(mine.samples),
                "scales": mine.scaled(),
                "numbers": mine.numbers,
                "marks": self._marks.numbers(),
            }
        )
        self._marks.check(sums["marks"], self._world)
        self._check_scales(sums["scales"].tolist(), mine)
        if not self.exchange.told_scales:
            self._numbers.tell(sums["numbers"].tolist(), self._world)
        (news,) = sums["news"].tolist()
        self._padding.check(news, sums["lengths"].tolist(), self._world)
        self.is_new = news % LATENT > 0
        if all(sums["hidden"].tolist()):
            raise RuntimeError(_HIDDEN)
        found = everything = TermCounts(sums["counts"] + sums["guarded counts"])
        guarding, unsure, by_others = sums["guards"].tolist()
        others = TermCounts(sums["inverse counts"] + sums["guarded inverse counts"])
        by_other_inverses, nothing = sums["inverse"].tolist()
        if self._takes_inverse(found, others, by_others, nothing=nothing > 0):
            by_others, counts, sums["counts"] = by_other_inverses, inverse, sums["inverse counts"]
            guard, (guarding, unsure) = mine.inverse_guard, sums["inverse guards"].tolist()
            found = everything = TermCounts(sums["counts"] + sums["guarded inverse counts"])
        all_known = everything.known == self._world.size
        self._counts |= by_others > 0 and all_known
        if self._counts and unsure and all_known:
            raise RuntimeError(GUARDED)
        if self._counts:
            found = TermCounts(sums["counts"])
        else:
            guarding = 0.0
        listed, added = sums["listed"].tolist()
        self._by_samples |= not self._counts and found.voters > listed
        count = float(counts[0])
        if self._counts or not self._by_samples:
            found.totals[0] += added
            count += mine.more
        total = float(found.totals[0])
        if all_known and not found.equally_many and found.singles:
            raise RuntimeError(
                "the losses of ranks have different numbers of terms, as where a rank leaves out what it has no "
                'samples of: no one weight is right. Say loss_reduction="sum", and divide each sum by '
                "hocket.total(count)"
            )
        if not all_known or not found.equally_many or not (total or guarding):
            return None
        if guarding and found.voters and not found.the_same:
            raise RuntimeError(GUARDED)
        if not found.in_proportion:
            raise RuntimeError(
                "the terms of the loss are means over different things, whose numbers are not in proportion on all "
                f"ranks (together {', '.join(f'{one:g}' for one in found.totals[: len(mine.terms)])}): no one weight "
                'is right. Say loss_reduction="sum", and divide each sum by hocket.total(count)'
            )
        # What ranks of which nothing counts have divided by 1 is divided by what counts on others, if anything does.
        guards = (count or 1.0) if guarding and guard else 0.0
        weight = (guards or count) / (total or guards or 1.0) * self._world.size
        return 1.0 if abs(weight - 1.0) < 1e-12 else weight

    def _takes_inverse(self, counts: TermCounts, inverse: TermCounts, by_others: float, *, nothing: bool) -> bool:
        """Return whether a factor that differs from rank to rank is what a sum is divided by: `sum / 2 * (1 / n)`.

        So it is where all that sums are divided by is the same on all ranks, and none of their samples. `nothing` says
        whether nothing counts on a rank.
        """
        ranks = self._world.size
        if inverse.known < ranks or not inverse.equally_many or not inverse.in_proportion:
            return False
        constant = counts.known < ranks or (by_others > 0 and counts.alike)
        self._inverse |= constant and (nothing or not inverse.alike)
        return constant and (self._inverse or counts.known == ranks)

    def _sums(self, mine: Mapping[str, torch.Tensor | Sequence[float]]) -> dict[str, torch.Tensor]:
        """Return sums over ranks of named numbers, by one collective operation."""
        parts = [torch.as_tensor(one, dtype=torch.float64) for one in mine.values()]
        sums = torch.cat(parts).to(self._world.device)
        with comm.label("loss weights"):
            self._world.all_reduce(sums)
        return dict(zip(mine, torch.split(sums.cpu(), [len(one) for one in parts]), strict=True))

    def _check_scales(self, sums: list[float], mine: LossSigns) -> None:
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
        tells = self._world.rank == 0 and not self.exchange.told_scales
        differ = ranks * squares - total * total > 1e-6 * ranks * squares
        if differ and tells:
            self.exchange.told_scales = True
            warn(
                f"the program multiplies its mean loss by a number that differs from rank to rank (here "
                f"{', '.join(f'{one:g}' for one in mine.scales)}): if it depends on the values of the batch, take "
                "hocket.average of it; if on how many of them count, pass loss_weight; if it is random, seed it alike",
            )
        elif tells and mine.samples > 1 and mine.samples in mine.scales:
            self.exchange.told_scales = True
            warn(
                f"the program multiplies its mean loss by {mine.samples}, which is how many samples this rank has: if "
                'it is len(batch), that of one device is larger, and the loss a sum: say loss_reduction="sum"; if it '
                "is a constant, all is right",
            )


_HIDDEN = (
    "the loss is a mean over something else than samples (tokens that count, weights), and is computed within "
    "torch.compile, so that nothing tells how much a rank's part of it weighs: compute the loss outside of what is "
    "compiled (compile the model, and have the loop compute the loss from its outputs), or pass "
    "hocket.distribute(..., loss_weight=) with what the mean of a batch divides by"
)
