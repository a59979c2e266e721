"""Forward and backward passes of a rank's part of the batch: of the whole model, or of its stages of a pipeline."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from ..batches import (
    BatchPart,
    LossForm,
    LossTally,
    MeasuredLoss,
    called,
    divisor_of_some,
    samples_in,
    tensors_in,
    terms,
)
from ..batches import batch as _batch
from ..data import BroadcastBuffers, ForwardState, SampleNumbers, ShardingStrategy
from ..mesh import World
from ..pipeline import Micro, Pipeline, sizes
from ..state import parameters_of
from ._known_losses import KnownLosses

LossFn = Callable[[Any, Any], Any]


@dataclass(kw_only=True, eq=False, repr=False)
class Passes(ABC):
    """What computes losses and gradients."""

    loss_fn: LossFn  # of output and target
    loss_form: LossForm  # how the losses of parts add up
    form: ShardingStrategy  # how ranks that hold the same parameters hold them
    buffers: BroadcastBuffers  # what it keeps alike
    data: World  # the ranks whose gradients are averaged
    numbers: SampleNumbers  # the random numbers that each rank draws for its samples
    answers: bool  # whether this rank is the one of its tensor-parallel and pipeline neighbours that knows metrics
    pipeline: Pipeline | None = None  # runs this rank's stages; None where it computes the model from end to end
    state: ForwardState | None = None  # keeps buffers right that forward passes change; None if there is none
    known: KnownLosses = field(default_factory=KnownLosses, init=False)  # the forms of those that were compared

    @abstractmethod
    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """Add up the gradients of the batch and have them averaged; return what waits for the global loss."""

    @abstractmethod
    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """Return the metric of a part of a batch, where this rank knows it."""

    @abstractmethod
    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """Return the loss of a part of a batch, without a backward; [] where this rank does not know it.

        A `whole` part must not be cut, and its errors must come on every rank alike. `loss_fn` is by default that of
        training.
        """

    def _settled(self, tally: LossTally, work: Any, expected: float, samples: int) -> Callable[[], torch.Tensor]:
        """Have gradients divided by what the whole batch counts, where that was not known before; return its loss."""

        def loss() -> torch.Tensor:
            if work is not None:
                work.wait()
            self.known.end_step(tally.sums[11])
            return tally.mean()[0]

        if self.loss_form.kind in ("sum", "samples"):
            return loss
        if work is not None:
            work.wait()
        self.known.end_step(tally.sums[11])
        value, count = tally.mean()
        if count:
            if abs(count / expected - 1.0) > 1e-12:
                self.form.scale(expected / count)
            self.loss_form.rate = count / samples
        return lambda: value


@dataclass(kw_only=True, eq=False, repr=False)
class WholePasses(Passes):
    """Passes through a model that this rank computes from its input to its output."""

    model: torch.nn.Module
    running: Callable[[], AbstractContextManager[None]]  # opens a block in which the model runs

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        data, loss_form = self.data, self.loss_form
        tally = LossTally(loss_form, data.device)
        expected = loss_form.expected(parts[0].total)
        work: Any = None
        if self.state is not None:
            self.state.begin(lambda i: parts[i].samples / parts[i].total)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with self.form.passing(last), _batch.counting(part.samples):
                self.buffers.send()
                with self.running(), self.numbers.drawing():
                    output = called(self.model, part.inputs)
                    value = self.loss_fn(output, part.target)
                measured = loss_form.measure(value, part.inputs, part.target, part.samples)
                tally.add(measured, new=self.known.takes(value, output, part.samples))
                if last and data.size > 1:  # on its way during back-propagation
                    work = dist.all_reduce(tally.sums, group=data.group, async_op=True)
                elif last and i == 0 and loss_form.kind != "sum":
                    expected = measured.count or expected
                derived = weighed(measured, output, data.size / expected)
                # What the loss was computed of is memory: the logits of a language model are larger than its layers.
                del output, value, measured
                torch.autograd.backward(derived)
        if self.state is not None:
            self.state.end()
        self.form.collect()
        return self._settled(tally, work, expected, parts[0].total)

    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """See Passes."""
        with self.running():
            return metric(called(self.model, part.inputs), part.target)

    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """See Passes."""
        loss_form = self.loss_form
        with self.running(), torch.set_grad_enabled(loss_form.kind == "graph" and loss_form.inside is True):
            value = loss_form.evaluate(loss_fn or self.loss_fn, called(self.model, part.inputs), part.target)
        found = loss_form.measure(value, part.inputs, part.target, part.samples)
        if loss_form.kind == "graph" and loss_form.inside is None and not found.paired:
            loss_form.inside = not found.terms  # perhaps the model computes the loss, and only its own graph tells
            if loss_form.inside:
                found = self.measured(part, loss_fn)[0]
                loss_form.inside = divisor_of_some(found.loss, part.samples) > 0
        return [found]


@dataclass(kw_only=True, eq=False, repr=False)
class StagedPasses(Passes):
    """Passes through the stages of a pipeline, which cuts the rank's part of the batch into micro-batches."""

    pipeline: Pipeline
    _micro_batches: int = field(init=False)  # as many as the plan says

    def __post_init__(self) -> None:
        self._micro_batches = self.pipeline.micro_batches

    def train(self, parts: Sequence[BatchPart]) -> Callable[[], torch.Tensor]:
        """See Passes."""
        (part,) = parts
        data, loss_form = self.data, self.loss_form
        tally = LossTally(loss_form, data.device)
        expected = loss_form.expected(part.total)

        def loss_of(output: Any, micro: Micro) -> torch.Tensor:
            with alone():
                value = self.loss_fn(output, micro.target)
            samples = micro.samples if part.samples else 0
            measured = loss_form.measure(value, micro.inputs, micro.target, samples)
            tally.add(measured, new=self.known.takes(value, output, samples))
            return weighed(measured, output, data.size / expected)

        self._keep_step(part)
        if self.state is not None:
            fewest = self.pipeline.stages[0].fewest
            each = sizes(samples_in([part.target, part.inputs]), self.pipeline.micro_batches, fewest)
            self.state.begin(lambda i: each[i] / part.total if part.samples else 0.0)
        with self.form.adding(), _batch.counting(part.samples), self.numbers.drawing():
            self.buffers.send()
            self.pipeline.accumulate(part.inputs, part.target, loss_of)
        if self.state is not None:
            self.state.end()
        self.pipeline.from_last(tally.sums)
        work: Any = None
        if data.size > 1:
            work = dist.all_reduce(tally.sums, group=data.group, async_op=True)
        self.form.reduce()
        self.form.collect()
        return self._settled(tally, work, expected, part.total)

    def value(self, part: BatchPart, metric: LossFn) -> Any:
        """See Passes."""
        self._keep_step(part)
        output = self.pipeline.forward(part.inputs)
        with alone():
            return metric(output, part.target) if self.pipeline.holds_last else None

    def measured(self, part: BatchPart, loss_fn: LossFn | None = None, *, whole: bool = False) -> list[MeasuredLoss]:
        """See Passes."""
        loss_form, loss_fn = self.loss_form, loss_fn or self.loss_fn
        graph = loss_form.kind == "graph" and loss_form.inside is not False
        unknown = graph and loss_form.inside is None
        found: list[MeasuredLoss] = []

        def loss_of(output: Any, micro: Micro) -> torch.Tensor:
            known = micro.inputs, micro.target, micro.samples
            measured = loss_form.measure(loss_form.evaluate(loss_fn, output, micro.target), *known)
            if graph and measured.terms:
                loss_form.inside = bool(loss_form.inside)
            elif graph and not measured.paired:  # perhaps the model computes it
                measured = loss_form.measure(loss_fn(output, micro.target), *known)
                loss_form.inside = True if measured.terms else loss_form.inside
            found.append(measured)
            return measured.loss.detach()

        self._keep_step(part)
        if whole:
            self.pipeline.micro_batches = 1
        with alone():
            self.pipeline.evaluate(part.inputs, part.target, loss_of, alike=whole, graph=graph)
        if unknown:  # ranks run the next batch with graphs, or without, all alike
            inside = torch.tensor(float("nan") if loss_form.inside is None else float(loss_form.inside))
            told = float(self.pipeline.from_last(inside.to(self.data.device)))
            loss_form.inside = None if math.isnan(told) else bool(told)
        return found

    def _keep_step(self, part: BatchPart) -> None:
        """Have all data-parallel ranks run as many micro-batches as the one with the fewest samples can."""
        fewest = max(1, part.total // self.data.size // self.pipeline.stages[0].fewest)
        self.pipeline.micro_batches = min(self._micro_batches, fewest)


_alone: list[None] = []  # an entry for each block that is open
_trained: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


@contextmanager
def alone() -> Iterator[None]:
    """Open a block for what ranks of the last stage compute by themselves: a loss, a metric."""
    _alone.append(None)
    handle = register_module_forward_pre_hook(_refuse_shared) if len(_trained) > 1 else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        _alone.pop()


def shared(model: torch.nn.Module, how: str) -> None:
    """Have calls of a model refused in such a block, where other ranks would never run their part of it.

    Args:
        model: what a Trainer of several ranks trains.
        how: what its plan has made of it; "" where every rank has all of it, so that its gradients alone are exchanged.
    """
    _trained[model] = how


def check_together(model: torch.nn.Module) -> None:
    """Raise a RuntimeError in such a block, for a model of which other ranks would not run their part."""
    if _alone and (how := _trained.get(model, "")):
        raise RuntimeError(
            f"a loss or metric calls a model that is {how}, and the ranks of the last stage alone compute it: the "
            "others would never run their part. Have the forward of the model that is trained call it, too, give "
            "its output as a part of the batch, or train it by a plan of data parallelism"
        )


def _refuse_shared(module: torch.nn.Module, _: Any) -> None:
    if module not in _trained:
        return
    check_together(module)
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters_of(module)):
        raise RuntimeError(
            f"a loss calls a model ({type(module).__name__}) that another Trainer trains, and the ranks of the last "
            "stage alone compute it: its gradients would wait for the other ranks. Have it take none meanwhile: "
            "model.requires_grad_(False) before the step that is not its own, and model.requires_grad_(True) after"
        )


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
