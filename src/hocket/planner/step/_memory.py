"""What a plan holds in each worker's memory at its peak, split by kind.

Model state: Rajbhandari et al. 2020 (ZeRO). Activations: Korthikanti et al. 2022. Micro-batches under way: `in_flight`.
Where ranks are processes in a host's memory, what a process takes besides counts as well.

On a device with memory of its own the peak is a maximum over moments. While the backward pass goes on, activations
leave and gradients come: layer by layer stands what is there when most is (`Layer.peak_bytes`). After it the optimizer
has all gradients and no activations, and makes values of its own. A process does not give back what it has freed, not
to the last block; there all kinds are added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.units import format_bytes
from hocket.workload import Layer, Share, Workload

from ..axes import axis, replicas, shard_group, sharing
from ..plan import SHARDS, BucketSizes, Plan
from ._stages import in_flight, layers_by_rank, stage_cuts

PROCESS_NBYTES = 260 * 2**20
"""Of the interpreter with torch and a Trainer, before there is a model: Python 3.11, torch 2.13."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one worker at the peak.

    Attributes:
        parameters: As they are computed with.
        gradients: Of the parameters.
        optimizer: Its state.
        activations: Saved for the backward passes of all micro-batches that are under way.
        working: What is there for a moment: gradients that pass through a layer, what recomputation brings back of it,
            what the loss makes; or what the optimizer does.
        buffers: Gathered parameters, buckets of gradients, messages of the pipeline.
        process: Where a rank is a process in a host's memory: interpreter and libraries, and what the optimizer makes
            for a moment. 0 for devices with memory of their own.
        mapped: Buffers of other ranks of the host that it reads in place. They are in its resident set, and not in the
            total: the host has them once.
        absent: Of all these, what is not there at the fullest moment: activations leave while gradients come.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float = 0.0
    buffers: float = 0.0
    process: float = 0.0
    mapped: float = 0.0
    absent: float = 0.0

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything that this worker has at its fullest moment."""
        return self.state + self.activations + self.working + self.buffers + self.process - self.absent

    @property
    def resident(self) -> float:
        """What the system counts as the process's (VmHWM): everything, and what it reads of others in place."""
        return self.total + self.mapped

    def rows(self) -> list[tuple[str, float]]:
        """Kinds with their bytes, what is absent as a negative number, the total, and what is resident if more."""
        names = ["parameters", "gradients", "optimizer", "activations", "working", "buffers"]
        rows = [(name, getattr(self, name)) for name in (*names, *(["process"] if self.process else []))]
        if self.absent:
            rows.append(("absent", -self.absent))
        return [*rows, ("total", self.total), *([("resident", self.resident)] if self.mapped else [])]

    def __str__(self) -> str:
        return ", ".join(f"{name} {format_bytes(nbytes, 3)}" for name, nbytes in self.rows() if abs(nbytes) >= 1)


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
    kept = [one for one in share.operations if not one.again or how == "none"]
    return sum(one.saved_bytes for one in kept) * scale + (1 - scale) * sum(one.saved_fixed_bytes for one in kept)


class _Columns(NamedTuple):
    """Of every layer, as the rank has it, in bytes. All but the state are of one micro-batch."""

    parameters: NDArray[np.float64]
    gradients: NDArray[np.float64]
    optimizer: NDArray[np.float64]
    saved: NDArray[np.float64]
    output: NDArray[np.float64]
    back: NDArray[np.float64]  # what computing again brings back
    peak: NDArray[np.float64]  # `Layer.peak_bytes`, and what is saved of weights
    fixed: NDArray[np.float64]  # the rest of `Layer.peak_fixed_bytes`
    update: NDArray[np.float64]  # `Layer.update_bytes`

    def of(self, layers: NDArray[np.int64]) -> "_Columns":
        """Return those of some layers."""
        return _Columns(*(column[layers] for column in self))


