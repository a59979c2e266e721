"""Runs batches through the stages of a functional Keras model, on the ranks of a pipeline together."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.parallel.batches import BatchShard
from hocket.parallel.mesh import World
from hocket.parallel.pipeline import Micro, Run, Stage, StageWire, cut
from hocket.schedule.pipeline import order_for_batch

from . import _private
from ._dropout import DropoutMasks
from ._graph import Graph
from ._stage import BatchRecord, Rows, StageModule, mask_of, stage_of

LossOf = Callable[[Any, Rows], Any]


class Engine:
    """This rank's stage. This pipeline's part of a batch is cut into `micro_batches`, a shorter one into fewer."""

    def __init__(
        self, graph: Graph, begins: Sequence[int], world: World, micro_batches: int, schedule: str = "gpipe"
    ) -> None:
        self.schedule = schedule
        self.graph = graph
        self.begins = list(begins)
        self.stage: Stage = stage_of(graph, begins, world.rank)
        part = self.stage.module
        assert isinstance(part, StageModule)
        self._stage = part
        self.masks = DropoutMasks(graph, part.begin, part.end)
        self._world = world
        self._micro_batches = micro_batches
        self._share: BatchShard | None = None
        self._book: BatchRecord | None = None
        self.renew()

    @property
    def last(self) -> bool:
        """Whether this rank computes the model's output."""
        return self.stage.last

    def renew(self) -> None:
        """Forget what is known of messages: which values have gradients may have changed. On all ranks together."""
        self._wire = StageWire(self._world)

    def share(self) -> BatchShard | None:
        """Return the samples of the micro-batch in work, of the whole batch; None between."""
        share, rows = self._share, None if self._book is None else self._book.rows
        if share is None or rows is None or not share.samples:
            return share if rows is not None else None
        return BatchShard(share.begin + rows[0], share.begin + rows[1], share.total, share.world)

    def begin(self, x: Any, share: BatchShard, *, training: bool, scale: float = 1.0) -> "Batch":
        """Begin a batch, to be run forward, and backward if it trains.

        The model's input is this pipeline's part of the batch; losses are multiplied by `scale` before the backward.
        """
        inputs = self.graph.flat_inputs(x)
        device = next(t.device for t in inputs if t is not None)
        self.masks.draw(inputs, share, training, device)
        self._stage.start()
        self._share = share
        self._book = book = BatchRecord(training, scale)
        micros, begin = [], 0
        rows = max(share.samples, 1)
        for index, micro in enumerate(cut(tuple(inputs), None, self._micro_batches)):
            end = begin + round(micro.share * rows)
            micros.append(replace(micro, inputs=(Rows(book, index, begin, end, micro.share), *micro.inputs)))
            begin = end
        return Batch(self, book, micros, device)

    def _runner(self, rows: Rows, *given: Any) -> Any:
        self.masks.turn(rows.begin, rows.end)
        return self._stage(rows, *given)


class Batch:
    """One batch on its way through the pipeline."""

    def __init__(self, engine: Engine, book: BatchRecord, micros: list[Micro], device: torch.device) -> None:
        self._engine = engine
        self._book = book
        self._outputs: dict[int, list[Any]] = {}
        self._loss_of: LossOf | None = None
        self._count = len(micros)
        self._keys = tuple(micro.key for micro in micros)
        self._device = device
        world, index = engine._world, engine.stage.index
        self._order = order_for_batch(engine.schedule, world.size, 1, self._count).with_messages()
        self._run = Run(
            {index: engine.stage},
            {index: engine._runner},
            range(world.size),
            engine._wire,
            micros,
            device,
            self._hold if book.training else None,
            _nothing,
            _nothing,
        )

    @property
    def training(self) -> bool:
        """Whether it trains."""
        return self._book.training

    @property
    def aside(self) -> tuple[float, int]:
        """The losses inside of this stage's layers: mean over samples of the pipeline's part, and their number."""
        return self._book.aside, self._book.asides

    def forward(self) -> Any:
        """Run the forward of all micro-batches; return the model's output on the last stage, else None."""
        with torch.set_grad_enabled(self._book.training):
            self._run.perform(self._order.forwards(self._engine._world.rank))
        return self._put_together()

    def in_turns(self, loss_of: LossOf) -> Any:
        """Run forwards and backwards of all micro-batches in the schedule's order; return as `forward`.

        Args:
            loss_of: A function called on the last stage with the output of a micro-batch and its rows, and gives
                what its backward begins from, or None for nothing.
        """
        self._loss_of = loss_of
        with torch.enable_grad():
            self._run.perform(self._order.ranks[self._engine._world.rank])
        return self._put_together()

    def _put_together(self) -> Any:
        if not self._engine.last:
            return None
        found = self._outputs if self._book.training else self._run.outputs
        columns = zip(*(found[index] for index in range(self._count)), strict=True)
        self._whole = [_joined(list(column), self._book.training) for column in columns]
        return self._engine.graph.packed(self._whole)

    def backward(self) -> None:
        """Run the backward of all micro-batches, from the gradients that the output of `forward` has by now."""
        if self._engine.last:
            begin = 0
            for index in range(self._count):
                parts = self._outputs[index]
                size = len(parts[0])
                self._book.gradients[index] = [
                    torch.zeros_like(part) if whole.grad is None else whole.grad[begin : begin + size]
                    for part, whole in zip(parts, self._whole, strict=True)
                ]
                begin += size
        self._run.perform(self._order.backwards(self._engine._world.rank))

    def everywhere(self, output: Any, share: BatchShard) -> Any:
        """Return the output of the last stage, on every rank of the pipeline."""
        engine = self._engine
        key = (engine.stage.count, "output", self._keys, share.total)
        return engine._wire.broadcast_values(engine._world.size - 1, key, output, self._device)

    def _hold(self, outputs: Sequence[Any], micro: Micro) -> torch.Tensor:
        rows: Rows = micro.inputs[0]
        index = rows.index
        self._outputs[index] = [output.detach() for output in outputs]
        for kept, output in zip(self._outputs[index], outputs, strict=True):
            if mask_of(output) is not None:
                _private.backend.set_keras_mask(kept, mask_of(output))
        start = torch.zeros((), requires_grad=True)
        later: torch.Tensor = _Later.apply(start, self._book, index, *outputs)  # type: ignore[no-untyped-call]
        if self._loss_of is None:
            return later
        # What a layer's loss is hung to gets a gradient even if it is zero.
        self._book.gradients[index] = [torch.zeros_like(output) for output in outputs]
        loss = self._loss_of(self._engine.graph.packed(outputs), rows)
        return later if loss is None else later + loss


class _Later(torch.autograd.Function):
    """Stands for the loss of a micro-batch; the gradients of its outputs are looked up when they are needed."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, book: BatchRecord, index: int, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.book, ctx.index = book, index
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, None, *ctx.book.gradients.pop(ctx.index))


def _joined(parts: list[Any], training: bool) -> torch.Tensor:
    """One output of the whole part, of those of the micro-batches."""
    whole = torch.cat(parts)
    if training and whole.is_floating_point():
        whole.requires_grad_()
    if mask_of(parts[0]) is not None:
        _private.backend.set_keras_mask(whole, torch.cat([mask_of(part) for part in parts]))
    return whole


def _nothing(_: Stage) -> None:
    pass
