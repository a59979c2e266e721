"""A stage of a functional Keras model, as the pipeline of hocket.parallel runs it."""

from collections.abc import Sequence
from typing import Any

import torch

from hocket.parallel.pipeline import Stage

from . import _private
from ._graph import Graph

Crossing = tuple[torch.Tensor, torch.Tensor | None, bool]
"""What crosses a cut for one value: the tensor, Keras' mask of it, and whether the tensor is of truth values."""


class BatchRecord:
    """What one batch has in work on this rank. No dataclass: walks through structures of tensors would go into it."""

    def __init__(self, training: bool, scale: float) -> None:
        self.training = training  # whether the batch trains
        self.scale = scale  # by what losses are multiplied before the backward
        self.rows: tuple[int, int] | None = None  # the micro-batch's in work: the first, and one past the last
        self.aside = 0.0  # losses inside of layers so far, weighed
        self.asides = 0  # how many losses `aside` holds
        self.gradients: dict[int, list[torch.Tensor]] = {}  # of the outputs of each micro-batch


class Rows:
    """Which rows of the batch a micro-batch has; given to stages with the micro-batch's inputs. No dataclass either."""

    def __init__(self, book: BatchRecord, index: int, begin: int, end: int, share: float) -> None:
        self.book = book  # what the batch has in work
        self.index = index  # of the micro-batch
        self.begin, self.end = begin, end  # its rows in the ranks' part: the first, and one past the last
        self.share = share  # its part of the samples


class StageModule(torch.nn.Module):
    """The steps of a stage.

    It is called with the values of other stages that `uses` names, and gives those of `makes`, of the last stage all of
    the model's outputs. What its layers keep besides weights (states of random generators, counters) begins every
    micro-batch of a batch as it was before the batch.
    """

    def __init__(self, graph: Graph, begin: int, end: int, uses: Sequence[str], makes: Sequence[str]) -> None:
        super().__init__()
        self._graph = [graph]  # in a list, so that torch does not take the model for a child
        self.begin, self.end = begin, end
        self._uses, self._makes = tuple(uses), tuple(makes)
        self.last = end == len(graph.steps)
        layers = {id(layer): layer for step in graph.steps[begin:end] for layer in step.layers}
        kept = [s.state for layer in layers.values() for s in getattr(layer, "_seed_generators", ())]
        kept += [v for layer in layers.values() for v in layer._non_trainable_variables if v.dtype != "string"]
        self._kept = list({id(v): v for v in kept}.values())
        self.start()

    def start(self) -> None:
        """Begin a batch: every micro-batch will begin with the seeds and counters that stand now."""
        self._before = [(v, v.value._version, v.value.detach().clone()) for v in self._kept]

    def forward(self, rows: Rows, *given: Any) -> Any:
        """Run the steps for one micro-batch."""
        graph, book = self._graph[0], rows.book
        inputs = len(graph.inputs)
        values = dict(zip(graph.inputs, given[:inputs], strict=True))
        values |= {name: _arrived(value) for name, value in zip(self._uses, given[inputs:], strict=True)}
        for variable, version, value in self._before:
            if variable.value._version != version:  # what a backward needs is left alone
                variable.assign(value)
        aside: list[torch.Tensor] = []
        book.rows = (rows.begin, rows.end)
        try:
            with graph.call(book.training):
                for step in graph.steps[self.begin : self.end]:
                    values.update(zip(step.makes, step.run(values, book.training), strict=True))
                    for layer in step.layers:
                        aside += [graph.model._aggregate_additional_loss(loss) for loss in layer._losses]
                        layer._losses.clear()
        finally:
            book.rows = None
        made = [values[name] for name in self._makes]
        if aside:
            total = torch.stack(aside).sum()
            book.aside += float(total.detach()) * rows.share
            book.asides += len(aside)
            if total.requires_grad and torch.is_grad_enabled():
                made = _with_loss(made, total, rows.share * book.scale)
        return made if self.last else tuple(_leaving(value) for value in made)


class _Beside(torch.autograd.Function):
    """A tensor as it is, whose backward also begins the backward of a loss beside it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        ctx.like = loss.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], torch.full_like(ctx.like, ctx.weight), None


def _with_loss(made: list[Any], loss: torch.Tensor, weight: float) -> list[Any]:
    """Return the values of a stage, of which the first that can carries the gradient of `loss` with it.

    Raises:
        ValueError: no value can.
    """
    for number, value in enumerate(made):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            mask = mask_of(value)
            carrying: Any = _Beside.apply(value, loss, weight)  # type: ignore[no-untyped-call]
            if mask is not None:
                _private.backend.set_keras_mask(carrying, mask)
            return [*made[:number], carrying, *made[number + 1 :]]
    raise ValueError(
        "a layer adds a loss in a stage of the pipeline that gives no floating-point value to the next one: cut the "
        "model elsewhere with split="
    )


def mask_of(value: Any) -> Any:
    """Keras' mask of a tensor, or None."""
    return _private.backend.get_keras_mask(value) if isinstance(value, torch.Tensor) else None


def _leaving(value: torch.Tensor) -> Crossing:
    mask = mask_of(value)
    truth = value.dtype is torch.bool
    return value.to(torch.uint8) if truth else value, None if mask is None else mask.to(torch.uint8), truth


def _arrived(crossing: Crossing) -> torch.Tensor:
    value, mask, truth = crossing
    value = value.bool() if truth else value
    if mask is not None:
        value = value.view_as(value)  # what arrives is kept for the backward, and is to stay without a mask
        _private.backend.set_keras_mask(value, mask.bool())
    return value


def stage_of(graph: Graph, begins: Sequence[int], index: int) -> Stage:
    """Stage `index` of a model that is cut before the steps `begins`, of which the first is 0."""
    edges = [*begins, len(graph.steps)]
    last_use = graph.last_uses()
    made_in = {name: n for n, step in enumerate(graph.steps) for name in step.makes}

    def crossing(edge: int) -> tuple[str, ...]:
        return tuple(name for name, made in made_in.items() if made < edge <= last_use[name] and edge < edges[-1])

    begin, end = edges[index], edges[index + 1]
    takes, gives = crossing(begin) if index else (), crossing(end)
    last = end == edges[-1]
    needed = {name for step in graph.steps[begin:end] for name in step.takes.values()}
    needed |= set(graph.outputs) if last else set()
    uses = tuple(name for name in takes if name in needed)
    makes = tuple(graph.outputs) if last else tuple(name for name in gives if made_in[name] >= begin)
    return Stage(
        index=index,
        count=len(begins),
        module=StageModule(graph, begin, end, uses, makes),
        model=graph.model,
        inputs=tuple(range(len(graph.inputs) + 1)),
        takes=takes,
        uses=uses,
        makes=() if last else makes,
        gives=gives,
        layers=tuple(step.path for step in graph.steps[begin:end]),
    )
