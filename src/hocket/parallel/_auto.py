"""`plan="auto"`: the model and the network are measured by all ranks at once, and the planner's choice is taken."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket.planner import Constants, Network, Plan, PlanError, PlanFinding, search, with_reasons
from hocket.workload import Workload, capture

from ._trees import mapped, tensors_in
from ._world import World

_SIZES = (1 << 12, 1 << 22)
_ROUNDS = 8
# What is measured needs no shares of nominal rates; starting a collective is in the measured latency.
_MEASURED = Constants(
    matmul_share=1.0, memory_share=1.0, kernel_s=0.0, inside_share=1.0, network_share=1.0, collective_s=0.0
)


def auto_plan(model: torch.nn.Module, optimizer: Any, sample: Any, world: World) -> Plan:
    """The plan that is predicted to be the fastest of those that fit; a collective operation.

    Pipelines, which want a model that can be traced, are considered only where nothing else fits; tensor parallelism is
    not, as a captured layer does not say how it can be divided.

    Args:
        model: the user's, on the device that it trains on.
        optimizer: the user's.
        sample: inputs of a global batch.
        world: all ranks.

    Raises:
        PlanError: there is no sample, it is smaller than the world, or nothing fits.
    """
    if world.size == 1:
        return Plan()
    if sample is None:
        rule = '"auto" runs the model on a sample, to see how long it takes'
        raise PlanError("no plan was found:", [PlanFinding("sample", rule, "pass Trainer(..., sample=inputs)")])
    inputs = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    batch = next((len(one) for one in tensors_in(inputs) if one.dim()), 0)
    if batch < world.size:
        rule = f"the sample has {batch} of the global batch's samples, and there are {world.size} workers"
        raise PlanError("no plan was found:", [PlanFinding("sample", rule, "pass the inputs of a whole batch")])
    workload = _workload(model, optimizer, inputs, batch, world)
    network, constants = _network(model, world)
    found: tuple[dict[str, Any] | None, str] = (None, "")
    if world.rank == 0:
        found = _chosen(workload, network, constants, world.size, batch)
    document, refused = world.from_root(found)
    if document is None:
        raise PlanError(refused)
    return Plan.from_json(document)


def _chosen(
    workload: Workload, network: Network, constants: Constants, workers: int, batch: int
) -> tuple[dict[str, Any] | None, str]:
    """The plan as JSON, or why there is none."""
    fixed: dict[str, Any] = {"pipeline_parallel_degree": 1}
    while True:
        try:
            best = search(workload, network, workers=workers, batch=batch, constants=constants, fixed=fixed)
        except PlanError as error:
            if not fixed:
                return None, str(error)
            fixed = {}
            continue
        return with_reasons(best).to_json(), ""


def _workload(model: torch.nn.Module, optimizer: Any, inputs: tuple[Any, ...], batch: int, world: World) -> Workload:
    """What each rank's part of a batch asks for, while all ranks compute; times are the means over ranks."""
    each = batch // world.size
    part = mapped(inputs, lambda one: one[:each] if one.dim() else one)
    found = capture(model, part, optimizer=_kind(optimizer))
    times = world.from_all((found.forward_s, found.backward_s, found.optimizer_s))
    mean = [statistics.mean(column) for column in zip(*times, strict=True)]
    scale = [whole / own if own else 1.0 for whole, own in zip(mean, times[world.rank], strict=True)]
    layers = tuple(
        dataclasses.replace(one, forward_s=one.forward_s * scale[0], backward_s=one.backward_s * scale[1])
        for one in found.layers
    )
    return dataclasses.replace(found, layers=layers, optimizer_s=mean[2])


def _kind(optimizer: Any) -> str:
    name = type(optimizer).__name__.lower()
    if "adam" in name or "lamb" in name:
        return "adam"
    return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"


def _network(model: torch.nn.Module, world: World) -> tuple[Network, Constants]:
    """Latency and bandwidth of the ranks' network as a ring of equals, by all-reduces of two sizes."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    n = world.size
    small, large = (
        _timed(lambda data: dist.all_reduce(data, group=world.group), nbytes, device, world) for nbytes in _SIZES
    )
    slope = max(1e-13, (large - small) / (_SIZES[1] - _SIZES[0]))
    rate = 2 * (n - 1) / n / slope
    latency = max(1e-7, (small - _SIZES[0] * slope) / (2 * (n - 1)))

    def gather(data: torch.Tensor) -> None:
        part = data[: len(data) // n].clone()
        dist.all_gather_into_tensor(data[: len(part) * n], part, group=world.group)

    gathered = _timed(gather, _SIZES[1], device, world)
    share = min(1.0, ((n - 1) * latency + (n - 1) / n * _SIZES[1] / rate) / gathered)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", n))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here
    network = Network("these ranks", n, 1, rate, latency, rate, rate, latency, 0.0, 0.0, memory, 0.0)
    return world.from_root((network, dataclasses.replace(_MEASURED, gather_share=max(0.01, share))))


def _timed(work: Callable[[torch.Tensor], Any], nbytes: int, device: torch.device, world: World) -> float:
    """The median of some rounds on this rank; ranks begin each together."""
    data, each = torch.zeros(nbytes // 4, device=device), []
    for _ in range(_ROUNDS):
        dist.barrier(group=world.group)
        begin = time.perf_counter()
        work(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        each.append(time.perf_counter() - begin)
    return statistics.median(each[2:])
