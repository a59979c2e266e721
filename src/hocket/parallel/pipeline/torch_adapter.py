"""The only module of this room that touches private names of `torch.distributed.pipelining`: schedules, split backward.

torch's schedules decide which rank computes what in which order, and where sends and receives stand between; they are
asked for through stand-ins for its stages. They are carried out by our own loop, because torch's wants every
micro-batch of every step to have the same shapes, and all that crosses a cut to be tensors of the model's making.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS, _add_send_recv
from torch.fx.proxy import Attribute as Attribute

Tensor = torch.Tensor

COMPUTE: Final = ("F", "B", "I", "W")


class _StageStandIn:
    """What the constructors of torch's schedules ask of a stage: numbers, and no process group."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.stage_index = self.group_rank = 0
        self.group_size = ranks
        self.num_stages = stages
        self.is_last = stages == 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}


def ordered(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> list[list[tuple[int, str, int]]]:
    """What each rank does, in order: (stage, kind, micro-batch).

    Kinds are F (forward), B (backward), I and W (backward of the inputs, of the weights), and SEND_F, RECV_F, SEND_B,
    RECV_B (what a forward or a backward needs or has made). Stage s is on rank s % ranks.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        ranks: in the pipeline.
        per_rank: stages of each rank.
        micro_batches: of a step.

    Raises:
        ValueError: torch's schedule does not admit so many micro-batches.
    """
    stages = ranks * per_rank
    stand_ins: list[Any] = [_StageStandIn(ranks, stages) for _ in range(per_rank)]
    order: Any
    if schedule == "1f1b" and per_rank == 1:
        # with fewer micro-batches than ranks 1F1B is all warm-up, which is GPipe, and torch's own refuses
        schedule = "1f1b" if micro_batches >= ranks else "gpipe"
    if schedule == "1f1b" and per_rank == 1:
        order = _one_f_one_b(stand_ins[0], ranks, micro_batches)
    elif schedule == "gpipe":  # with several stages on a rank it is breadth-first; with one it is GPipe
        order = ScheduleLoopedBFS(stand_ins, micro_batches).pipeline_order
    elif schedule == "zero_bubble":
        order = ScheduleInterleavedZeroBubble(stand_ins, micro_batches).pipeline_order
    else:
        order = ScheduleInterleaved1F1B(stand_ins, micro_batches).pipeline_order
    lowered = _add_send_recv({r: list(order[r]) for r in range(ranks)}, lambda stage: stage % ranks, stages)
    return [
        [
            (action.stage_index, action.computation_type.value, int(action.microbatch_index or 0))
            for action in lowered[r]
        ]
        for r in range(ranks)
    ]


def _one_f_one_b(stand_in: Any, ranks: int, micro_batches: int) -> dict[int, list[Any]]:
    """As torch orders it; in torch 2.13 the last rank's forwards are numbered from 1, so they are numbered anew."""
    theirs: Any = Schedule1F1B(stand_in, micro_batches)._get_pipeline_order()
    order: dict[int, list[Any]] = {}
    for rank in range(ranks):
        counts = {"F": 0, "B": 0}
        order[rank] = []
        for action in theirs[rank]:
            kind = None if action is None else action.computation_type.value
            if kind in counts:
                order[rank].append(action._replace(microbatch_index=counts[kind]))
                counts[kind] += 1
            elif action is None:
                order[rank].append(None)
    return order


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[list[Tensor | None], Any]:
    """The gradients of `inputs` only, and what `backward_of_weights` needs to go on (Qi et al. 2023, Zero Bubble).

    A parameter that no input meets on its way to the outputs would be lost in torch's grouping; its gradient is
    accumulated here and now.
    """
    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    accumulators = {torch.autograd.graph.get_gradient_edge(parameter).node: parameter for parameter in parameters}
    found, groups = stage_backward_input(list(outputs), list(gradients), list(inputs), iter(parameters))
    grouped = {node for group in groups for node in group["params"]}
    lost = [parameter for node, parameter in accumulators.items() if node not in grouped]
    if lost:
        here = torch.autograd.grad(edges, lost, list(gradients), retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(lost, here, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return list(found), groups


def backward_of_weights(parameters: Sequence[torch.nn.Parameter], groups: Any) -> None:
    """Accumulates the gradients of `parameters` that `backward_of_inputs` has left over.

    torch stores what autograd hands out as it is; two parameters may then hold the same memory, or one an expanded
    number, and adding the next micro-batch's to it in place would be wrong.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    stage_backward_weight(iter(parameters), groups)
    seen = set()
    for parameter, old in zip(parameters, before, strict=True):
        new = parameter.grad
        if old is not None:
            parameter.grad = old if new is None else old.add_(new)
        elif new is not None:
            if new.data_ptr() in seen or 0 in new.stride():
                parameter.grad = new.clone()
            seen.add(new.data_ptr())
