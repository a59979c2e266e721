"""What the links between the ranks of a pipeline carry."""

from __future__ import annotations

import time
from typing import Final

import torch
import torch.distributed as dist

from hocket.planner import Link

from ._world import World

_SIZES: Final = (1 << 12, 1 << 18)
_ROUNDS: Final = 4
_LONG_S: Final = 0.2  # of a message: there are fewer rounds of these


def link_of(ranks: World, whole: World, device: torch.device) -> Link:
    """Times messages from every rank to the next and back from the last to the first, all at once.

    A collective operation over `whole`; the result is the same on all of its ranks.

    Args:
        ranks: of this rank's pipeline, two or more.
        whole: of all pipelines, which send at the same time, as they will.
        device: where what is sent lies.
    """
    found: list[float] = []
    for nbytes in _SIZES:
        data = torch.zeros(2, nbytes // 4, device=device)
        least = float("inf")
        for _ in range(_ROUNDS):
            dist.barrier(group=whole.group)
            least = min(least, _round_s(data, ranks))
            if whole.from_root(least) > _LONG_S:
                break
        found.append(max(whole.from_all(least)))
    small, large = found
    slope = max(1e-13, (large - small) / (_SIZES[1] - _SIZES[0]))
    return Link(1 / slope, max(1e-7, small - _SIZES[0] * slope))


def _round_s(data: torch.Tensor, ranks: World) -> float:
    """Seconds until this rank has what the rank before sent it, and its own message is gone."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    begin = time.perf_counter()
    messages = [
        dist.P2POp(dist.isend, data[0], group=ranks.group, group_peer=after),
        dist.P2POp(dist.irecv, data[1], group=ranks.group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    if data.device.type == "cuda":
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - begin
