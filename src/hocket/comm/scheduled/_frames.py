"""What all ranks tell each other before every operation between hosts: one small frame of each, in a fixed pattern.

The pattern does not depend on the operation, and a receive has space for the longest frame. So ranks that call
different operations still exchange their frames, see that they differ, and stay in step.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from hocket.schedule import KINDS

from ..shm import DTYPE_NUMBERS, describe
from ..transport import Transport
from ._execute import PointToPoint

_CONTRACT: Final = struct.Struct("<IHHHHIQ")  # seq, kind, operator, dtype, root, form, numel: as shm's announcements
_HEAD_NBYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_LENGTH_AT: Final = _CONTRACT.size
_MOST_NBYTES: Final = 2048
_MOST_TOGETHER: Final = 2**15
_ALIGNMENT: Final = 16  # of what travels in frames, so that it can be seen as any element type
_KIND_NUMBERS: Final = {kind: i for i, kind in enumerate(KINDS)}


class Frame(NamedTuple):
    """What one rank has said."""

    contract: bytes  # what must be equal on all ranks
    payload: Tensor  # bytes


class FrameExchange(Protocol):
    """Brings everyone's frame to everyone."""

    most_nbytes: int
    """Bytes of payload that fit in a frame."""

    def exchange(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> list[Frame]:
        """Return everyone's frames, by rank; `payload` is bytes. Blocks until all have come."""


def contract_of(seq: int, kind: str, operator: int, dtype: torch.dtype, root: int, numel: int, *, fused: bool) -> bytes:
    """Return what all ranks must agree in. `fused`: the operation is done with the frames alone."""
    return _CONTRACT.pack(
        seq & 0xFFFFFFFF, _KIND_NUMBERS[kind], operator, DTYPE_NUMBERS[dtype], root, int(fused), numel
    )


def differences(frames: Sequence[Frame], names: Sequence[int]) -> str:
    """Return which ranks, by their `names`, announced what."""
    return describe([memoryview(frame.contract) for frame in frames], names)


def frame_capacity(world: int) -> int:
    """Return the bytes of payload in a frame where so many ranks exchange them."""
    return max(0, min(_MOST_NBYTES, _MOST_TOGETHER // world)) // _ALIGNMENT * _ALIGNMENT


class FlatFrames:
    """By dissemination (Bruck): in round k a rank sends 2**k frames to the rank 2**k before it.

    Args:
        points: Messages to the other ranks.
        rank: Number of this rank.
        size: Number of ranks.
        most_nbytes: Bytes of payload that fit in a frame.
        each: Frames that every rank brings.
    """

    def __init__(self, points: PointToPoint, rank: int, size: int, most_nbytes: int, each: int = 1) -> None:
        self.most_nbytes = most_nbytes
        self._point_to_point = points
        self._rank = rank
        self._size = size
        longest = _HEAD_NBYTES + most_nbytes
        self._frame = torch.zeros(longest, dtype=torch.uint8)
        # Frames lie one after the other, those of this rank first; what arrives goes behind, by its real length.
        self._memory = torch.zeros(size * each * longest, dtype=torch.uint8)
        self._longest = longest * each

    def exchange(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> list[Frame]:
        """See FrameExchange."""
        found = unpack(self.gather(pack(self._frame, contract, payload), timeout_s), self._size)
        return [found[(r - self._rank) % self._size] for r in range(self._size)]

    def gather(self, mine: Tensor, timeout_s: float) -> Tensor:
        """Return the bytes of all ranks' frames one after the other, this rank's first, then the next rank's."""
        memory, size, rank = self._memory, self._size, self._rank
        ends = [mine.numel()]  # where the frames of the rank after so many others end
        memory[: ends[0]] = mine
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            place = memory[ends[-1] : ends[-1] + count * self._longest]
            arriving = self._point_to_point.receive(place, (rank + distance) % size)
            leaving = self._point_to_point.send(memory[: ends[count - 1]], (rank - distance) % size)
            arriving.wait(timeout_s)
            leaving.wait(timeout_s)
            begin, each = ends[-1], self._longest // (_HEAD_NBYTES + self.most_nbytes)
            for _ in range(count):
                for _ in range(each):
                    begin += _frame_nbytes(memory, begin)
                ends.append(begin)
            distance *= 2
        return memory[: ends[-1]]


class TwoLevelFrames:
    """Frames meet inside each host, the first rank of each exchanges them with the other hosts', and tells its host.

    Args:
        hosts: The ranks of each host, in order; all of one length.
        rank: Number of this rank.
        inside: Collectives among the ranks of this host.
        points: Messages between the first ranks of the hosts, numbered as the hosts.
        most_nbytes: Bytes of payload that fit in a frame.
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]], rank: int, inside: Transport, points: PointToPoint, most_nbytes: int
    ) -> None:
        self.most_nbytes = most_nbytes
        self._hosts = [tuple(ranks) for ranks in hosts]
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._inside = inside
        local_size = len(hosts[0])
        longest = _HEAD_NBYTES + most_nbytes
        self._own = torch.zeros(longest, dtype=torch.uint8)
        self._local = torch.zeros(local_size, longest, dtype=torch.uint8)
        self._all = torch.zeros(len(hosts) * local_size * longest, dtype=torch.uint8)
        self._between = None
        if rank == hosts[self._host][0]:
            self._between = FlatFrames(points, self._host, len(hosts), most_nbytes, local_size)

    def exchange(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> list[Frame]:
        """See FrameExchange."""
        pack(self._own, contract, payload)
        self._inside.all_gather(list(self._local), self._own, timeout_s)
        if self._between is not None:
            mine = torch.cat([frame[: _frame_nbytes(frame, 0)] for frame in self._local])
            found = self._between.gather(mine, timeout_s)
            self._all[: found.numel()] = found
        self._inside.broadcast(self._all, 0, timeout_s)
        size = len(self._hosts) * len(self._local)
        frames = unpack(self._all, size)
        result: list[Frame | None] = [None] * size
        for k in range(len(self._hosts)):
            ranks = self._hosts[(self._host + k) % len(self._hosts)]
            for local, r in enumerate(ranks):
                result[r] = frames[k * len(ranks) + local]
        return [frame for frame in result if frame is not None]


def pack(memory: Tensor, contract: bytes, payload: Tensor | None) -> Tensor:
    """Write a frame to `memory`, and return the part of it that the frame takes."""
    nbytes = 0 if payload is None else payload.numel()
    view = _view(memory)
    view[: len(contract)] = contract
    _LENGTH.pack_into(view, _LENGTH_AT, nbytes)
    if payload is not None:
        memory[_HEAD_NBYTES : _HEAD_NBYTES + nbytes] = payload
    return memory[: _frame_nbytes(memory, 0)]


def unpack(memory: Tensor, count: int) -> list[Frame]:
    """Return the frames that lie in `memory` one after the other."""
    view, begin, found = _view(memory), 0, []
    for _ in range(count):
        (nbytes,) = _LENGTH.unpack_from(view, begin + _LENGTH_AT)
        payload = memory[begin + _HEAD_NBYTES : begin + _HEAD_NBYTES + nbytes]
        found.append(Frame(bytes(view[begin : begin + _CONTRACT.size]), payload))
        begin += _frame_nbytes(memory, begin)
    return found


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _frame_nbytes(memory: Tensor, begin: int) -> int:
    (nbytes,) = _LENGTH.unpack_from(_view(memory), begin + _LENGTH_AT)
    return _HEAD_NBYTES + -(-int(nbytes) // _ALIGNMENT) * _ALIGNMENT
