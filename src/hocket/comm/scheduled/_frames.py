"""What all ranks tell each other before every operation between hosts: one small frame of each, in a fixed pattern.

The pattern does not depend on the operation, and a receive has space for the longest frame. So ranks that call
different operations still exchange their frames, see that they differ, and stay in step.
"""

import struct
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from hocket.schedule import KINDS

from ..shm import DTYPE_NUMBERS, describe
from ..transport import Transport
from ._execute import PendingMessage, PointToPoint

_CONTRACT: Final = struct.Struct("<IHHHHIQ")  # seq, kind, operator, dtype, root, form, numel: as shm's announcements
_HEAD_NBYTES: Final = 32
_LENGTH: Final = struct.Struct("<Q")
_LENGTH_AT: Final = _CONTRACT.size
_MOST_NBYTES: Final = 2**16
_MOST_INSIDE_NBYTES: Final = 2**14  # where frames also go through a host's shared memory
_FIRST_NBYTES: Final = 2**11  # of them that go there first, whatever their length
_MOST_TOGETHER: Final = 2**16  # that come to a rank
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

    def begin(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> bool:
        """Send this rank's frame; `payload` is bytes. Return whether all that is known so far agrees with it."""

    def finish(self, timeout_s: float) -> list[Frame]:
        """Return everyone's frames, by rank, good until the next begin. Blocks until all have come."""


def contract_of(seq: int, kind: str, operator: int, dtype: torch.dtype, root: int, numel: int, *, fused: bool) -> bytes:
    """Return what all ranks must agree in. `fused`: the operation is done with the frames alone."""
    return _CONTRACT.pack(
        seq & 0xFFFFFFFF, _KIND_NUMBERS[kind], operator, DTYPE_NUMBERS[dtype], root, int(fused), numel
    )


def differences(frames: Sequence[Frame], names: Sequence[int]) -> str:
    """Return which ranks, by their `names`, announced what."""
    return describe([memoryview(frame.contract) for frame in frames], names)


def frame_capacity(world: int, *, local: int = 1) -> int:
    """Return the bytes of payload in a frame where so many ranks exchange them, `local` of them on each host."""
    most, together = (_MOST_NBYTES, _MOST_TOGETHER) if local == 1 else (_MOST_INSIDE_NBYTES, _MOST_TOGETHER // 2)
    return min(most, together // max(1, world - local)) // _ALIGNMENT * _ALIGNMENT


def frame_peers(rank: int, size: int) -> set[int]:
    """Return the ranks with which one exchanges frames."""
    distances = [2**k for k in range((size - 1).bit_length())]
    return {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}


class FlatFrames:
    """A `FrameExchange` by dissemination (Bruck): in round k a rank sends 2**k frames to the rank 2**k before it.

    Engines move nothing before a receiver has said where to. So the receives of the next exchange are posted while this
    one is under way, and its frames then take one way through the network instead of a way there and back.

    Args:
        points: Messages to the other ranks; nothing else may use their tag.
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
        self._each = each
        longest = _HEAD_NBYTES + most_nbytes
        self._frame = torch.zeros(longest, dtype=torch.uint8)
        # Frames lie one after the other by their real lengths, those of this rank first.
        self._memory = torch.zeros(size * each * longest, dtype=torch.uint8)
        self._view = _view(self._memory)
        self._rounds = [2**k for k in range((size - 1).bit_length())]
        counts = [min(distance, size - distance) for distance in self._rounds]
        # What arrives in each round, in this exchange and in the next one.
        self._arrivals = [
            [torch.zeros(count * each * longest, dtype=torch.uint8) for count in counts] for _ in range(2)
        ]
        self._posted: list[list[PendingMessage]] = []  # receives of this exchange and of the next one
        self._mine = 0
        self._leaving: PendingMessage | None = None

    def begin(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> bool:
        self.begin_gather(pack(self._frame, contract, payload))
        return True

    def finish(self, timeout_s: float) -> list[Frame]:
        found = unpack(self.finish_gather(timeout_s), self._size)
        return [found[(r - self._rank) % self._size] for r in range(self._size)]

    def begin_gather(self, mine: Tensor) -> None:
        """Send this rank's frames, one after the other, to the first that needs them."""
        if not self._posted:
            self._post()
        self._mine = mine.numel()
        self._memory[: self._mine] = mine
        self._leaving = self._point_to_point.send(self._memory[: self._mine], (self._rank - 1) % self._size)
        self._post()

    def finish_gather(self, timeout_s: float) -> Tensor:
        """Return the bytes of all ranks' frames one after the other, this rank's first, then the next rank's."""
        deadline_s = time.monotonic() + timeout_s
        ends = [self._mine]  # where the frames of the rank after so many others end
        arrivals = self._arrivals[0]
        self._arrivals.reverse()
        for distance, arriving, place in zip(self._rounds, self._posted.pop(0), arrivals, strict=True):
            count = min(distance, self._size - distance)
            if self._leaving is None:
                leaving = self._memory[: ends[count - 1]]
                self._leaving = self._point_to_point.send(leaving, (self._rank - distance) % self._size)
            arriving.wait(max(0.001, deadline_s - time.monotonic()))
            self._leaving.wait(max(0.001, deadline_s - time.monotonic()))
            self._leaving = None
            begin, view = 0, _view(place)
            for _ in range(count):
                start = begin
                for _ in range(self._each):
                    begin += _frame_nbytes(view, begin)
                ends.append(ends[-1] + begin - start)
            self._view[ends[-1] - begin : ends[-1]] = view[:begin]
        return self._memory[: ends[-1]]

    def _post(self) -> None:
        """Post the receives of an exchange; what has been posted last is finished before."""
        places = self._arrivals[len(self._posted)]
        peers = [(self._rank + distance) % self._size for distance in self._rounds]
        self._posted.append(
            [self._point_to_point.receive(place, peer) for place, peer in zip(places, peers, strict=True)]
        )


class TwoLevelFrames:
    """Frames meet inside each host, the first rank of each exchanges them with the other hosts', and tells its host.

    Inside a host a part of a fixed length goes first, which says how long the rest is; mostly there is none.

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
        self._first = min(longest, _HEAD_NBYTES + _FIRST_NBYTES)
        self._own = torch.zeros(longest, dtype=torch.uint8)
        self._local = torch.zeros(local_size, longest, dtype=torch.uint8)
        count = len(hosts) * local_size
        self._all = torch.zeros(_ALIGNMENT + count * longest, dtype=torch.uint8)  # begins with how long all are
        self._all_first = _ALIGNMENT + count * self._first
        self._between = None
        if rank == hosts[self._host][0]:
            self._between = FlatFrames(points, self._host, len(hosts), most_nbytes, local_size)

    def begin(self, contract: bytes, payload: Tensor | None, timeout_s: float) -> bool:
        pack(self._own, contract, payload)
        first = self._first
        self._inside.all_gather([frame[:first] for frame in self._local], self._own[:first], timeout_s)
        lengths = [_frame_nbytes(_view(frame), 0) for frame in self._local]
        if (longest := max(lengths)) > first:
            rest = [frame[first:longest] for frame in self._local]
            self._inside.all_gather(rest, self._own[first:longest], timeout_s)
        if self._between is not None:
            together = [frame[:length] for frame, length in zip(self._local, lengths, strict=True)]
            self._between.begin_gather(torch.cat(together))
        return all(bytes(_view(frame)[: len(contract)]) == contract for frame in self._local)

    def finish(self, timeout_s: float) -> list[Frame]:
        view = _view(self._all)
        if self._between is not None:
            found = self._between.finish_gather(timeout_s)
            _LENGTH.pack_into(view, 0, found.numel())
            self._all[_ALIGNMENT : _ALIGNMENT + found.numel()] = found
        self._inside.broadcast(self._all[: self._all_first], 0, timeout_s)
        end = _ALIGNMENT + _LENGTH.unpack_from(view, 0)[0]
        if end > self._all_first:
            self._inside.broadcast(self._all[self._all_first : end], 0, timeout_s)
        size = len(self._hosts) * len(self._local)
        frames = unpack(self._all[_ALIGNMENT:], size)
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
    return memory[: _frame_nbytes(view, 0)]


def unpack(memory: Tensor, count: int) -> list[Frame]:
    """Return the frames that lie in `memory` one after the other."""
    view, begin, found = _view(memory), 0, []
    for _ in range(count):
        (nbytes,) = _LENGTH.unpack_from(view, begin + _LENGTH_AT)
        payload = memory[begin + _HEAD_NBYTES : begin + _HEAD_NBYTES + nbytes]
        found.append(Frame(bytes(view[begin : begin + _CONTRACT.size]), payload))
        begin += _frame_nbytes(view, begin)
    return found


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _frame_nbytes(view: memoryview, begin: int) -> int:
    (nbytes,) = _LENGTH.unpack_from(view, begin + _LENGTH_AT)
    return _HEAD_NBYTES + -(-int(nbytes) // _ALIGNMENT) * _ALIGNMENT
