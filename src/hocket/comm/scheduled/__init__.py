"""Schedules compiled and executed on tensors, over whatever can send and receive."""

from ._execute import EndpointExecutor, PendingMessage, PointToPoint, blocks_after, blocks_before, perform
from ._program import Message
from ._scheduled import ScheduledTransport, choose
from ._two_level import Subset, TwoLevelTransport

__all__ = [
    "EndpointExecutor", "Message", "PendingMessage", "PointToPoint", "ScheduledTransport", "Subset",
    "TwoLevelTransport", "blocks_after", "blocks_before", "choose", "perform",
]  # fmt: skip
