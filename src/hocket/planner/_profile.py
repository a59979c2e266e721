"""A workload on a device: what each layer takes for one micro-batch, by degrees. Equal layers are worked out once."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.workload import Layer, Workload

from ._constants import Constants
from ._findings import PlanError
from ._network import Network
from ._plan import Plan

__all__ = ["LayerTimes", "Profile"]

Floats = NDArray[np.float64]
# A backward pass does two products for each one of the forward pass, and reads and writes about twice as much.
_BACKWARD = 2.0


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Seconds per layer for one micro-batch on one rank, float64 each.

    Attributes:
        forward: Computation of the forward pass.
        backward: Computation of the backward pass, without what is computed again.
        again: What recomputation adds.
        tensor_forward: Exchanges that tensor parallelism adds to the forward pass.
        tensor_backward: The same of the backward pass, with what recomputation repeats.
    """

    forward: Floats
    backward: Floats
    again: Floats
    tensor_forward: Floats
    tensor_backward: Floats

    @property
    def total(self) -> Floats:
        """Both passes with everything."""
        return self.forward + self.backward + self.again + self.tensor_forward + self.tensor_backward

    def slowed(self, times: float) -> LayerTimes:
        """Computation takes so many times as long; exchanges do not."""
        return dataclasses.replace(
            self, forward=self.forward * times, backward=self.backward * times, again=self.again * times
        )


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
        kinds: dict[Layer, int] = {}
        index = [kinds.setdefault(dataclasses.replace(layer, name=""), len(kinds)) for layer in workload.layers]
        self.kinds, self.index = tuple(kinds), np.array(index, dtype=np.int64)
        self._per_kind = functools.lru_cache(maxsize=8192)(self._kind)
        self.gradient_bytes = self._column("gradient_bytes")
        self.parameter_bytes = self._column("parameter_bytes")
        self.optimizer_bytes = self._column("optimizer_bytes")
        self.output_bytes = self._column("output_bytes")
        self.tensors = self._column("tensors")

    def _column(self, name: str) -> Floats:
        return np.array([float(getattr(kind, name)) for kind in self.kinds])[self.index]

    def times(self, plan: Plan, micro_batch: float) -> LayerTimes:
        """Times of all layers.

        Args:
            plan: Its tensor degree, sequence_parallel and recomputation count here.
            micro_batch: Samples that pass at a time.
        """
        again = plan.recompute_part if plan.recompute else "none"
        key = (plan.tensor_parallel_degree, plan.sequence_parallel, again, micro_batch / self.workload.batch)
        rows = np.array([self._per_kind(number, *key) for number in range(len(self.kinds))])[self.index]
        return LayerTimes(*(np.ascontiguousarray(column) for column in rows.T))

    def divides(self, kind: Layer, tensor: int) -> bool:
        """Whether a layer is divided by this tensor degree, rather than done by all."""
        return tensor > 1 and kind.tensor_limit % tensor == 0 and kind.tensor_limit > 1

    def _kind(
        self, number: int, tensor: int, sequence: bool, again: str, scale: float
    ) -> tuple[float, float, float, float, float]:
        kind = self.kinds[number]
        divided = self.divides(kind, tensor)
        degree = tensor if divided else 1
        core = 0.0
        if kind.forward_s > 0:
            # A part of the measured time does not shrink with the batch; the operations' FLOPs say what is divided.
            flops = kind.flops or 1.0
            apart = sum(one.flops for one in kind.operations if one.part != "shared") / flops if kind.flops else 1.0
            share = (1 - apart) / (degree if sequence else 1) + apart / degree
            passed = scale * (1 - kind.fixed_share) + kind.fixed_share
            forward, backward = kind.forward_s * share * passed, kind.backward_s * share * passed
            core = forward * sum(one.flops for one in kind.operations if one.part == "core") / flops
        else:
            forward = 0.0
            for one in kind.operations:
                shares = degree if one.part != "shared" or sequence else 1
                seconds = self._roofline(one.flops * scale / shares, one.moved_bytes * scale / shares, one.calls)
                forward += seconds
                core += seconds if one.part == "core" else 0.0
            backward = _BACKWARD * forward
        repeated = {"none": 0.0, "layers": forward, "attention": core}[again]
        exchange = 0.0
        if divided and kind.reductions:
            # With sequence parallelism each all-reduce is a reduce-scatter and an all-gather, of the same bytes.
            nbytes = kind.reduced_bytes * scale
            exchange = (
                kind.reductions * self.network.collective("all_reduce", nbytes, tensor, 1, self.constants).seconds
            )
        return forward, backward, repeated, exchange, exchange * (2.0 if again == "layers" else 1.0)

    def _roofline(self, flops: float, moved_bytes: float, calls: int) -> float:
        """A kernel takes the longer of its arithmetic and its memory traffic, and its launch."""
        network, constants = self.network, self.constants
        arithmetic = flops / (network.flops * constants.matmul_share)
        traffic = moved_bytes / (network.memory_Bps * constants.memory_share) if network.memory_Bps else 0.0
        return max(arithmetic, traffic) + calls * constants.kernel_s