def _columns(workload: Workload, plan: Plan, scale: float) -> _Columns:
    (name, degree), sequence = sharing(plan), plan.sequence_parallel
    each = degree if axis(name).divides == "samples" else 1  # of what passes between layers
    how = plan.recompute_part if plan.recompute else "none"
    made: dict[tuple[float, ...], tuple[float, ...]] = {}
    rows = []
    for layer in workload.layers:
        state = (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes)
        peak = (layer.peak_bytes, layer.peak_fixed_bytes, layer.update_bytes)
        # Like layers share operations.
        key = (id(layer.operations), id(layer.shares), *state, *peak, layer.output_bytes, layer.tensor_limit)
        if key not in made:
            share = layer.share(degree, sequence=sequence, axis=name)
            kept = _kept(layer, share, sequence, how, scale)
            whole = _kept(layer, share, sequence, "none", scale) if how != "none" else kept
            held = (share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes)
            casts = sum(one.saved_fixed_bytes for one in share.operations)
            most = share.peak_bytes * scale + casts
            if how != "none":  # what is computed again is all there when the layer's backward pass begins
                most = max(most, whole)
            fixed = max(0.0, share.peak_fixed_bytes - casts)
            passing = (layer.output_bytes * scale / each, whole - kept, most, fixed)
            part = share.gradient_bytes / layer.gradient_bytes if layer.gradient_bytes else 1.0
            made[key] = (*held, kept, *passing, layer.update_bytes * part)
        rows.append(made[key])
    return _Columns(*np.array(rows, dtype=np.float64).T)


