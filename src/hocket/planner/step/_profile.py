"""A workload on a device: what each layer takes for one micro-batch, by degrees. Equal layers are worked out once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.workload import Operation, Share, Workload

from .._findings import PlanError
from ..axes import AXES, product, shard_group, sharing
from ..network import Constants, Link, Network, StageMessages, waiting
from ..plan import Plan, plan_homes

Floats = NDArray[np.float64]
# Of the optimizer's state every byte is read and written; gradients are zeroed, accumulated, checked and read.
_GRADIENT_PASSES = 4
# A backward pass does two products for each one of the forward pass, and reads and writes about twice as much.
_MOST_ACTIONS = 1280  # forwards of all pipelines, that are followed in some 100 ms
LEAST_PART_NBYTES = 1 << 14
"""Bytes of a tensor that ranks which share tensors send in parts; a smaller one is sent sooner than gathered."""
_BACKWARD = 2.0
_STATE = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
# Kernels by which a float8 product casts what it multiplies in each of its three passes: one in two stages for the
# largest value, one that writes. And of the bytes of an all-reduce, what is left where its all-gather is in float8.
_CASTS, _GATHERED_IN_FLOAT8 = 3, 0.75
# Of a measured layer, what is divided is weighed against what is not: so many FLOPs take about as long as a byte from
# memory. It is so for a CPU's core (some 80 GFLOP/s, 10 GB/s) and an A100 in single precision (19.5 TFLOP/s, 2 TB/s).
_FLOPS_PER_BYTE = 10.0


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Seconds per layer for one micro-batch on one rank, float64 each."""

    forward: Floats  # computation of the forward pass
    backward: Floats  # computation of the backward pass, without what is computed again
    again: Floats  # what recomputation adds
    tensor_forward: Floats  # exchanges that tensor parallelism adds to the forward pass
    tensor_backward: Floats  # the same of the backward pass, with what recomputation repeats
    # of the exchanges of the forward pass, what the wires take; the rest is waiting for ranks that compute beside
    wire_forward: Floats
    wire_backward: Floats  # the same of the backward pass
    spared: Floats  # what fusion and float8 are assumed to take away of computation
    recurrent: Floats  # of computation, what the steps of recurrent layers are counted to take
    narrowed: Floats  # bytes by which float8 makes the layer's parameters fewer where they are gathered
    host: Floats  # what the host is counted to take for both passes, beside the device

    @property
    def total(self) -> Floats:
        """Both passes with everything."""
        return self.forward + self.backward + self.again + self.tensor_forward + self.tensor_backward

    def slowed(self, times: float) -> LayerTimes:
        """Return times of which computation takes so many times as long; exchanges do not."""
        return dataclasses.replace(
            self, forward=self.forward * times, backward=self.backward * times, again=self.again * times,
            recurrent=self.recurrent * times,
        )  # fmt: skip

    def unhindered(self, times: float) -> LayerTimes:
        """Exchanges of ranks that wait for no processor, if they took what they do where computation takes `times`."""
        return dataclasses.replace(
            self,
            tensor_forward=self.wire_forward + (self.tensor_forward - self.wire_forward) / times,
            tensor_backward=self.wire_backward + (self.tensor_backward - self.wire_backward) / times,
        )


@dataclass(frozen=True, eq=False)
class Held:
    """Bytes of every layer on one rank, float64 each."""

    parameter_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats

    @functools.cached_property
    def trained_bytes(self) -> Floats:
        """Of the parameters those that an update changes: frozen ones have no gradient."""
        return np.minimum(self.parameter_bytes, self.gradient_bytes)


