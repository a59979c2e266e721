"""What a plan holds in each worker's memory at its peak, split by kind.

Model state: Rajbhandari et al. 2020 (ZeRO). Activations: Korthikanti et al. 2022. Micro-batches under way: `in_flight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.cluster import format_bytes
from hocket.workload import Layer, Workload

from ._plan import Plan
from ._stages import in_flight, stage_cuts

__all__ = ["Memory", "memory_of"]

_BUCKET_NBYTES = 25 * 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one worker at the peak.

    Attributes:
        parameters: As they are computed with.
        gradients: Of the parameters.
        optimizer: Its state.
        activations: Saved for the backward passes of all micro-batches that are under way.
        working: What recomputation brings back of one layer, and a layer's output with its gradient.
        buffers: Gathered parameters, buckets of gradients, messages of the pipeline.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float = 0.0
    buffers: float = 0.0

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything."""
        return self.state + self.activations + self.working + self.buffers

    def rows(self) -> list[tuple[str, float]]:
        """Kinds with their bytes, the total last."""
        names = ("parameters", "gradients", "optimizer", "activations", "working", "buffers", "total")
        return [(name, getattr(self, name)) for name in names]

    def __str__(self) -> str:
        return ", ".join(f"{name} {format_bytes(int(nbytes))}" for name, nbytes in self.rows() if nbytes >= 1)


def saved_bytes(layer: Layer, plan: Plan, scale: float) -> float:
    """What a layer leaves for its backward pass of one micro-batch on one worker.

    Args:
        layer: Of the workload.
        plan: Its tensor degree, sequence_parallel and recomputation count.
        scale: Samples of the micro-batch by those that the workload is for.
    """
    tensor = plan.tensor_parallel_degree
    degree = tensor if tensor > 1 and layer.tensor_limit > 1 and layer.tensor_limit % tensor == 0 else 1
    along = degree if plan.sequence_parallel else 1
    if plan.recompute and plan.recompute_part == "layers":
        # What enters the layer is kept; it is as large as what leaves it.
        return min(layer.output_bytes, layer.saved_bytes) * scale / along
    kept = 0.0
    for one in layer.operations:
        if one.part == "core" and plan.recompute:
            continue
        kept += one.saved_bytes / (along if one.part == "shared" else degree)
    return kept * scale


def memory_of(
    plan: Plan, workload: Workload, *, batch: int, cuts: list[int] | None = None, rank: int | None = None
) -> Memory:
    """The peak of one worker, or of the worker that needs most.

    Args:
        plan: With all degrees filled in (`Plan.resolve`).
        workload: What is trained.
        batch: Samples of a global batch.
        cuts: Layers with which the later stages begin; balanced by FLOPs if not given.
        rank: Of the pipeline; the worst one if not given.

    Raises:
        PlanError: the plan has more stages than there are layers.
    """
    if cuts is None:
        cuts = stage_cuts(plan, workload, [layer.flops + 1e-9 for layer in workload.layers])
    stages = workload.stages(cuts)
    pipeline = plan.pipeline_parallel_degree
    if rank is None:
        each = [memory_of(plan, workload, batch=batch, cuts=cuts, rank=one) for one in range(pipeline)]
        return max(each, key=lambda one: one.total)
    tensor, data = plan.tensor_parallel_degree, max(1, plan.data_parallel_degree)
    micro = -(-batch // (data * plan.micro_batches * plan.accumulate))
    scale = micro / workload.batch
    parameters = gradients = optimizer = saved = largest = output = working = 0.0
    for own in stages[rank::pipeline]:
        for layer in own:
            degree = tensor if tensor > 1 and layer.tensor_limit > 1 and layer.tensor_limit % tensor == 0 else 1
            parameters += layer.parameter_bytes / degree
            gradients += layer.gradient_bytes / degree
            optimizer += layer.optimizer_bytes / degree
            saved += saved_bytes(layer, plan, scale)
            largest = max(largest, layer.parameter_bytes / degree)
            output = max(output, layer.output_bytes * scale)
            if plan.recompute:
                kept = Plan(tensor_parallel_degree=tensor, sequence_parallel=plan.sequence_parallel)
                working = max(working, saved_bytes(layer, kept, scale) - saved_bytes(layer, plan, scale))
    whole = gradients
    if plan.shard != "none":
        optimizer /= data
    if plan.shard in ("gradients", "parameters"):
        gradients /= data
    buffers = 0.0
    if plan.shard == "parameters":
        parameters /= data
        buffers += 2 * largest  # a layer that is computed with, and the next one, gathered
    if data > 1:
        buffers += 2 * min(float(plan.bucket_bytes or _BUCKET_NBYTES), whole)
    if pipeline > 1:
        buffers += 4 * output  # a message each way that is sent, and one that is received
    return Memory(parameters, gradients, optimizer, saved * in_flight(plan, rank), working + 2 * output, buffers)
