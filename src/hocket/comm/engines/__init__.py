"""The engines, which move bytes between hosts: torch's own process groups, and MPI."""

from ._mpi import MpiPoints as MpiPoints
from ._points import EnginePoints as EnginePoints
from .engine import EngineTransport as EngineTransport

__all__ = ["EnginePoints", "EngineTransport", "MpiPoints"]