def layer_bytes(plan: Plan, workload: Workload, batch: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes of each layer on one rank: of its state, and of what a micro-batch leaves for the backward pass."""
    micro = -(-batch // (max(1, plan.data_parallel_degree) * plan.micro_batches * plan.accumulate))
    columns, shared = _columns(workload, plan, micro / workload.batch), shard_group(plan)[0]
    divided = SHARDS.index(plan.shard)
    parts = [shared if divided >= SHARDS.index(one) else 1 for one in ("parameters", "gradients", "optimizer")]
    state = columns.parameters / parts[0] + columns.gradients / parts[1] + columns.optimizer / parts[2]
    return state, columns.saved


def memory_of(
    plan: Plan,
    workload: Workload,
    *,
    batch: int,
    cuts: Sequence[int] | None = None,
    rank: int | None = None,
    sharers: int = 0,
) -> Memory:
    """Return the peak of one worker, or of the worker that needs most.

    Args:
        plan: With all degrees filled in (`Plan.resolve`).
        workload: What is trained.
        batch: Samples of a global batch.
        cuts: Layers with which the later stages begin; balanced by FLOPs if not given.
        rank: Of the pipeline; the worst one if not given.
        sharers: How many ranks are processes in the memory of one host; 0 for devices with memory of their own.

    Raises:
        PlanError: the plan has more stages than there are layers.
    """
    if cuts is None:
        cuts = stage_cuts(plan, workload, [layer.flops + 1e-9 for layer in workload.layers])
    pipeline, copies, shared = plan.pipeline_parallel_degree, replicas(plan)[0], shard_group(plan)[0]
    micro = -(-batch // (max(1, plan.data_parallel_degree) * plan.micro_batches * plan.accumulate))
    columns = _columns(workload, plan, micro / workload.batch)
    by_rank = layers_by_rank(plan, [0, *cuts, len(workload.layers)])
    blocks = np.array(workload.blocks)

    followed = any(layer.peak_bytes for layer in workload.layers)

    def of(rank: int) -> Memory:
        mine = by_rank[rank]
        own = columns.of(mine)
        parameters, gradients, optimizer, saved = (float(column.sum()) for column in own[:4])
        largest, output = float(np.bincount(blocks[mine], own.parameters).max()), float(own.output.max())
        # What an update changes, and others gather then: frozen parameters have no gradient.
        trained = np.minimum(own.parameters, own.gradients)
        whole, weights = gradients, float(trained.sum())
        if plan.shard != "none":
            optimizer /= shared
        if plan.shard in ("gradients", "parameters"):
            gradients /= shared
        buffers = arriving = added = 0.0
        if plan.shard == "parameters":
            parameters /= shared
            buffers += 2 * largest  # a layer that is computed with, and the next one, gathered
        # Of plain data parallelism buckets are in shared memory on a host, for good; on a device gradients make them.
        lasting = copies > 1 and (plan.shard != "none" or sharers > 0 or pipeline > 1 or not followed)
        if lasting:
            buffers += 2 * min(BucketSizes.choose(whole, plan.bucket_bytes).most, whole)
        if (copies > 1 and plan.shard in ("optimizer", "gradients")) or plan.micro_batches * plan.accumulate > 1:
            arriving += float(own.gradients.max())  # a gradient as it arrives, beside the memory where it is added up
        if lasting and plan.shard == "gradients" and pipeline > 1:
            added = whole  # what passes have added up, before it goes to buckets, which are lent
        if pipeline > 1:
            buffers += 4 * output  # a message each way that is sent, and one that is received
        flight = in_flight(plan, rank)
        held, process, mapped = saved * flight, 0.0, 0.0
        if sharers:
            # An update in C++ makes two values of a tensor's size; the largest tensor is at most a layer's.
            largest_update = float(trained.max()) / (1 if plan.shard == "none" else shared)
            process = PROCESS_NBYTES + 2 * largest_update
            # Of each reduction and each gathering in place a rank reads the part of every other rank.
            gone = {"none": 2 * whole, "optimizer": whole + weights, "gradients": buffers + weights}
            mapped = gone.get(plan.shard, buffers) * (min(shared, sharers) - 1) / shared
        working, absent = float(own.back.max()) + 2 * output + arriving + added, 0.0
        if followed:
            # Lasting buckets are there from the beginning; what is added up, from the end of the first micro-batch on.
            # If all micro-batches are under way by then, one of them is gone.
            moments = [(held, True)]
            if flight >= plan.micro_batches * plan.accumulate and (not lasting or plan.shard == "parameters"):
                moments = [(held, False), (held - saved, True)] if flight > 1 else [(held, False)]
            update = _update_bytes(own, workload.update_values) / (1 if plan.shard == "none" else shared)
            working, absent = max(
                (_fullest(own, there, held, gradients, arriving, stay, update) for there, stay in moments),
                key=lambda pair: pair[0] - pair[1],
            )
            working += added
            if sharers:
                passing = np.cumsum(own.saved) - own.saved + own.peak  # of the last micro-batch
                working, absent = max(0.0, float(passing.max()) - saved) + arriving + added, 0.0
        return Memory(parameters, gradients, optimizer, held, working, buffers, process, mapped, absent)

    if rank is not None:
        return of(rank)
    return max((of(one) for one in range(pipeline)), key=lambda one: one.total)


def _update_bytes(own: _Columns, values: float | None) -> float:
    """Return what an update of some layers makes for a moment, where the rank updates all of them."""
    gradients = float(own.gradients.sum())
    if values is None:
        # Torch's Adam, whose two moments are of the gradients' type, updates all parameters of a device at a time, and
        # makes one more value for each.
        values = 1.0 if own.optimizer.sum() == 2 * gradients else 0.0
    return values * gradients + float(own.update.max())


def _fullest(
    own: _Columns,  # of the rank's layers
    held: float,  # activations of all micro-batches under way
    most: float,  # when most are
    gradients: float,  # of the parameters, that the rank holds when all are there
    arriving: float,  # of a layer, beside the memory in which they are added up
    stay: bool,  # gradients are there all the time, not only from their layer's backward pass on
    update: float,  # what it makes for a moment
) -> tuple[float, float]:
    """Return what is there for a moment at the fullest one, and what of activations and gradients is not.

    The moments are those of each layer's passes, and the update.
    """
    before = np.cumsum(own.saved) - own.saved
    activations = held - own.saved.sum() + before + own.saved  # when the layer's backward pass begins
    passing = np.maximum(0.0, own.peak - own.saved)
    gone = np.maximum(0.0, own.saved - own.peak)
    if stay:
        there, fixed = np.full(len(before), gradients), np.minimum(own.fixed, arriving)
    else:
        each = own.gradients * (gradients / total if (total := own.gradients.sum()) else 0.0)
        behind = each[::-1].cumsum()[::-1] - each
        there, fixed = behind + np.minimum(own.fixed, each), np.maximum(0.0, own.fixed - each)
    moments = activations - gone + there + passing + fixed
    fullest = int(moments.argmax())
    if gradients + update >= moments[fullest]:
        return update, most
    working = float(passing[fullest] + fixed[fullest])
    return working, most + gradients + working - float(moments[fullest])
