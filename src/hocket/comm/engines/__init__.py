"""The engines, which move bytes between hosts: torch's own process groups, and MPI."""

from ._direct import DirectPoints, connect_directly
from ._gloo import Gloo, unanswered, unheard
from ._mpi import MpiPointToPoint
from ._point_to_point import EnginePointToPoint
from ._sockets import own_sockets
from .engine import EngineTransport

__all__ = [
    "DirectPoints",
    "EnginePointToPoint",
    "EngineTransport",
    "Gloo",
    "MpiPointToPoint",
    "connect_directly",
    "own_sockets",
    "unanswered",
    "unheard",
]
