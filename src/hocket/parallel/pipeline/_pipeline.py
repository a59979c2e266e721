"""A model cut into stages, trained by the ranks of a pipeline together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket._program import warn
from hocket.schedule.pipeline import (
    NAMED_ORDERS,
    PipelineAction,
    breadth_first,
    order_for_batch,
    order_name,
    pipeline_order,
)

from ..batches import trees as _trees
from ..mesh import World
from . import _micro, _values
from ._flight import KeptFlow
from ._micro import Micro
from ._recompute import runner
from ._run import Run, StageFailure, StageSpan
from ._stage import Stage
from ._tied import Tied
from ._wire import StageWire

Tensor = torch.Tensor
LossOf = Callable[[Any, Micro], Tensor]


class StageError(RuntimeError):
    """A stage has failed on what it was given; the message has the stage's number and the error."""


class Pipeline:
    """Runs the stages of this rank, in step with the other ranks of the pipeline. Weights are never stale.

    A step is that of one process up to rounding, with two exceptions that lie in micro-batches: batch norm normalises
    each micro-batch by itself (of which a warning tells), and dropout draws other masks.

    Args:
        stages: those of this rank: of `split`'s every `world.size`-th, from `world.rank` on, or those that
            `hocket.schedule.pipeline.stage_homes` gives to it where an order places them in another way.
        world: the ranks of the pipeline.
        schedule: the order in which ranks work: "gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v", or a
            file with an order (or its text); "1f1b" with several stages on a rank is interleaved.
        micro_batches: into how many a batch is cut. A batch of fewer samples makes fewer.
        loss_fn: called with the model's output and the target of a micro-batch.
        loss_reduction: "mean" if `loss_fn` is a mean over samples, "sum" if it is a sum.
        recompute: activations that are not kept but computed again in the backward: "none", "stage" or "layer".
        fixed_shapes: whether shapes that cross a cut follow from those of the batch, so that messages are described
            once; None for what was found when the model was split.
        on_last_backward: called with each stage before its last backward of a step.
        on_gradients: called with each stage when its gradients are complete: after its last backward, or at the end of
            the step for stages with tied weights.
        alike: the ranks that hold the same values at each cut, to send a part each; None to have each send all.
        keeps_buffers: whether the caller sees to buffers that each micro-batch changes; else a warning names them.

    Attributes:
        stages: this rank's.
        schedule: its name, or the text of an order.
        micro_batches: into how many a batch is cut.
        spans: when this rank computed in the last step.

    Raises:
        ValueError: an unknown schedule or number of micro-batches, or these are not this rank's stages.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        world: World,
        schedule: str = "1f1b",
        micro_batches: int = 1,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        *,
        loss_reduction: str = "mean",
        recompute: str = "none",
        fixed_shapes: bool | None = None,
        on_last_backward: Callable[[Stage], None] | None = None,
        on_gradients: Callable[[Stage], None] | None = None,
        alike: World | None = None,
        keeps_buffers: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.micro_batches = micro_batches
        self.spans: list[StageSpan] = []
        self._world = world
        self._loss_fn = loss_fn
        self._summed = loss_reduction == "sum"
        self._before = on_last_backward or _nothing
        self._after = on_gradients or _nothing
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction = {loss_reduction!r} is not known; choose mean or sum")
        if micro_batches < 1:
            raise ValueError(f"micro_batches = {micro_batches}: a batch is cut into 1 or more")
        count = self.stages[0].count if self.stages else 0
        if not count or count % world.size:
            raise ValueError(
                f"the pipeline of {world.size} ranks was given {len(self.stages)} of {count} stages on rank "
                f"{world.rank}, and the number of stages must be a multiple of the ranks: "
                "split(model, ranks * stages_per_rank, sample)"
            )
        order = pipeline_order(schedule, world.size, count // world.size, micro_batches)
        self._count, self._homes = count, order.homes
        self._check_stages(schedule)
        self.schedule = schedule if schedule in NAMED_ORDERS else str(order)  # a file is read once
        self._by_index = {stage.index: stage for stage in self.stages}
        self._runners = {
            stage.index: runner(stage, recompute) if stage.last else KeptFlow(stage, runner(stage, recompute))
            for stage in self.stages
        }
        fixed = self.stages[0].fixed_shapes if fixed_shapes is None else fixed_shapes
        if fixed_shapes is None and not fixed and micro_batches > 2 and self.schedule != "gpipe" and world.size > 1:
            # A description is waited for where a receive is posted, which may be before the sender can go on.
            one = "stages_per_rank = 1 and " if count > world.size else ""
            raise ValueError(
                "shapes that cross a cut of this model depend on the numbers in a batch, and each message must be "
                f'described: say {one}pipeline_schedule = "gpipe", or micro_batches = 2'
            )
        self._wire = StageWire(world, fixed_shapes=fixed, alike=alike)
        self._describing_wire = StageWire(world, fixed_shapes=False)
        self._tied = Tied(self.stages, world, self._wire)
        self._tied.make_equal()
        self._device = next((p.device for s in self.stages for p in s.module.parameters()), world.device)
        _warn_of_batch_norm(self.stages, micro_batches)
        if micro_batches > 1 and world.rank == 0 and not keeps_buffers and (said := changing_buffers(self.stages[0])):
            warn(said)

    @property
    def holds_last(self) -> bool:
        """Whether this rank computes the model's output and the loss."""
        return any(stage.last for stage in self.stages)

    @property
    def tied(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that other ranks of the pipeline hold too."""
        return self._tied.parameters

    def step(self, inputs: Any, target: Any, weight: float = 1.0) -> Tensor:
        """Run forward and backward of a batch: accumulate gradients, and update nothing.

        `inputs` (positional, or a dict of keywords) and `target` are the same on every rank; the loss is multiplied
        with `weight`, the share of this batch in a larger one, before the backward, and so returned on every rank.
        """
        return self.from_last(self.accumulate(inputs, target, lambda output, micro: self._loss(output, micro, weight)))

    def accumulate(self, inputs: Any, target: Any, loss_of: LossOf) -> Tensor:
        """Accumulate the gradients of a loss of a batch; return it where `holds_last`, else a tensor to receive it.

        `inputs` and `target` are the same on every rank; `loss_of` gives, of the output of a micro-batch and that
        micro-batch, what of it is added to the loss.
        """
        micros = self._cut(inputs, target, self.micro_batches)
        order = order_for_batch(self.schedule, self._world.size, len(self.stages), len(micros)).with_messages()
        held_back: list[Stage] = []
        tied = {id(parameter) for parameter in self.tied}

        def final(stage: Stage) -> None:
            if any(id(parameter) in tied for parameter in stage.module.parameters()):
                held_back.append(stage)
            else:
                self._after(stage)

        self._tied.set_aside()
        with torch.enable_grad():
            run = self._run(micros, loss_of, final)
            run.perform(order.ranks[self._world.rank])
        self.spans = run.spans
        self._tied.sum_gradients()
        for stage in held_back:
            self._after(stage)
        return self._total(run.losses)

    @torch.no_grad()
    def evaluate(
        self, inputs: Any, target: Any, loss_of: LossOf | None = None, *, alike: bool = False, graph: bool = False
    ) -> Tensor:
        """Return the loss of a batch on every rank, without a backward; see `accumulate`.

        `loss_of` is by default the pipeline's own loss. If `alike`, what fails on one rank is raised on all; with
        `graph`, outputs have the graph of their stage, by which some losses tell what they divide by.

        Raises:
            StageError: a stage or the loss has failed; if `alike`, and then on every rank.
        """
        micros = self._cut(inputs, target, self.micro_batches)
        loss_of = loss_of or (lambda output, micro: self._loss(output, micro, 1.0))
        run = self._run(micros, loss_of, _nothing, hands_on=alike)
        with torch.set_grad_enabled(graph):
            run.perform(self._forwards(len(micros)))
        if alike:
            self._check_alike(run)
        return self.from_last(self._total(run.losses))

    @torch.no_grad()
    def forward(
        self,
        inputs: Any,
        *,
        everywhere: bool = False,
        micro_batches: int | None = None,
        join: Callable[[list[Any], list[Micro]], Any] | None = None,
    ) -> Any:
        """Return the model's output for a batch, without gradients.

        `inputs` are the same on every rank. Unless `everywhere`, ranks that do not hold the last stage get None. The
        batch is cut into as many `micro_batches` as in training if not given, and `join` makes one output of theirs; if
        not given, tensors are joined along the samples.

        Raises:
            StageError: a stage has failed; on every rank if `everywhere`.
        """
        micros = self._cut(inputs, None, micro_batches or self.micro_batches)
        run = self._run(micros, None, _nothing, hands_on=everywhere)
        run.perform(self._forwards(len(micros)))
        output = None
        if self.holds_last:
            outputs = [run.outputs[i] for i in range(len(micros))]
            failed = next((one for one in outputs if isinstance(one, StageFailure)), None)
            output = failed or (join or _joined)(outputs, micros)
        if everywhere:
            output = self._from_last(output)
        if isinstance(output, StageFailure):
            raise StageError(f"stage {output.stage} of {self._count} of the pipeline has failed: {output.said}")
        return output

    def _check_alike(self, run: Run) -> None:
        """Raise StageError on every rank if something has failed; a collective operation."""
        box = [next((one for one in run.outputs.values() if isinstance(one, StageFailure)), None)]
        if self._world.size > 1:
            dist.broadcast_object_list(box, group=self._world.group, group_src=self._homes[-1])
        if box[0] is not None:
            raise StageError(f"stage {box[0].stage} of {self._count} of the pipeline has failed: {box[0].said}")

    def _cut(self, inputs: Any, target: Any, count: int) -> list[Micro]:
        """Return the micro-batches of a batch that is like the sample, or raise an error on every rank alike."""
        if self.stages[0].settled is not None:
            self.stages[0].settled.check()
        inputs = _micro.positional(inputs)
        known, found = self.stages[0].outline, _micro.outline(inputs)
        if known is not None and found != known:
            raise ValueError(
                f"the model was split with a sample of {known}, and this batch is {found}: its code may take another "
                "way. Give Trainer(sample=) inputs like the batches"
            )
        _micro.check_sizes(inputs, self.stages[0].unseen)
        return _micro.cut(inputs, target, count, self.stages[0].fewest)

    def _from_last(self, output: Any) -> Any:
        """Return what the rank of the last stage has, on every rank; a collective operation."""
        if self._world.size == 1:
            return output
        last = self._homes[-1]
        box: list[Any] = [None]
        if self.holds_last:
            box = [_values.described(output)]
            try:
                pickle.dumps(box)
            except Exception as error:
                box = [StageFailure(self._count - 1, f"its output cannot be sent: {type(error).__name__}: {error}")]
        dist.broadcast_object_list(box, group=self._world.group, group_src=last)
        sent = self.holds_last and not isinstance(box[0], StageFailure)
        tensors = _values.dense(_values.tensors_of(output)) if sent else _values.empty_for(box[0], self._device)
        for tensor in tensors:
            dist.broadcast(tensor, group=self._world.group, group_src=last)
        return output if sent else _values.filled(box[0], tensors)

    def _run(self, micros: list[Micro], loss_of: Any, final: Callable[[Stage], None], *, hands_on: bool = False) -> Run:
        return Run(
            self._by_index,
            self._runners,
            self._homes,
            self._describing_wire if hands_on else self._wire,
            micros,
            self._device,
            loss_of,
            final,
            self._before,
            hands_on=hands_on,
        )

    def _forwards(self, count: int) -> tuple[PipelineAction, ...]:
        return breadth_first(self._homes, count).with_messages().forwards(self._world.rank)

    def _loss(self, output: Any, micro: Micro, weight: float) -> Tensor:
        if self._loss_fn is None:
            raise ValueError("Pipeline was made without loss_fn; only forward() can be used")
        return self._loss_fn(output, micro.target) * (weight if self._summed else weight * micro.share)

    def _total(self, losses: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        return torch.stack(losses).sum().to(total) if self.holds_last else total

    def from_last(self, values: Tensor) -> Tensor:
        """Give every rank the values of the one that computes the loss, in place; a collective operation."""
        if self._world.size > 1:
            dist.broadcast(values, group=self._world.group, group_src=self._homes[-1])
        return values

    def _check_stages(self, schedule: str) -> None:
        rank, have = self._world.rank, [stage.index for stage in self.stages]
        own = [stage for stage, home in enumerate(self._homes) if home == rank]
        if have != own:
            raise ValueError(
                f"rank {rank} of a pipeline of {self._world.size} was given the stages {have} of {self._count}, and in "
                f"the schedule {order_name(schedule)!r} it runs {own}: take these of all that split() returns"
            )


def changing_buffers(stage: Stage) -> str:
    """Return what micro-batches do to a model whose forward changes buffers, as a sentence; "" if it changes none."""
    if not stage.written:
        return ""
    names = ", ".join(stage.written[:3]) + (", ..." if len(stage.written) > 3 else "")
    return (
        f"each forward changes buffers of the model ({names}), and each micro-batch is one, so they and what is "
        "computed with them differ from those of one process. For equal losses use micro_batches = 1"
    )


def _warn_of_batch_norm(stages: Sequence[Stage], micro_batches: int) -> None:
    if micro_batches < 2:
        return
    for stage in stages:
        for name, module in stage.module.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
                warn(
                    f"batch norm ({name}) in a pipeline of {micro_batches} micro-batches normalises each of them by "
                    "itself, so the losses differ from those of one process. For equal losses use micro_batches = 1, "
                    "layer or group norm, or freeze it with .eval()",
                )
                return


def _joined(outputs: list[Any], micros: list[Micro]) -> Any:
    """Return one output of those of the micro-batches: tensors joined along the samples, all else as in the first."""
    parts = [_values.tensors_of(output) for output in outputs]
    whole = [torch.cat(column) if column[0].dim() else torch.stack(column) for column in zip(*parts, strict=True)]
    source = iter(whole)
    return _trees.mapped(outputs[0], lambda _: next(source))


def _nothing(_: Stage) -> None:
    pass
