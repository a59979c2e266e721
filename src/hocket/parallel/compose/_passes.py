"""Forward and backward passes of a rank's part of the batch: of the whole model, or of its stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..batches import BatchPart, LossForm, LossTally, MeasuredLoss, called, samples_in, tensors_in, terms
from ..batches import batch as _batch
from ..data import BroadcastBuffers, ForwardState, SampleNumbers, ShardingStrategy
from ..mesh import World
from ..pipeline import Micro, Pipeline, sizes

LossFn = Callable[[Any, Any], Any]


class Passes(Protocol):
    """What computes losses and gradients."""

    loss_fn: LossFn  # of output and target
    numbers: SampleNumbers  # the random numbers that each rank draws for its samples
    answers: bool  # whether this rank is the one of its tensor-parallel and pipeline neighbours that knows metrics
    pipeline: Pipeline | None  # runs this rank's stages; None where it computes the model from its input to its output
    state: ForwardState | None  # keeps buffers right that forward passes change; None if there is none

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """Add up the gradients of the batch and have them averaged; return what waits for the global loss."""

    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """Return the metric of a part of a batch, where this rank knows it."""

    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """Return the loss of a part of a batch, without a backward; [] where this rank does not know it.

        A `whole` part must not be cut, and its errors must come on every rank alike. `loss_fn` is by default that of
        training.
        """


class WholePasses:
    """Passes through a model that this rank computes from its input to its output."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        loss_form: LossForm,
        form: ShardingStrategy,
        buffers: BroadcastBuffers,
        data: World,
        numbers: SampleNumbers,
        *,
        answers: bool,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.answers = answers
        self.state: ForwardState | None = None
        self.pipeline: Pipeline | None = None
        self.numbers = numbers
        self._running = running
        self._model = model
        self.loss_fn = loss_fn
        self._loss = loss_form
        self._form = form
        self._buffers = buffers
        self._data = data

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        data, form = self._data, self._loss
        tally = LossTally(form, data.device)
        expected = form.expected(parts[0].total)
        work: Any = None
        if self.state is not None:
            self.state.begin(lambda i: parts[i].samples / parts[i].total)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with self._form.passing(last), _batch.counting(part.samples):
                self._buffers.send()
                with self._running(), self.numbers.drawing():
                    output = called(self._model, part.inputs)
                    value = self.loss_fn(output, part.target)
                measured = form.measure(value, part.inputs, part.target, part.samples)
                tally.add(measured)
                if last and data.size > 1:  # on its way during back-propagation
                    work = dist.all_reduce(tally.sums, group=data.group, async_op=True)
                elif last and i == 0 and form.kind != "sum":
                    expected = measured.count or expected
                derived = weighed(measured, output, data.size / expected)
                # What the loss was computed of is memory: the logits of a language model are larger than its layers.
                del output, value, measured
                torch.autograd.backward(derived)
        if self.state is not None:
            self.state.end()
        self._form.collect()
        return _settled(form, self._form, tally, work, expected, parts[0].total)

    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """See Passes."""
        with self._running():
            return metric(called(self._model, part.inputs), part.target)

    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """See Passes."""
        form = self._loss
        with self._running(), torch.set_grad_enabled(form.kind == "graph" and form.inside is True):
            value = form.evaluate(loss_fn or self.loss_fn, called(self._model, part.inputs), part.target)
        found = form.measure(value, part.inputs, part.target, part.samples)
        if form.kind == "graph" and form.inside is None and not found.paired:
            form.inside = not found.terms  # perhaps the model computes the loss, and only its own graph tells
            if form.inside:
                found = self.measured(part, loss_fn)[0]
                form.inside = bool(found.terms)
        return [found]


