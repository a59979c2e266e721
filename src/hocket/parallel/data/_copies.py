"""The average of gradients over ranks that hold the same shards, behind the reduce-scatters of each block (HSDP)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm

from ..mesh import World

_AVERAGED_AT_ONCE = (torch.float32, torch.bfloat16)
"""Types of which FSDP2's reduce-scatter brings averages; sums of others it divides afterwards, in place."""


class AverageOfCopies:
    """Averages gradients of one block, called by torch's FSDP2 with what each of its reduce-scatters has brought.

    Averaged is the sum of all passes, in the last one while blocks before this one are still computed. What no last
    pass has brought, as where nobody knows which it is, or the block was not used in it, `begin` has averaged. FSDP2
    does the same on a mesh of two dims; there all-reduces are waited for where devices have no streams, and that of a
    block that the last pass does not use is left out.

    Args:
        parameters: Sharded parameters of the block, as FSDP2 holds them.
        copies: The ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], copies: World) -> None:
        self.last = True  # whether the pass that goes on is the last of a step
        self._parameters = list(parameters)
        self._copies = copies
        self._sum: torch.Tensor | None = None  # of passes that are not averaged; the parameters' gradients are in it
        self._under_way: tuple[Any, torch.Tensor] | None = None

    def __call__(self, reduced: torch.Tensor) -> None:
        """Begin to average, if the pass is the last; `reduced` becomes the memory of the gradients thereafter."""
        earlier = self._sum if any(parameter.grad is not None for parameter in self._parameters) else None
        if reduced.dtype not in _AVERAGED_AT_ONCE:
            if earlier is None:
                self._sum = reduced  # FSDP2 divides it when this returns, and adds later passes to it
            return
        if earlier is not None:
            reduced += earlier
            for parameter in self._parameters:
                parameter.grad = None  # or FSDP2 would add it
        self._sum = reduced
        if self.last:
            self.begin()

    def begin(self) -> None:
        """Begin to average what has not been."""
        if self._sum is None:
            return
        with comm.label("gradients of copies"):
            work = dist.all_reduce(self._sum, group=self._copies.group, async_op=True)
        self._under_way, self._sum = (work, self._sum), None

    def finish(self) -> None:
        """Wait for it."""
        if self._under_way is not None:
            work, total = self._under_way
            work.wait()
            total /= self._copies.size
        self._under_way = None

    def forget(self) -> None:
        """Drop what passes have left."""
        self._sum = self._under_way = None
