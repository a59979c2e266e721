"""Point-to-point of MPI, through mpi4py: the executor of schedules inside an mpirun."""

import time
from typing import Any, Final

import torch

from ..scheduled import PendingMessage
from ..transport import CollectiveTimeoutError

_TAG: Final = 0x4000
_SPINS: Final = 50
_NAP_S: Final = 1e-4


class MpiMessage:
    """A request of MPI."""

    __slots__ = ("_flat", "_peer", "_request")

    def __init__(self, request: Any, flat: torch.Tensor, peer: int) -> None:
        self._request = request
        self._flat = flat  # MPI has its address
        self._peer = peer

    def done(self) -> bool:
        """Return whether the tensor may be used again; also lets MPI make progress."""
        return bool(self._request.Test())

    def wait(self, timeout_s: float) -> None:
        """Poll, for MPI has no wait with an end; after a moment in small naps, so that others have the core."""
        deadline_s = time.monotonic() + timeout_s
        looks = 0
        while not self._request.Test():
            looks += 1
            if looks < _SPINS:
                continue
            if time.monotonic() > deadline_s:
                raise CollectiveTimeoutError(
                    f"a message of {self._flat.numel()} bytes from or to rank {self._peer} has not passed in "
                    f"{timeout_s:g} s",
                    (self._peer,),
                )
            time.sleep(_NAP_S)


class MpiPointToPoint:
    """Messages between the ranks of an MPI communicator.

    Args:
        communicator: Communicator of mpi4py for these messages alone, such as `MPI.COMM_WORLD.Dup()`.
    """

    name = "mpi"

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def send(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        data = flat.view(torch.uint8)
        return MpiMessage(self._communicator.Isend(data.numpy(), peer, _TAG), data, peer)

    def receive(self, flat: torch.Tensor, peer: int) -> PendingMessage:
        data = flat.view(torch.uint8)
        return MpiMessage(self._communicator.Irecv(data.numpy(), peer, _TAG), data, peer)
