"""The shared-memory transport: all ranks of the group on one host."""

from functools import partial

import torch

from ..transport import Flats, ReduceOperator
from . import _all_reduce, _exchange
from ._channel import Channel
from ._memory import MemoryHandle, shared_memory


def _place(flat: torch.Tensor) -> MemoryHandle | None:
    return shared_memory.find(flat.data_ptr(), flat.numel() * flat.element_size())


def _common_place(flats: Flats) -> MemoryHandle | None:
    """Return where `flats` lie if they are the consecutive parts of one registered buffer."""
    step = flats[0].numel() * flats[0].element_size()
    first = flats[0].data_ptr()
    if any(flat.data_ptr() != first + r * step for r, flat in enumerate(flats)):
        return None
    return shared_memory.find(first, step * len(flats))


class SharedMemoryTransport:
    """Collectives through the slots of a Channel, or straight between registered buffers."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._plans = _all_reduce.DirectPlans()
        self.reduce = partial(_all_reduce.reduce, channel)
        self.all_to_all = partial(_exchange.all_to_all, channel)
        self.gather = partial(_exchange.gather, channel)
        self.scatter = partial(_exchange.scatter, channel)
        self.barrier = partial(_exchange.barrier, channel)

    def _place_if_long(self, flat: torch.Tensor) -> MemoryHandle | None:
        return _place(flat) if flat.numel() * flat.element_size() >= self.channel.sizes.direct else None

    def all_reduce(self, flat: torch.Tensor, op: ReduceOperator, timeout_s: float) -> str:
        return _all_reduce.all_reduce(self.channel, self._plans, flat, op, self._place_if_long(flat), timeout_s)

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        return _exchange.broadcast(self.channel, flat, root, self._place_if_long(flat), timeout_s)

    def all_gather(self, outputs: Flats, flat: torch.Tensor, timeout_s: float) -> str:
        return _exchange.all_gather(self.channel, outputs, flat, _place(flat), timeout_s)

    def reduce_scatter(self, output: torch.Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        return _exchange.reduce_scatter(self.channel, output, inputs, op, _common_place(inputs), timeout_s)
