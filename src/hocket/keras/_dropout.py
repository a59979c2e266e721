"""Dropout in a pipeline: every rank draws what one device would draw, and keeps the masks of its own stage.

Keras' dropout draws by torch's own generator, layer by layer for the whole batch. A rank that computes some of the
layers, micro-batch by micro-batch, would draw in another order. So all masks of a step are drawn at its beginning, in
the order of one device, which also leaves all ranks' generators equal. It costs each rank the drawing for all stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.parallel.batches import BatchShard
from hocket.parallel.state import memory_order

from ._graph import Graph

_TRIED = 3  # samples that the model is tried out with to see what it draws


@dataclass(frozen=True)
class DropoutUse:
    """One use of dropout."""

    step: int  # number of the step of the model
    per_sample: int  # rows along the first axis that belong to one sample
    shape: tuple[int, ...]  # shape of a row
    order: tuple[int, ...]  # order of the axes in memory
    dtype: torch.dtype  # type of what is dropped from
    rate: float  # rate of what is dropped


class DropoutMasks:
    """The masks of the steps `begin` to `end` of a model."""

    def __init__(self, graph: Graph, begin: int, end: int) -> None:
        self._graph = graph
        self._begin, self._end = begin, end
        self._known: dict[Any, list[DropoutUse]] = {}
        self._noting: list[DropoutUse] | None = None
        self._step = 0
        self._masks: list[torch.Tensor] = []
        self._rows = (0, 0)
        self._next = 0

    def draw(self, inputs: Sequence[Any], share: BatchShard, training: bool, device: torch.device) -> None:
        """Draw the masks for a batch."""
        key = (training, *((tuple(t.shape[1:]), str(t.dtype)) if t is not None else None for t in inputs))
        if key not in self._known:
            self._known[key] = self._tried(inputs, training)
        rows = max(share.samples, 1)
        first = min(share.begin, share.total - 1)
        self._masks = []
        for draw in self._known[key]:
            whole = torch.empty_permuted(
                (share.total * draw.per_sample, *draw.shape), draw.order, dtype=draw.dtype, device=device
            ).fill_(1)
            mask = torch.nn.functional.dropout(whole, p=draw.rate, training=True)
            if self._begin <= draw.step < self._end:
                self._masks.append(mask[first * draw.per_sample : (first + rows) * draw.per_sample])

    def turn(self, begin: int, end: int) -> None:
        """Begin a micro-batch of the stage: rows `begin` to `end` of this rank's part."""
        self._rows, self._next = (begin, end), 0

    def dropout(self, inputs: Any, rate: float, plain: Callable[..., Any]) -> Any:
        """Do dropout in the place of Keras' function, where it draws by torch's generator."""
        if self._noting is not None:
            self._note(inputs, rate)
            return inputs
        if self._next >= len(self._masks):
            return plain(inputs, rate)  # a call of the model as a whole, by a callback say
        mask = self._masks[self._next]
        self._next += 1
        each = inputs.shape[0] // (self._rows[1] - self._rows[0])
        return inputs * mask[self._rows[0] * each : self._rows[1] * each]

    def _tried(self, inputs: Sequence[Any], training: bool) -> list[DropoutUse]:
        noted: list[DropoutUse] = []
        self._noting = noted
        self._step = 0

        def observe(number: int, seconds: float, made: list[Any]) -> None:
            self._step = number + 1

        few = [t if t is None else t[:1].expand(_TRIED, *t.shape[1:]).contiguous() for t in inputs]
        try:
            self._graph.try_out(few, training, observe)
        finally:
            self._noting = None
        return noted

    def _note(self, inputs: torch.Tensor, rate: float) -> None:
        assert self._noting is not None
        if not inputs.ndim or inputs.shape[0] % _TRIED:
            raise ValueError(
                f"layer {self._graph.steps[self._step].path!r} drops from a tensor of shape {list(inputs.shape)} for "
                f"{_TRIED} samples, whose first axis is not that of samples: with pipeline= give the layer a seed, or "
                "the samples to the first axis"
            )
        self._noting.append(
            DropoutUse(
                self._step,
                inputs.shape[0] // _TRIED,
                tuple(inputs.shape[1:]),
                tuple(memory_order(inputs.stride(), inputs.shape)),
                inputs.dtype,
                rate,
            )
        )
