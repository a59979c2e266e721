"""What a plan holds in each worker's memory at its peak, split by kind.

Model state: Rajbhandari et al. 2020 (ZeRO). Activations: Korthikanti et al. 2022. Micro-batches under way: `in_flight`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.units import format_bytes
from hocket.workload import Layer, Share, Workload

from ._bucket_sizes import BucketSizes
from ._plan import Plan
from ._stages import in_flight, stage_cuts
from .axes import axis, replicas, sharing


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
        return ", ".join(f"{name} {format_bytes(nbytes, 3)}" for name, nbytes in self.rows() if nbytes >= 1)


def saved_bytes(layer: Layer, plan: Plan, scale: float) -> float:
    """Return what a layer leaves for its backward pass of one micro-batch on one worker.

    `scale` is the samples of the micro-batch by those that the workload is for.
    """
    how = plan.recompute_part if plan.recompute else "none"
    name, degree = sharing(plan)
    share = layer.share(degree, sequence=plan.sequence_parallel, axis=name)
    return _kept(layer, share, plan.sequence_parallel, how, scale)


def _kept(layer: Layer, share: Share, sequence: bool, how: str, scale: float) -> float:
    if how == "layers":
        # What enters the layer is kept; it is as large as what leaves it.
        return min(layer.output_bytes, layer.saved_bytes) * scale / (share.degree if sequence else 1)
    return sum(one.saved_bytes for one in share.operations if one.part != "core" or how == "none") * scale


def _columns(workload: Workload, plan: Plan, scale: float) -> NDArray[np.float64]:
    """Of every layer: parameters, gradients, optimizer, saved, output, and what computing again brings back."""
    (name, degree), sequence = sharing(plan), plan.sequence_parallel
    each = degree if axis(name).divides == "samples" else 1  # of what passes between layers
    how = plan.recompute_part if plan.recompute else "none"
    made: dict[tuple[float, ...], tuple[float, ...]] = {}
    rows = []
    for layer in workload.layers:
        state = (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes)
        # Like layers share operations.
        key = (id(layer.operations), id(layer.shares), *state, layer.output_bytes, layer.tensor_limit)
        if key not in made:
            share = layer.share(degree, sequence=sequence, axis=name)
            kept = _kept(layer, share, sequence, how, scale)
            back = _kept(layer, share, sequence, "none", scale) - kept if how != "none" else 0.0
            held = (share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes)
            made[key] = (*held, kept, layer.output_bytes * scale / each, back)
        rows.append(made[key])
    return np.array(rows, dtype=np.float64).T


def memory_of(
    plan: Plan, workload: Workload, *, batch: int, cuts: Sequence[int] | None = None, rank: int | None = None
) -> Memory:
    """Return the peak of one worker, or of the worker that needs most.

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
    pipeline, (copies, _) = plan.pipeline_parallel_degree, replicas(plan)
    micro = -(-batch // (max(1, plan.data_parallel_degree) * plan.micro_batches * plan.accumulate))
    columns = _columns(workload, plan, micro / workload.batch)
    edges = [0, *cuts, len(workload.layers)]
    blocks = np.array(workload.blocks)

    def of(rank: int) -> Memory:
        stages = range(rank, len(edges) - 1, pipeline)
        mine = np.concatenate([np.arange(edges[s], edges[s + 1]) for s in stages])
        own = columns[:, mine]
        parameters, gradients, optimizer, saved = own[:4].sum(axis=1).tolist()
        largest, output, back = np.bincount(blocks[mine], own[0]).max(), own[4].max(), own[5].max()
        whole = gradients
        if plan.shard != "none":
            optimizer /= copies
        if plan.shard in ("gradients", "parameters"):
            gradients /= copies
        buffers = 0.0
        if plan.shard == "parameters":
            parameters /= copies
            buffers += 2 * largest  # a layer that is computed with, and the next one, gathered
        if copies > 1:
            buffers += 2 * min(BucketSizes.choose(whole, plan.bucket_bytes).most, whole)
        if pipeline > 1:
            buffers += 4 * output  # a message each way that is sent, and one that is received
        held = saved * in_flight(plan, rank)
        return Memory(parameters, gradients, optimizer, held, float(back + 2 * output), float(buffers))

    if rank is not None:
        return of(rank)
    return max((of(one) for one in range(pipeline)), key=lambda one: one.total)