class Profile:
    """The layers of a workload on the devices of a network.

    Args:
        workload: With measured times, or with FLOPs and bytes for a device whose rates the network knows.
        network: Where.
        constants: What is reached.

    Raises:
        PlanError: nothing says how fast the layers are.
    """

    def __init__(self, workload: Workload, network: Network, constants: Constants) -> None:
        self.workload, self.network, self.constants = workload, network, constants
        if not workload.measured and not network.flops:
            raise PlanError(
                f"{workload.name} has no measured times and {network.name} does not say how fast its devices are; "
                "capture the workload on a device, or give the cluster's servers `flops`"
            )
        if workload.precision == "float8" and not network.float8_flops:
            raise PlanError(
                f"the devices of {network.name} compute no products in float8: V100 and A100 cannot, and H100, H200, "
                "B200 and MI300X can; take bfloat16, or give the cluster's servers `float8_flops`"
            )
        self.kinds, index = workload.kinds
        self.index = np.array(index, dtype=np.int64)
        self._held = functools.lru_cache(maxsize=64)(self._shares_held)
        self._ports = functools.lru_cache(maxsize=1024)(self._ports_of)
        self._per_kind = functools.lru_cache(maxsize=8192)(self._kind)
        self.output_bytes = self._column("output_bytes")
        self.tensors = self._column("tensors")
        self._trained_tensors = int((self.tensors - self._column("frozen_tensors")).sum())
        self._launch_s = float(self._column("launch_s").sum())
        self.blocks = np.array(workload.blocks, dtype=np.int64)
        self._trained_bytes = float(self._shares_held("tensor", 1).trained_bytes.sum())

    def _column(self, name: str) -> Floats:
        return np.array([float(getattr(kind, name)) for kind in self.kinds])[self.index]

    def of(self, plan: Plan) -> Profile:
        """Return the layers between which a plan cuts: the finer ones, if the workload has them.

        Not where the plan's own cuts name layers, where tensors are divided, which is known of whole layers, or where
        their input is all that is kept.
        """
        whole = plan.split or plan.recompute or sharing(plan)[1] > 1
        return self if whole or plan.pipeline_parallel_degree == 1 or not self.workload.finer else self._finer

    @functools.cached_property
    def _finer(self) -> Profile:
        return type(self)(self.workload.in_steps, self.network, self.constants)

    def by_block(self, values: Floats, layers: NDArray[np.int64]) -> Floats:
        """Return sums over what of each block stands together.

        Args:
            values: One of each of the layers.
            layers: Some, in the order of the forward pass.
        """
        blocks = self.blocks[layers]
        begins = np.concatenate(([0], np.flatnonzero(blocks[1:] != blocks[:-1]) + 1))
        return np.add.reduceat(values, begins)

    def times(self, plan: Plan, micro_batch: float) -> LayerTimes:
        """Return times of all layers.

        Args:
            plan: The axis whose ranks share layers, sequence_parallel and recomputation count here.
            micro_batch: Samples that pass at a time.
        """
        again = plan.recompute_part if plan.recompute else "none"
        in_step = sharing(plan)[1] * (plan.data_parallel_degree if plan.shard == "parameters" else 1)
        key = (*sharing(plan), plan.sequence_parallel, again, micro_batch / self.workload.batch, in_step)
        rows = np.array([self._per_kind(number, *key) for number in range(len(self.kinds))])[self.index]
        times = LayerTimes(*(np.ascontiguousarray(column) for column in rows.T))
        computed, host = float((times.forward + times.backward).sum()), self._launch_s
        if counted := float(times.host.sum()):
            parts = max(plan.accumulate, plan.micro_batches if plan.pipeline_parallel_degree > 1 else 1)
            update_s = self.update_s(plan, np.arange(len(self.index)))
            updated = self._trained_tensors * self.constants.update_host_s - update_s
            host = max(counted, counted + updated / parts)
        # A device works behind the host, and a step takes what the slower of both does.
        return times.slowed(host / computed) if 0 < computed < host else times

    def update_s(self, plan: Plan, layers: NDArray[np.int64]) -> float:
        """Return the time of the update, which reads and writes state and reads gradients; each rank does its part."""
        sharded = shard_group(plan)[0] if plan.shard != "none" else 1
        held, workload = self.held(plan), self.workload
        share = held.trained_bytes[layers] / sharded
        if workload.optimizer_s:
            return workload.optimizer_s * float(share.sum()) / max(1.0, self._trained_bytes)
        if not self.network.memory_Bps:
            return 0.0
        state = held.optimizer_bytes[layers] / sharded
        gradients = held.gradient_bytes[layers] / (sharded if plan.shard != "optimizer" else 1)
        if workload.update_passes:
            moved = workload.update_passes * float(held.gradient_bytes[layers].sum()) / sharded
        else:
            moved = float((2 * state + _GRADIENT_PASSES * gradients + share).sum())
        return moved / (self.network.memory_Bps * self.constants.memory_share)

    def links(self, plan: Plan) -> list[Link]:
        """Return what joins each rank of a pipeline with the next, all of whose replicas talk at once."""
        stride = product(plan, *AXES[1:])  # the pipeline is the slowest axis
        p = plan.pipeline_parallel_degree
        around = tuple((one, (one + 1) % p) for one in range(p))
        return self.network.links(stride, around, self.network.local, self.constants)

    def stage_links(self, plan: Plan) -> list[Link | None]:
        """Return what joins each stage with the next, all of whose replicas talk at once; None on one rank."""
        stride, pairs = product(plan, *AXES[1:]), _pairs(plan)
        apart = tuple(pair for pair in pairs if pair[0] != pair[1])
        links = dict(zip(apart, self.network.links(stride, apart, self.network.local, self.constants), strict=True))
        return [links.get(pair) for pair in pairs]

    def messages(self, plan: Plan) -> list[StageMessages | None]:
        """Return what messages from each stage to the next, and back, do to links; None if unknown, and on one rank.

        Pipelines are told apart where there are few enough to follow each.
        """
        stride, together = product(plan, *AXES[1:]), sharing(plan)[1]
        pairs = _pairs(plan)
        ways = tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))
        rounds = min(plan.micro_batches, 3 * plan.pipeline_parallel_degree)
        actions = stride // together * plan.pipeline_parallel_degree * plan.stages_per_rank * rounds
        apart = actions <= _MOST_ACTIONS and not self.network.at_once
        known = dict(zip(ways, self.network.messages(stride, ways, together, apart, self.constants), strict=False))
        return [known.get(pair) for pair in pairs]

    def ports(self, plan: Plan) -> list[int]:
        """Return through which port each stage sends to the next: 1 inside a host, 0 to another."""
        return list(self._ports(product(plan, *AXES[1:]), tuple(_pairs(plan))))

    def _ports_of(self, stride: int, pairs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        return tuple(int(not self.network.crosses(stride, *pair)) for pair in pairs)

    def message_parts(self, plan: Plan, nbytes: float) -> int:
        """Return in how many parts the ranks that share tensors send such a message to the next stage.

        One each where they are on one host and the next stage is not, unless it is small; else each sends all of it.
        """
        t = plan.tensor_parallel_degree
        apart = t > 1 and nbytes >= LEAST_PART_NBYTES and not self.network.local % t and 0 in self.ports(plan)
        return t if apart else 1

    def held(self, plan: Plan) -> Held:
        """Return what a rank holds of every layer, as its tensor degree divides them."""
        return self._held(*sharing(plan))

    def _shares_held(self, axis: str, degree: int) -> Held:
        shares = self.workload.shares_of_kinds(degree, axis=axis)
        columns = ([getattr(one, name) for one in shares] for name in _STATE)
        return Held(*(np.array(column, dtype=np.float64)[self.index] for column in columns))

    def _kind(
        self, number: int, axis: str, degree: int, sequence: bool, again: str, scale: float, in_step: int
    ) -> tuple[float, ...]:
        kind = self.kinds[number]
        share = self.workload.shares_of_kinds(degree, sequence=sequence, axis=axis)[number]
        core = spared = narrowed = recurrent = host = 0.0
        if share.forward_s > 0:
            passed = scale * (1 - share.fixed_share) + share.fixed_share
            forward, backward = share.forward_s * passed, share.backward_s * passed
        elif kind.forward_s > 0 or not self.network.flops:  # a layer that took no time is no matter of rates
            # A part of the measured time shrinks neither with the batch nor with what a rank does of it.
            whole = sum(map(_work, kind.operations))
            part = sum(map(_work, share.operations)) / whole if whole else 1 / share.degree
            passed = scale * part * (1 - kind.fixed_share) + kind.fixed_share
            forward, backward = kind.forward_s * passed, kind.backward_s * passed
            core = forward * sum(_work(one) for one in share.operations if one.again) / (whole * part or 1.0)
        else:
            forward = backward = 0.0
            for one in share.operations:
                seconds, less, narrower = self._kernel(one, scale)
                ahead = float(one.phase != "backward")
                behind = _BACKWARD * kind.backward_share if one.phase == "both" else 1.0 - ahead
                repeats = ahead * (again == "layers" or (again == "attention" and one.again))
                spared += (ahead + behind + repeats) * less
                recurrent += (ahead + behind + repeats) * seconds if one.kind == "recurrent" else 0.0
                narrowed += narrower
                forward += ahead * seconds
                backward += behind * seconds
                core += ahead * seconds if one.again else 0.0
                if one.phase != "both":
                    left = 1.0 if one.flops else 1.0 - self.constants.fused_share
                    # Where the host itself computes, no device waits: its calls cost what they cost without a GPU.
                    each = self.constants.launch_s if self.network.sharers else self.constants.host_s
                    operators = each * (one.calls - one.inner_calls)
                    host += left * (operators + self.constants.launch_s * one.inner_calls)
        if kind.forward_s > 0 and share.degree > 1 and axis == "tensor":  # of measured ones, whose weights are divided
            forward, backward, core = (one * self.constants.divided_times for one in (forward, backward, core))
        repeated = {"none": 0.0, "layers": forward, "attention": core}[again]
        # Of the reduce-scatter and the all-gather into which an all-reduce falls, the latter is of float8.
        part = _GATHERED_IN_FLOAT8 if sequence and narrowed else 1.0
        there, back = (self._exchanges(share, phase, degree, scale, in_step, part) for phase in ("forward", "backward"))
        if again == "layers":  # a forward pass that is done again exchanges again
            back = back[0] + there[0], back[1] + there[1]
        exchanged = there[0], back[0], there[1], back[1]
        return forward, backward, repeated, *exchanged, spared, recurrent, narrowed, host

    def _exchanges(
        self, share: Share, phase: str, degree: int, scale: float, in_step: int, part: float
    ) -> tuple[float, float]:
        """Return what exchanges of a pass take, and what of it wires take; the next function needs what they bring."""
        seconds = wire_s = 0.0
        for each in share.exchanges:
            if each.phase == phase:
                nbytes = part * each.nbytes * (scale if each.with_batch else 1.0)
                seconds += each.count * self._exchange(each.kind, nbytes, degree, in_step)
                wire_s += each.count * self._wire(each.kind, nbytes, degree)
        return seconds, wire_s

    def _exchange(self, kind: str, nbytes: float, tensor: int, in_step: int) -> float:
        sent = self._wire(kind, nbytes / self.constants.exchange_share, tensor)
        return sent + self.constants.exchange_s * waiting(in_step)

    def _wire(self, kind: str, nbytes: float, tensor: int) -> float:
        return self.network.collective(kind, nbytes, tensor, 1, self.constants).seconds

    def kernel_s(self, one: Operation) -> float:
        """Return seconds of an operation over the workload's batch, in one pass."""
        return self._kernel(one, 1.0)[0]

    def _kernel(self, one: Operation, scale: float) -> tuple[float, float, float]:
        """Return what an operation takes, and what fusion or float8 spares: seconds, and bytes of gathered weights.

        Of kernels that only read and write fusion takes away a part. A product in float8 reads half the bytes, and each
        of its three passes casts as torchao does with one scale a tensor: what is multiplied is read for its largest
        value and again to be written in two layouts, weights in each direction. A layer that this would slow down stays
        in bfloat16.
        """
        if one.number_format and not one.flops and self.network.peak(one.number_format)[1] != one.number_format:
            return 0.0, 0.0, 0.0  # for the sake of products that do not run in this format here
        fixed = one.fixed_bytes or one.weight_bytes
        moved = (one.moved_bytes - fixed) * scale + fixed
        plain = self._roofline((one.performed_flops or one.flops) * scale, moved, one.calls, one)
        if one.kind == "recurrent":  # a library's: no compiler takes anything of them
            return plain, 0.0, 0.0
        if not one.flops:
            spared = plain * self.constants.fused_share
            return plain - spared, spared, 0.0
        if self.workload.precision == "float8" and one.weight_bytes:
            passing, weights = (one.moved_bytes - one.weight_bytes) * scale, one.weight_bytes
            product = self._roofline(one.flops * scale, 0.75 * passing + 0.5 * weights, one.calls, one, "float8")
            narrow = product + self._roofline(0.0, passing + 4 / 3 * weights, _CASTS, one)
            if narrow < plain:
                return narrow, plain - narrow, weights / 2
        return plain, 0.0, 0.0

    def _roofline(self, flops: float, moved_bytes: float, calls: int, like: Operation, narrow: str = "") -> float:
        """Return what a kernel takes: the longer of its arithmetic and its memory traffic, and its launch."""
        network, constants = self.network, self.constants
        arithmetic = flops / self._rate(narrow or like.number_format) if flops else 0.0
        reached = {
            "strided": constants.strided_share,
            "batch norm": constants.batch_norm_share,
            "depthwise": constants.depthwise_share,
            "recurrent": constants.recurrent_share,
        }
        share = reached.get(like.kind, constants.memory_share)
        traffic = moved_bytes / (network.memory_Bps * share) if network.memory_Bps else 0.0
        return max(arithmetic, traffic) + calls * constants.kernel_s

    def _rate(self, number_format: str) -> float:
        """Return FLOP/s that products in a format reach; "" is that of the workload."""
        own = "bfloat16" if self.workload.precision == "float8" else self.workload.precision
        peak, runs = self.network.peak(number_format or own)
        return peak * self.constants.product_share(runs, self.network.float32_flops > 0)[0]


def _pairs(plan: Plan) -> list[tuple[int, int]]:
    """Return the ranks of the pipeline that hold each stage and the next."""
    return list(itertools.pairwise(plan_homes(plan)))


def in_precision(plan: Plan, workload: Workload) -> Workload:
    """Return the workload in the precision of a plan that says float8, and else in its own."""
    return workload.in_float8() if plan.precision == "float8" else workload


def _work(one: Operation) -> float:
    """As FLOPs: the longer of arithmetic and memory traffic."""
    return max(one.flops, _FLOPS_PER_BYTE * one.moved_bytes)
