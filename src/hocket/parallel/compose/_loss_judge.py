"""Judges how a loss adds up over parts of a batch: by some samples, by their parts, and by others in their place."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.comm import torch_adapter

from ..batches import (
    Addends,
    AgreedCount,
    BatchPart,
    LossForm,
    MeasuredLoss,
    TermValues,
    batch_of,
    cut_fields,
    mapped,
    possible_counts,
    tensors_in,
    term_off,
    undisturbed,
)
from ..data import ExchangedSamples, samples_paired
from ..state import parameters_of
from ._composition import Composition
from ._loss_function import as_before, modules_in

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5}
"""Relative, by the lowest precision in use: some 100 roundings; in float64 a constant may be in float32.

Other types have 2e-2, a few roundings of bfloat16.
"""


@dataclass(frozen=True)
class LossVerdict:
    """What rank 0 has found; the same is done on every rank."""

    kind: str = ""  # of the form of the loss; "" to leave it as it is
    rate: float = 1.0  # counts per sample
    ratios: tuple[float, ...] = (1.0,)  # see LossForm
    counter: AgreedCount | None = None  # that explains the loss
    problem: str = ""  # why the plan does not give the loss of one process; "" if it does
    inside: bool | None = None  # whether the model computes the loss; None if that is not known
    empty: bool = False  # whether nothing of these samples counts in the loss, or it is no number: others must tell
    guarded: bool = False  # whether the loss divides by more than it counts where that is little


class LossJudge:
    """Measures losses of the samples and of their parts.

    Attributes:
        failed: How the look at the loss has failed where the loss by itself does not; "" where it has not.
        keeps: What the model keeps from pass to pass, of parts of a batch; "" where it keeps nothing.
    """

    def __init__(self, composition: Composition, form: LossForm, few: BatchPart, *, known: bool = False) -> None:
        self._passes, self._form, self._few, self._known = composition.passes, form, few, known
        self._values = (few.inputs, few.target)
        floats = [
            *parameters_of(composition.model),
            *(t for t in tensors_in(list(self._values)) if t.is_floating_point()),
        ]
        self._tolerance = max((_TOLERANCES.get(one.dtype, 2e-2) for one in floats), default=2e-5)
        if self._passes.pipeline is not None and composition.plan.precision != "float32":
            self._tolerance = 2e-2
        # Uneven, so that weights matter; no part of one sample, which some models take for something else.
        self._cut = max(min(2, few.samples // 2), few.samples // 2 - 1)
        self._terms = TermValues()
        self._size = 0.0  # of what is added up to a loss, which may be more than what comes out
        self._paired = False  # whether samples meet as its graph tells
        self._off = {"graph": 0.0, "samples": 0.0}  # what samples exchanged have shown of losses of these forms
        self._guards = False, False  # what other counts have
        self._again: list[float] = []  # the loss of the same, twice
        self.failed = self.keeps = ""

    def measured(self, begin: int, end: int) -> list[MeasuredLoss]:
        """Return the loss of some of the samples; [] where this rank does not know it."""
        part = self._few
        if end - begin < part.samples:
            inputs, target = cut_fields(part.inputs, part.target, begin, end, part.samples)
            part = BatchPart(inputs, target, end - begin, end - begin)
        with torch_adapter.uncompiled(), self._terms:
            return self._passes.measured(part.copied(), self._loss, whole=True)

    def _loss(self, output: Any, target: Any) -> Any:
        """Return the loss, and look at it; what the loss raises by itself is the program's error."""
        given = mapped((output, target), torch.clone)  # which a loss may change in place
        try:
            return self._looked_at(output, target)
        except Exception as error:
            value = self._passes.loss_fn(*given)
            self.failed = self.failed or said(error)
            return value

    def _looked_at(self, output: Any, target: Any) -> Any:
        """Return the loss, and note how large the terms are that the outputs add up to in it, to first order."""
        exchanged, function = ExchangedSamples(), self._passes.loss_fn
        exchanged.follow(tensors_in([output, target]), self._few.samples)
        if not self._again:
            with as_before(function):
                for i in range(3):  # the second time with outputs of other samples: a loss may be divided by its like
                    with undisturbed(modules_in(function)):
                        given = mapped((output, target), torch.clone)  # which a loss may change in place
                        if i != 1:
                            self._again.append(_number(function(*given)))
                            continue
                        given = mapped(given[0], self._moved), given[1]
                        with suppress(Exception):  # which the loss need not take
                            function(*given)
        with as_before(function):
            exchanged.begin()
            try:
                value = function(output, target)
            finally:
                exchanged.end()
        loss = value[0] if isinstance(value, tuple | list) else value
        rows = [one for one in tensors_in(output) if one.requires_grad]
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss is output or not rows:
            return value
        self._look(loss, rows, exchanged)
        if loss.requires_grad:
            self._tolerance = max(self._tolerance, _TOLERANCES.get(loss.dtype, 2e-2))
            found = torch.autograd.grad(loss, rows, retain_graph=True, allow_unused=True)
            pairs = [(one.detach(), g) for one, g in zip(rows, found, strict=True) if g is not None]
            pieces = (pair for a, g in pairs for pair in (zip(a, g, strict=True) if a.dim() else [(a, g)]))
            size = sum(float((a * g).abs().sum(dtype=torch.float64)) for a, g in pieces)  # logits are large
            self._size = max(self._size, size / (float(value[1]) or 1.0) if loss is not value else size)
        return value

    def _moved(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(1, 0) if rows.dim() and len(rows) == self._few.samples else rows

    def _look(self, loss: torch.Tensor, rows: Sequence[torch.Tensor], exchanged: ExchangedSamples) -> None:
        """Look for what the parts of a few samples may show by chance only, where it is the loss of all of them."""
        count = self._few.samples
        if not any(one.dim() and len(one) == count for one in rows) or exchanged.communicates:
            return
        self._paired |= samples_paired(loss, torch_adapter.graph_marks(rows), count)
        now, later = exchanged.guards(loss, count, 2)
        self._guards = self._guards[0] or now, self._guards[1] or later
        if not exchanged.mixes:
            for kind in self._off:
                self._off[kind] = max(self._off[kind], exchanged.meet(loss, count, times=kind == "graph"))

    def close(self, one: float, other: float, times: float = 1.0) -> bool:
        """Return whether two losses are equal but for rounding."""
        return abs(one - other) <= times * self._tolerance * max(abs(one), abs(other), self._size, 1e-12)

    def distance(self, whole: MeasuredLoss, parts: list[MeasuredLoss]) -> float:
        """Return how far the loss of the parts is from that of the samples, relative."""
        ours, theirs = self._combined(whole, parts, [one.count for one in parts], whole.count)
        return float(abs(ours - theirs) / max(abs(ours), 1e-30))

    def verdict(self, first: list[MeasuredLoss]) -> LossVerdict | None:
        """Return what explains the loss, or that nothing does; None where this rank does not know it."""
        found = self._explained(first)
        if found is None:
            return None
        problem, (now, later) = found.problem, self._guards
        if not problem and self.keeps:
            problem = self.keeps
        if self._again and not self.close(*self._again):
            problem = (
                f"called twice with the same it gives {self._again[0]:.6g} and {self._again[1]:.6g}: it keeps "
                "something from call to call (a center, a queue, a running mean), of parts of a batch or ranks. Keep "
                "it in a buffer of a module that loss_fn is or calls, or draw random numbers from torch's generator."
            )
        elif found.kind and (now or (later and problem)):
            problem = "the loss divides by more than it counts (`sum / (count + 1)`, `sum / count.clamp(min=10)`)."
        elif not problem and self._paired:
            problem = "it bends a mean over samples (its absolute value, a clamp, the larger of two), or pairs samples."
        elif not problem and (off := self._off.get(found.kind)):
            problem = (
                f"with some of {self._few.samples} samples exchanged the loss is {off:.2g} off, relative, from a sum "
                "of one term for each sample: samples meet in it without a gradient (a statistic of the batch or of "
                "detached outputs)."
            )
        return replace(found, problem=problem, guarded=later)

    def _explained(self, first: list[MeasuredLoss]) -> LossVerdict | None:
        count = self._few.samples
        cut = self._cut
        cuts = [(0, cut, count)] + ([(0, 2, count)] if cut > 2 else [])
        try:
            split = [[self.measured(a, b) for a, b in itertools.pairwise(one)] for one in cuts]
        except Exception as error:
            # Of one sample, say, which some models take for something else; the step will tell.
            return LossVerdict(problem=no_part(cut, count, said(error))) if cut > 1 else None
        if not first:
            return None
        whole = first[0]
        parts = [[found[0] for found in one] for one in split]
        values = [one.value for one in (whole, *sum(parts, []))]
        if not all(map(math.isfinite, values)):
            return LossVerdict(empty=True)
        if whole.terms and (not any(whole.terms) or whole.guard is not False):
            return LossVerdict(empty=True)
        form = self._form
        samples = [[b - a for a, b in itertools.pairwise(one)] for one in cuts]
        stated = [[0.0 if one.guard else one.count for one in some] for some in parts]
        if whole.paired:
            return self._stated(whole, parts, stated, whole.count, "the pair (sum, count)")
        if form.kind == "sum":
            ones = [[1.0] * len(one) for one in parts]
            return self._stated(whole, parts, ones, 1.0, 'the sum that loss_reduction = "sum" promises')
        if form.counter is not None:
            return self._stated(whole, parts, stated, whole.count, "the mean that loss_weight promises")
        if self._known:
            stays = "a mean over what that of earlier steps was one of"
            return replace(self._stated(whole, parts, stated, whole.count, stays), kind=form.kind)
        everything = [whole, *sum(parts, [])]
        if whole.terms and all(_like(one, whole) for one in everything):
            counts = [[0.0 if one.guard else one.terms[0] for one in some] for some in parts]
            if self._explains(whole, parts, counts, whole.terms[0]):
                first_term = max(whole.terms[0], 1e-30)
                ratios = tuple(one / first_term for one in whole.terms)
                problem = self._term_off(whole, parts, samples)
                return LossVerdict("graph", whole.terms[0] / count, ratios, inside=form.inside, problem=problem)
        if self._explains(whole, parts, samples, count):
            # Of a loss that a pipeline's last stage computes the graph tells in training only.
            kind = "samples" if self._passes.pipeline is None or whole.terms else "graph"
            return LossVerdict(kind, problem=self._term_off(whole, parts, samples))
        counter = self._counter(whole, parts, cuts)
        if counter is not None:
            batch = batch_of(*self._values)
            problem = self._term_off(whole, parts, samples)
            return LossVerdict("weight", counter(batch) / count, counter=counter, problem=problem)
        return LossVerdict("samples", problem=self._problem(whole, parts, samples, count, "a mean over samples"))

    def _stated(
        self, whole: MeasuredLoss, parts: list[list[MeasuredLoss]], counts: Any, total: float, what: str
    ) -> LossVerdict:
        rate = total / self._few.samples if self._form.kind != "sum" else 1.0
        if self._explains(whole, parts, counts, total):
            return LossVerdict(rate=rate)
        return LossVerdict(rate=rate, problem=self._problem(whole, parts, counts, total, what))

    def _combined(self, whole: MeasuredLoss, parts: list[MeasuredLoss], counts: Sequence[float], total: float) -> Any:
        """Return the loss of the samples, and that of their parts combined, both divided by `total`."""
        if whole.paired:
            losses = [one.value for one in parts]
            return whole.value / (total or 1.0), sum(losses) / (sum(counts) or 1.0)
        if self._form.kind == "sum":
            return whole.value, sum(one.value for one in parts)
        pairs = zip(parts, counts, strict=True)
        losses = [one.value * (n or one.weight) for one, n in pairs if n or one.guard or (one.weight and not one.count)]
        return whole.value, sum(losses) / (sum(counts) or 1.0)

    def _explains(
        self, whole: MeasuredLoss, parts: list[list[MeasuredLoss]], counts: Sequence[Sequence[float]], total: float
    ) -> bool:
        for some, weights in zip(parts, counts, strict=True):
            if self._form.kind != "sum" and not math.isclose(sum(weights), total, rel_tol=1e-4):
                return False
            scale = max((abs(one.value) for one in some), default=0.0) / (total if whole.paired and total else 1.0)
            ours, theirs = self._combined(whole, some, weights, total)
            if not (self.close(ours, theirs) or abs(ours - theirs) <= self._tolerance * scale):
                return False
        return True

    def _counter(
        self, whole: MeasuredLoss, parts: list[list[MeasuredLoss]], cuts: Sequence[tuple[int, ...]]
    ) -> AgreedCount | None:
        """Return the count of tensors of the batch that explains the loss."""
        batch = batch_of(*self._values)
        matching = []
        for one in possible_counts(batch, self._few.samples):
            counts = []
            for places in cuts:
                ends = itertools.pairwise(places)
                counts.append([one(batch_of(*cut_fields(*self._values, a, b, self._few.samples))) for a, b in ends])
            if self._explains(whole, parts, counts, one(batch)):
                matching.append(one)
        return AgreedCount.of(matching) if matching and self._few.samples > 2 else None

    def _term_off(self, whole: MeasuredLoss, parts: list[list[MeasuredLoss]], samples: list[list[int]]) -> str:
        """Return how a small term does not add up that the graph does not explain; "" where there is none."""
        tolerance = max(self._tolerance, _TOLERANCES.get(whole.loss.dtype, 2e-2))
        mine = Addends.of(whole.loss, self._few.samples, self._terms)
        for some, sizes in zip(parts, samples, strict=True):
            theirs = [Addends.of(one.loss, n, self._terms) for one, n in zip(some, sizes, strict=True)]
            total, known = sum(one.count for one in theirs), all(one.count for one in theirs)
            if known and (said := term_off(mine, theirs, [one.count / total for one in theirs], tolerance)):
                return f"{said}."
        return ""

    def _problem(self, whole: Any, parts: Any, counts: Any, total: float, what: str) -> str:
        found = []
        for place, some, weights in zip((self._cut, 2), parts, counts, strict=False):
            ours, theirs = self._combined(whole, some, weights, total)
            found.append((abs(ours - theirs) / max(abs(ours), 1e-30), ours, theirs, place))
        off, ours, theirs, place = max(found, key=lambda one: one[0])
        return (
            f"the loss of {self._few.samples} samples is {ours:.6g}, and that of the first {place} and the others "
            f"combined {theirs:.6g}, {off:.2g} off: it is not {what}."
        )


def _number(value: Any) -> float:
    total, count = value if isinstance(value, tuple | list) else (value, 1.0)
    single = isinstance(total, torch.Tensor) and total.numel() == 1
    return float(total.detach()) / (float(count) or 1.0) if single else 0.0


def _like(one: MeasuredLoss, other: MeasuredLoss) -> bool:
    """Return whether the terms of two losses divide by counts in the same proportion."""
    if len(one.terms) != len(other.terms):
        return False
    return all(
        math.isclose(a * other.terms[0], b * one.terms[0], rel_tol=1e-4)
        for a, b in zip(one.terms, other.terms, strict=True)
    )


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def no_part(few: int, count: int, error: str) -> str:
    return (
        f"the model takes a batch of {count} and not {few} of them ({error}): they are not "
        "samples that can be computed apart (nodes of one graph; targets that number the batch's own rows). Rows of "
        "several lengths (the pixels of pictures) are collated for each rank by trainer.batches(loader)."
    )
