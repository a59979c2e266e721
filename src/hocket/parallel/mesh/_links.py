"""What the links between the ranks of a pipeline carry."""

import time
import weakref
from typing import Any, Final

import torch
import torch.distributed as dist

from hocket.planner import Link

from .world import World

_SIZES: Final = (1 << 12, 1 << 18)
_ROUNDS: Final = 4
_LONG_S: Final = 0.2  # of a message: there are fewer rounds of these
# What was found, by the group of all ranks: the ranks of its pipelines, and the kind of device.
_known: "weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Link]]" = weakref.WeakKeyDictionary()


def link_of(ranks: World, whole: World, device: torch.device) -> Link:
    """Time messages there and back between each rank and the next, and the last and the first.

    Neighbouring links take turns, so that half of the ranks are waiting, as in a pipeline: where ranks share
    processors, messages of all at once would wait for these. A collective operation over `whole`; the result, of the
    slowest link, is the same on all of its ranks. It is measured once for each way to form pipelines of these ranks.
    `ranks` are this pipeline's, two or more, and `whole` those of all pipelines, which send at the same time, as they
    will.
    """
    pipelines = whole.from_all([dist.get_global_rank(ranks.group, rank) for rank in range(ranks.size)])
    known, key = _known.setdefault(whole.group, {}), (device.type, *map(tuple, pipelines))
    if key not in known:
        known[key] = _measured(ranks, whole, device)
    return known[key]


def _measured(ranks: World, whole: World, device: torch.device) -> Link:
    found: list[float] = []
    for nbytes in _SIZES:
        data = torch.zeros(nbytes // 4, device=device)
        least = 0.0  # of a rank that begins nothing
        for number in range(_ROUNDS):
            for turn in range(min(ranks.size, 2 + ranks.size % 2)):
                dist.barrier(group=whole.group)
                took = _one_way_s(data, ranks, turn)
                if took:
                    least = min(least, took) if number else took
            if max(whole.from_all(least)) > _LONG_S:
                break
        found.append(max(whole.from_all(least)))
    small, large = found
    slope = max(1e-13, (large - small) / (_SIZES[1] - _SIZES[0]))
    return Link(1 / slope, max(1e-7, small - _SIZES[0] * slope))


def _one_way_s(data: torch.Tensor, ranks: World, turn: int) -> float:
    """Half of the seconds of a message to the next rank and back, on the rank whose turn it is; 0 on others."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    if _begins(ranks.rank, ranks.size) == turn:
        begin = time.perf_counter()
        _pass(dist.isend, data, ranks, after)
        _pass(dist.irecv, data, ranks, after)
        return (time.perf_counter() - begin) / 2
    if _begins(before, ranks.size) == turn:
        _pass(dist.irecv, data, ranks, before)
        _pass(dist.isend, data, ranks, before)
    return 0.0


def _begins(rank: int, size: int) -> int:
    """Return the turn in which a rank sends to the next: no two neighbours have the same one."""
    return 2 if size % 2 and rank == size - 1 else rank % 2


def _pass(way: Any, data: torch.Tensor, ranks: World, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(way, data, group=ranks.group, group_peer=peer)]):
        work.wait()
    if data.device.type == "cuda":
        torch.cuda.synchronize(data.device)