class StagedPasses:
    """Passes through the stages of a pipeline, which cuts the rank's part of the batch into micro-batches."""

    def __init__(
        self,
        pipeline: Pipeline,
        loss_fn: LossFn,
        loss_form: LossForm,
        form: ShardingStrategy,
        buffers: BroadcastBuffers,
        data: World,
        numbers: SampleNumbers,
        *,
        answers: bool,
    ) -> None:
        self.answers = answers
        self.state: ForwardState | None = None
        self.pipeline: Pipeline | None = pipeline
        self.numbers = numbers
        self._pipeline = pipeline
        self.loss_fn = loss_fn
        self._micro_batches = pipeline.micro_batches
        self._loss = loss_form
        self._form = form
        self._buffers = buffers
        self._data = data

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        (part,) = parts
        data, form = self._data, self._loss
        tally = LossTally(form, data.device)
        expected = form.expected(part.total)

        def loss_of(output: Any, micro: Micro) -> torch.Tensor:
            value = self.loss_fn(output, micro.target)
            measured = form.measure(value, micro.inputs, micro.target, micro.samples if part.samples else 0)
            tally.add(measured)
            return weighed(measured, output, data.size / expected)

        self._keep_step(part)
        if self.state is not None:
            fewest = self._pipeline.stages[0].fewest
            each = sizes(samples_in([part.target, part.inputs]), self._pipeline.micro_batches, fewest)
            self.state.begin(lambda i: each[i] / part.total if part.samples else 0.0)
        with self._form.adding(), _batch.counting(part.samples), self.numbers.drawing():
            self._buffers.send()
            self._pipeline.accumulate(part.inputs, part.target, loss_of)
        if self.state is not None:
            self.state.end()
        self._pipeline.from_last(tally.sums)
        work: Any = None
        if data.size > 1:
            work = dist.all_reduce(tally.sums, group=data.group, async_op=True)
        self._form.reduce()
        self._form.collect()
        return _settled(form, self._form, tally, work, expected, part.total)

    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """See Passes."""
        self._keep_step(part)
        output = self._pipeline.forward(part.inputs)
        return metric(output, part.target) if self._pipeline.holds_last else None

    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """See Passes."""
        form, loss_fn = self._loss, loss_fn or self.loss_fn
        graph = form.kind == "graph" and form.inside is not False and (whole or form.inside is True)
        found: list[MeasuredLoss] = []

        def loss_of(output: Any, micro: Micro) -> torch.Tensor:
            known = micro.inputs, micro.target, micro.samples
            measured = form.measure(form.evaluate(loss_fn, output, micro.target), *known)
            if graph and not (measured.terms or measured.paired):  # perhaps the model computes it
                inside = form.measure(loss_fn(output, micro.target), *known)
                if inside.terms:
                    measured, form.inside = inside, True
            found.append(measured)
            return measured.loss.detach()

        self._keep_step(part)
        if whole:
            self._pipeline.micro_batches = 1
        self._pipeline.evaluate(part.inputs, part.target, loss_of, alike=whole, graph=graph)
        return found

    def _keep_step(self, part: BatchPart) -> None:
        """Have all data-parallel ranks run as many micro-batches as the one with the fewest samples can."""
        fewest = max(1, part.total // self._data.size // self._pipeline.stages[0].fewest)
        self._pipeline.micro_batches = min(self._micro_batches, fewest)


def weighed(measured: MeasuredLoss, output: Any, factor: float) -> torch.Tensor:
    """Return what to derive: the loss, weighted, or zeros of the output, as a mean over nothing has no derivative."""
    rows = [] if measured.weight else [one for one in tensors_in(output) if one.requires_grad]
    if not rows:
        return measured.loss * (measured.weight * factor)
    for one in rows:
        if one.dim() == 0 and one.grad_fn is not None:  # a model's own loss: 0 by a count of 0 would be no number
            for term in terms(one):
                if term.node is not None:
                    term.node.register_prehook(_zeros)
    return torch.stack([one.masked_fill(torch.ones_like(one, dtype=torch.bool), 0).sum() for one in rows]).sum()


def _zeros(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def _settled(
    form: LossForm, strategy: ShardingStrategy, tally: LossTally, work: Any, expected: float, samples: int
) -> Callable[[], torch.Tensor]:
    """Have gradients divided by what the whole batch counts, where that was not known before; return its loss."""

    def loss() -> torch.Tensor:
        if work is not None:
            work.wait()
        return tally.mean()[0]

    if form.kind in ("sum", "samples"):
        return loss
    if work is not None:
        work.wait()
    value, count = tally.mean()
    if count:
        if abs(count / expected - 1.0) > 1e-12:
            strategy.scale(expected / count)
        form.rate = count / samples
    return lambda: value


def loss_of_model(output: Any, _: Any = None) -> torch.Tensor:
    """Return the loss that a model has computed itself: its output, or the output's `loss`; TypeError for no scalar."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise TypeError(
        "without loss_fn the model's output must be a scalar, or have a scalar `loss`; it is "
        f"{type(output).__name__} with {type(loss).__name__} for a loss. Give the model what it computes the loss of "
        "(labels, say), or pass Trainer a loss_fn"
    )
