"""Schedules compiled and executed on tensors, over whatever can send and receive."""

from ._choosing import choose as choose
from ._execute import EndpointExecutor as EndpointExecutor
from ._execute import PendingMessage as PendingMessage
from ._execute import PointToPoint as PointToPoint
from ._execute import blocks_after as blocks_after
from ._execute import blocks_before as blocks_before
from ._execute import perform as perform
from ._program import Message as Message
from ._scheduled import ScheduledTransport as ScheduledTransport
from ._two_level import Subset as Subset
from ._two_level import TwoLevelTransport as TwoLevelTransport

__all__ = [
    "Message",
    "EndpointExecutor",
    "PendingMessage",
    "PointToPoint",
    "ScheduledTransport",
    "Subset",
    "TwoLevelTransport",
    "blocks_after",
    "blocks_before",
    "choose",
    "perform",
]
