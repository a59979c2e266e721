"""Forward and backward passes of a rank's part of the batch: of the whole model, or of its stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..batches import BatchPart, called
from ..batches import batch as _batch
from ..data import BroadcastBuffers, ShardingStrategy
from ..mesh import World
from ..pipeline import Pipeline

LossFn = Callable[[Any, Any], torch.Tensor]
Reduction = Literal["mean", "sum"]


class Passes(Protocol):
    """What computes losses and gradients.

    Attributes:
        answers: whether this rank is the one of its tensor-parallel and pipeline neighbours that knows metrics.
        pipeline: runs this rank's stages; None where it computes the model from its input to its output.
    """

    answers: bool
    pipeline: Pipeline | None

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """Adds up the gradients of the batch and has them averaged; returns what waits for the global loss."""

    def value(self, part: BatchPart, metric: LossFn) -> torch.Tensor | None:
        """The metric of a part of a batch, where this rank knows it."""


class WholePasses:
    """Passes through a model that this rank computes from its input to its output.

    Args:
        model: the model.
        loss_fn: of output and target.
        reduction: of the loss.
        form: of its parameters.
        buffers: of the model.
        data: the data-parallel ranks.
        answers: see Passes.
        running: makes a block in which the model and functions of its output are to be called.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        reduction: Reduction,
        form: ShardingStrategy,
        buffers: BroadcastBuffers,
        data: World,
        *,
        answers: bool,
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.answers = answers
        self.pipeline: Pipeline | None = None
        self._running = running
        self._model = model
        self._loss_fn = loss_fn
        self._reduction: Reduction = reduction
        self._form = form
        self._buffers = buffers
        self._data = data

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        data = self._data
        total = torch.zeros((), dtype=torch.float64, device=data.device)
        work: Any = None
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with self._form.passing(last), _batch.counting(part.samples):
                self._buffers.send()
                with self._running():
                    loss = scalar(self._loss_fn(called(self._model, part.inputs), part.target))
                weight = part.weight(self._reduction)
                if part.samples:
                    total += loss.detach().to(total) * weight
                if last and data.size > 1:  # on its way during back-propagation
                    work = dist.all_reduce(total, group=data.group, async_op=True)
                torch.autograd.backward(loss * (weight * data.size))
        self._form.collect()
        return partial(_waited_for, total, work)

    def value(self, part: BatchPart, metric: LossFn) -> torch.Tensor | None:
        """See Passes."""
        with self._running():
            return metric(called(self._model, part.inputs), part.target)


class StagedPasses:
    """Passes through the stages of a pipeline, which cuts the rank's part of the batch into micro-batches.

    Args:
        pipeline: runs this rank's stages.
        reduction: of the loss.
        form: of their parameters.
        buffers: of the stages.
        data: the data-parallel ranks.
        answers: see Passes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reduction: Reduction,
        form: ShardingStrategy,
        buffers: BroadcastBuffers,
        data: World,
        *,
        answers: bool,
    ) -> None:
        self.answers = answers
        self.pipeline: Pipeline | None = pipeline
        self._pipeline = pipeline
        self._micro_batches = pipeline.micro_batches
        self._reduction: Reduction = reduction
        self._form = form
        self._buffers = buffers
        self._data = data

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        (part,) = parts
        weight = part.weight(self._reduction) * self._data.size
        self._keep_step(part)
        with self._form.adding(), _batch.counting(part.samples):
            self._buffers.send()
            total = self._pipeline.step(part.inputs, part.target, weight) / self._data.size
        if not part.samples:
            total = torch.zeros_like(total)
        work: Any = None
        if self._data.size > 1:
            work = dist.all_reduce(total, group=self._data.group, async_op=True)
        self._form.reduce()
        self._form.collect()
        return partial(_waited_for, total, work)

    def value(self, part: BatchPart, metric: LossFn) -> torch.Tensor | None:
        """See Passes."""
        self._keep_step(part)
        if metric is loss_of_model:  # a number for each micro-batch, and none for what they make together
            return self._pipeline.evaluate(part.inputs, part.target)
        output = self._pipeline.forward(part.inputs)
        return metric(output, part.target) if self._pipeline.holds_last else None

    def _keep_step(self, part: BatchPart) -> None:
        """All data-parallel ranks run as many micro-batches as the one with the fewest samples can."""
        fewest = max(1, part.total // self._data.size)
        self._pipeline.micro_batches = min(self._micro_batches, fewest)


def _waited_for(total: torch.Tensor, work: Any) -> torch.Tensor:
    """`total`, once the work that makes it, if any, is over."""
    if work is not None:
        work.wait()
    return total


def loss_of_model(output: Any, _: Any = None) -> torch.Tensor:
    """Return the loss that a model has computed itself: its output, or the output's `loss`.

    Raises:
        TypeError: the output is no scalar and has no `loss` that is one.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise TypeError(
        "without loss_fn the model's output must be a scalar, or have a scalar `loss`; it is "
        f"{type(output).__name__} with {type(loss).__name__} for a loss. Give the model what it computes the loss of "
        "(labels, say), or pass Trainer a loss_fn"
    )


def scalar(loss: Any) -> torch.Tensor:
    """The loss, if it is one.

    Raises:
        TypeError: it is no scalar.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    found = f"one of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise TypeError(f"loss_fn must give a scalar tensor, not {found}")
