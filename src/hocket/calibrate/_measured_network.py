"""The ranks' network, measured by collectives: inside hosts, between them, and what gathers reach of that."""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hocket._limits import memory
from hocket.comm import host_identity, torch_adapter
from hocket.parallel.mesh import Mesh, World
from hocket.planner import Constants, Network

from ._overheads import timed, usual

_SIZES = (1 << 12, 1 << 20, 1 << 22)
_ROUNDS = 8
_LONG_S = 0.5  # of a collective: larger ones are not measured then

# What is measured needs no shares of nominal rates; starting a collective is in the measured latency.
MEASURED = Constants(
    matmul_share=1.0,
    memory_share=1.0,
    kernel_s=0.0,
    inside_share=1.0,
    network_share=1.0,
    collective_s=0.0,
    basis="measured",
)


def measured_network(device: torch.device, world: World) -> tuple[Network, float]:
    """Return the ranks' network, and what all-gathers reach of its rates; a collective operation.

    Where each of several hosts has as many neighbouring ranks, the wires inside hosts and between them are measured
    apart: by all-reduces inside all hosts at once, and of one rank of each host, all such groups at once and one alone.
    Else the ranks are taken for a ring of equals.
    """
    n = world.size
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", n)) if device.type == "cpu" else 0
    if n == 1:
        alone = ("one rank", 1, 1, 1e18, 0.0, 1e18, 1e18, 0.0, 0.0, 0.0, _memory(device, world), 0.0)
        return Network(*alone, sharers=sharers), 1.0
    local = _ranks_of_a_host(world)
    if local == 1:
        rate, latency, large = _all_reduced(world, device, world)
        wires = (1, rate, latency, rate, rate, latency)
    else:
        mesh = Mesh.make(world, shard=local)
        inside, inside_s, _ = _all_reduced(mesh.shards, device, world)
        each, between_s, large = _all_reduced(mesh.copies, device, world)
        alone_Bps, _, _ = _all_reduced(mesh.copies, device, world, waits=world.rank % local > 0)
        wires = (local, inside, inside_s, local * each, max(each, alone_Bps), between_s)
    network = Network("these ranks", n, *wires, 0.0, 0.0, _memory(device, world), 0.0, sharers=sharers)

    def gather(data: torch.Tensor) -> None:
        part = data[: len(data) // n].clone()
        torch_adapter.all_gather_single(data[: len(part) * n], part, group=world.group)

    told_s = network.collective("all_gather", large, n, 1, MEASURED).seconds
    return network, max(0.01, min(1.0, told_s / _timed(gather, large, device, world)))


def _ranks_of_a_host(world: World) -> int:
    """Return how many neighbouring ranks each of several hosts has; 1 where there is one host, or they differ."""
    hosts = world.from_all(host_identity())
    local = hosts.count(hosts[0])
    blocks = [set(hosts[first : first + local]) for first in range(0, world.size, local)]
    apart = len(blocks) > 1 and all(len(block) == 1 for block in blocks)
    return local if apart and len(set().union(*blocks)) == len(blocks) and world.size % local == 0 else 1


def _all_reduced(group: World, device: torch.device, world: World, *, waits: bool = False) -> tuple[float, float, int]:
    """Return bytes per second and latency of this rank's group, as of a ring, and the bytes that say so.

    All-reduces of two sizes tell them, T = 2 (n - 1) alpha + 2 (n - 1)/n S beta. All groups of the world are measured
    at once, but for those whose ranks wait meanwhile.
    """

    def seconds(nbytes: int) -> float:
        return _timed(lambda data: dist.all_reduce(data, group=group.group), nbytes, device, world, waits=waits)

    n, found = group.size, {_SIZES[0]: seconds(_SIZES[0])}
    for nbytes in _SIZES[1:]:
        found[nbytes] = seconds(nbytes)
        if found[nbytes] * nbytes > _LONG_S * _SIZES[1]:
            break
    small, large = _SIZES[0], max(found)
    slope = max(1e-13, (found[large] - found[small]) / (large - small))
    return 2 * (n - 1) / n / slope, max(1e-7, (found[small] - small * slope) / (2 * (n - 1))), large


def _memory(device: torch.device, world: World) -> int:
    """Return a rank's part of its GPU's memory, or of its host's: ranks may share either. A collective operation."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        gpus = world.from_all(str(about.uuid))
        return int(about.total_memory) // gpus.count(gpus[world.rank])
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return memory()[0] // here


def _timed(
    work: Callable[[torch.Tensor], Any], nbytes: int, device: torch.device, world: World, *, waits: bool = False
) -> float:
    """Of some rounds, the mean over the ranks that do not wait; rank 0 does not."""
    data, each = torch.zeros(nbytes // 4, device=device), []
    for _ in range(_ROUNDS):
        each.append(timed((lambda: None) if waits else partial(work, data), device, world))
        if world.from_root(sum(each)) > _LONG_S:
            break
    return statistics.mean(one for one in world.from_all(None if waits else usual(each)) if one is not None)
