"""Measures what the planner's formulas need: the model on these devices, the ranks' network, and what Python costs.

All ranks measure together, as they will train together.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hocket.planner import Constants, Network, Plan
from hocket.workload import Workload, capture

from ._trees import mapped, tensors_in
from ._world import World, join

_SIZES = (1 << 12, 1 << 20, 1 << 22)
_ROUNDS = 8
_LONG_S = 0.5  # of a collective: larger ones are not measured then
_WIDTHS = (8, 256)  # of small models by which overhead is seen: 8 x 8 and 256 x 256 weights a layer
_BLOCKS = 6
_ROWS = 16  # of a rank's part of a batch
_MANY_ROWS = 512  # so that layers of 256 x 256 compute for some ms
_SEVERAL = 4  # layers in a block whose many tensors count
_STEPS = 12
_OVERHEADS_S = 10.0  # of all steps by which overhead is seen
# What is measured needs no shares of nominal rates; starting a collective is in the measured latency.
_MEASURED = Constants(
    matmul_share=1.0, memory_share=1.0, kernel_s=0.0, inside_share=1.0, network_share=1.0, collective_s=0.0
)


@dataclass(frozen=True)
class Calibration:
    """What was measured, the same on every rank.

    Attributes:
        workload: the model, with the times that a rank takes when it computes alone.
        network: the ranks' network as a ring of equals, and how many of them compute at full speed at once.
        constants: what collectives of shards reach, and the overhead of steps, stages and blocks.
    """

    workload: Workload
    network: Network
    constants: Constants


def calibrate(
    model: torch.nn.Module, optimizer: Any, inputs: tuple[Any, ...], world: World | None = None
) -> Calibration:
    """Measure a model and the ranks that are to train it; a collective operation.

    The model is run on each rank's part of a batch; its parameters and gradients stay as they are.

    Args:
        model: the user's, on the device that it trains on.
        optimizer: the user's.
        inputs: positional inputs of a global batch, one sample a rank at the least.
        world: the ranks; all if not given.
    """
    world = world or join()
    workload, at_once = _workload(model, optimizer, inputs, world)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    network, share = _network(device, world)
    network = dataclasses.replace(network, at_once=at_once)
    constants = dataclasses.replace(_MEASURED, gather_share=share)
    if world.size > 1:
        constants = _overheads(constants, network, device, world)
    return world.from_root(Calibration(workload, network, constants))


def _workload(model: torch.nn.Module, optimizer: Any, inputs: tuple[Any, ...], world: World) -> tuple[Workload, float]:
    """What each rank's part of a batch asks for, and how many ranks can compute at once as fast as one alone."""
    batch = next(len(one) for one in tensors_in(inputs) if one.dim())
    each = max(1, batch // world.size)
    part = mapped(inputs, lambda one: one[:each] if one.dim() else one)
    kind, degrees = _kind(optimizer), _degrees(world.size)
    if world.size == 1:
        return capture(model, part, optimizer=kind, degrees=()), 0.0
    dist.barrier(group=world.group)
    crowded = capture(model, part, optimizer=kind, degrees=())
    together = world.from_all(crowded.forward_s + crowded.backward_s)
    alone = world.from_root(capture(model, part, optimizer=kind, degrees=degrees) if world.rank == 0 else None)
    assert alone is not None
    slower = statistics.mean(together) / (alone.forward_s + alone.backward_s)
    return alone, world.size / max(1.0, slower)


def _degrees(ranks: int) -> list[int]:
    """Numbers of ranks that could divide tensors."""
    return [degree for degree in range(2, ranks + 1) if ranks % degree == 0]


def _kind(optimizer: Any) -> str:
    name = type(optimizer).__name__.lower()
    if "adam" in name or "lamb" in name:
        return "adam"
    return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"


def _network(device: torch.device, world: World) -> tuple[Network, float]:
    """Latency and bandwidth by all-reduces of two sizes, T = 2 (n - 1) alpha + 2 (n - 1)/n S beta, as of a ring.

    And what an all-gather reaches of that.
    """
    n = world.size
    if n == 1:
        return Network("one rank", 1, 1, 1e18, 0.0, 1e18, 1e18, 0.0, 0.0, 0.0, _memory(device, 1), 0.0), 1.0
    found = {_SIZES[0]: _timed(lambda data: dist.all_reduce(data, group=world.group), _SIZES[0], device, world)}
    for nbytes in _SIZES[1:]:
        found[nbytes] = _timed(lambda data: dist.all_reduce(data, group=world.group), nbytes, device, world)
        if found[nbytes] * nbytes > _LONG_S * _SIZES[1]:
            break
    small, large = _SIZES[0], max(found)
    slope = max(1e-13, (found[large] - found[small]) / (large - small))
    rate = 2 * (n - 1) / n / slope
    latency = max(1e-7, (found[small] - small * slope) / (2 * (n - 1)))

    def gather(data: torch.Tensor) -> None:
        part = data[: len(data) // n].clone()
        dist.all_gather_into_tensor(data[: len(part) * n], part, group=world.group)

    share = ((n - 1) * latency + (n - 1) / n * large / rate) / _timed(gather, large, device, world)
    made = Network("these ranks", n, 1, rate, latency, rate, rate, latency, 0.0, 0.0, _memory(device, n), 0.0)
    return made, max(0.01, min(1.0, share))


def _memory(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here


def _timed(work: Callable[[torch.Tensor], Any], nbytes: int, device: torch.device, world: World) -> float:
    """Of some rounds, the mean over ranks; ranks begin each together."""
    data, each = torch.zeros(nbytes // 4, device=device), []
    for _ in range(_ROUNDS):
        dist.barrier(group=world.group)
        begin = time.perf_counter()
        work(data)
        _settled(device)
        each.append(time.perf_counter() - begin)
        if world.from_root(sum(each)) > _LONG_S:
            break
    return statistics.mean(world.from_all(_usual(each)))


def _usual(each: list[float]) -> float:
    """The lower quartile, without the first two: whatever disturbs a measurement makes it longer."""
    rest = sorted(each[min(2, len(each) - 1) :])
    return rest[len(rest) // 4]


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Chain(torch.nn.Module):
    """A block of some small layers; without a list, whose elements would be blocks themselves."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(str(number), torch.nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _overheads(constants: Constants, network: Network, device: torch.device, world: World) -> Constants:
    """What steps, stages and shards cost besides computation, by models that hardly compute.

    Of a pipeline the difference of many micro-batches and few, of what is sharded that of sharded and not. Times of
    ranks that shared processors meanwhile are brought down to those of one alone.
    """
    crowd = network.crowding(world.size)
    thin, wide = _WIDTHS
    chains = ((1, thin), (_SEVERAL, thin), (1, wide))
    cases = [(Plan(shard=shard), *chain) for shard in ("none", "parameters") for chain in chains]
    cases += [(Plan(shard=shard), 1, thin) for shard in ("optimizer", "gradients")]
    stages = next((p for p in (2, 3) if world.size % p == 0), min(world.size, _BLOCKS))
    if world.size % stages == 0:
        cases += [(Plan(pipeline_parallel_degree=stages, micro_batches=m), 1, thin) for m in (4, 16)]
    seconds = _steps(cases, device, world)
    plain, blocks = seconds[:3], seconds[3:6]
    optimizer, gradients = (max(0.0, one - plain[0]) for one in seconds[6:8])
    one, several, large = (max(0.0, a - b) / _BLOCKS for a, b in zip(blocks, plain, strict=True))
    few, many = seconds[8:] or (0.0, 0.0)
    tensor_s = max(0.0, several - one) / (2 * _SEVERAL - 2)
    nbytes = 4.0 * wide * wide
    wire = 2 * network.collective("all_gather", nbytes, world.size, 1, constants).seconds
    wire += network.collective("reduce_scatter", nbytes, world.size, 1, constants).seconds
    stages = next((p for p in (2, 3) if world.size % p == 0), min(world.size, _BLOCKS))
    stage_s = 0.0
    if world.size % stages == 0:
        few, many = (
            _step(Plan(pipeline_parallel_degree=stages, micro_batches=m), 1, thin, device, world) for m in (4, 16)
        )
        stage_s = max(0.0, many - few) / 12 / crowd
    exchange_s, divided_share = _division(plain, constants, network, device, world)
    return dataclasses.replace(
        constants,
        fetch_share=min(1.0, max(0.02, wire / max(1e-9, large - one))),
        prefetch=device.type == "cuda",
        step_s=plain[0],
        stage_s=max(0.0, many - few) / 12 / crowd,
        optimizer_shard_s=optimizer,
        gradient_shard_s=gradients,
        block_s=max(0.0, one - 2 * tensor_s) / crowd,
        tensor_s=tensor_s / crowd,
        exchange_s=exchange_s,
        divided_share=divided_share,
    )


def _division(
    plain: float, constants: Constants, network: Network, device: torch.device, world: World
) -> tuple[float, float]:
    """What an exchange of ranks that share tensors costs besides its collective, and how fast they compute between.

    By chains of layers that are cut in pairs: one that hardly computes, and one that computes much, against the same
    with the batch divided.
    """
    degree = _degrees(world.size)[0]
    thin, wide = (width if width % degree == 0 else width * degree for width in _WIDTHS)

    def besides(width: int, rows: int) -> tuple[float, int]:
        """A step of the divided chain without its collectives, and how many there are."""
        with torch.device("meta"):  # where no random numbers are drawn
            chain = torch.nn.Sequential(*(_Chain(1, width) for _ in range(_BLOCKS)))
            meta = capture(chain, torch.zeros(rows * degree, width), degrees=[degree])
        made = [one for layer in meta.layers for one in layer.share(degree).exchanges]
        wire = sum(one.count * network.collective(one.kind, one.nbytes, degree, 1, constants).seconds for one in made)
        step = _step(Plan(tensor_parallel_degree=degree), 1, width, device, world, rows)
        return step - wire, sum(one.count for one in made)

    step, count = besides(thin, _ROWS)
    exchange_s = max(0.0, step - plain) / count
    whole = _step(Plan(), 1, wide, device, world, _MANY_ROWS) - plain
    step, count = besides(wide, _MANY_ROWS)
    return exchange_s, min(1.0, max(0.1, whole / max(1e-9, step - plain - count * exchange_s)))


def _step(plan: Plan, layers: int, width: int, device: torch.device, world: World, rows: int = _ROWS) -> float:
    """Seconds of a step of a chain of blocks of small layers, on the slowest rank."""
    from ._trainer import Trainer  # which makes automatic plans by what is measured here

    with torch.random.fork_rng():
        model = torch.nn.Sequential(*(_Chain(layers, width) for _ in range(_BLOCKS))).to(device)
        batch = torch.zeros(rows * world.size, width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = Trainer(model, torch.nn.functional.mse_loss, optimizer, plan, sample=batch[:2])
    each = []
    for _ in range(_STEPS):
        for step, own in zip(steps, each, strict=True):
            dist.barrier(group=world.group)
            begin = time.perf_counter()
            step()
            _settled(device)
            own.append(time.perf_counter() - begin)
        if world.from_root(sum(map(sum, each))) > _OVERHEADS_S:
            break
    return [max(column) for column in zip(*world.from_all([_usual(own) for own in each]), strict=True)]
