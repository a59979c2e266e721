"""The shared-memory transport: all ranks of the group on one host."""

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

    def _place_if_long(self, flat: torch.Tensor) -> MemoryHandle | None:
        return _place(flat) if flat.numel() * flat.element_size() >= self.channel.sizes.direct else None

    def all_reduce(self, flat: torch.Tensor, op: ReduceOperator, timeout_s: float) -> str:
        return _all_reduce.all_reduce(self.channel, self._plans, flat, op, self._place_if_long(flat), timeout_s)

    def reduce(self, flat: torch.Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        return _all_reduce.reduce(self.channel, flat, op, root, timeout_s)

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        return _exchange.broadcast(self.channel, flat, root, self._place_if_long(flat), timeout_s)

    def all_gather(self, outputs: Flats, flat: torch.Tensor, timeout_s: float) -> str:
        return _exchange.all_gather(self.channel, outputs, flat, _place(flat), timeout_s)

    def reduce_scatter(self, output: torch.Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        return _exchange.reduce_scatter(self.channel, output, inputs, op, _common_place(inputs), timeout_s)

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        return _exchange.all_to_all(self.channel, outputs, inputs, timeout_s)

    def gather(self, outputs: Flats | None, flat: torch.Tensor, root: int, timeout_s: float) -> str:
        return _exchange.gather(self.channel, outputs, flat, root, timeout_s)

    def scatter(self, flat: torch.Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        return _exchange.scatter(self.channel, flat, inputs, root, timeout_s)

    def barrier(self, timeout_s: float) -> str:
        return _exchange.barrier(self.channel, timeout_s)
