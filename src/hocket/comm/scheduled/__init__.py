"""Schedules compiled and executed on tensors, over whatever can send and receive."""

from ._checked import CheckedTransport, host_name
from ._early import EarlyPoints
from ._execute import EndpointExecutor, PendingMessage, PointToPoint, blocks_after, blocks_before, perform
from ._frames import FlatFrames, TwoLevelFrames, frame_capacity, frame_peers
from ._program import Message
from ._scheduled import ScheduledTransport, choose
from ._two_level import RAILS_NBYTES, Subset, TwoLevelTransport

__all__ = [
    "RAILS_NBYTES", "CheckedTransport", "EarlyPoints", "EndpointExecutor", "FlatFrames", "Message", "PendingMessage",
    "PointToPoint", "ScheduledTransport", "Subset", "TwoLevelFrames", "TwoLevelTransport", "blocks_after",
    "blocks_before", "choose", "frame_capacity", "frame_peers", "host_name", "perform",
]  # fmt: skip
