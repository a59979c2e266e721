"""Runs collectives: the torch backend "hocket", its transports, and the seams that others build on."""

from ._agreement import AggregationStats as AggregationStats
from ._agreement import aggregation_stats as aggregation_stats
from ._choosing import choose as choose
from ._engine import EngineTransport as EngineTransport
from ._errors import CollectiveMismatchError as CollectiveMismatchError
from ._errors import CollectiveTimeoutError as CollectiveTimeoutError
from ._errors import CommError as CommError
from ._errors import PeerDiedError as PeerDiedError
from ._execute import Part as Part
from ._execute import Pending as Pending
from ._execute import PointToPoint as PointToPoint
from ._execute import blocks_after as blocks_after
from ._execute import blocks_before as blocks_before
from ._execute import perform as perform
from ._locate import maxloc as maxloc
from ._locate import minloc as minloc
from ._mailbox import Mailbox as Mailbox
from ._mailbox import open_mailbox as open_mailbox
from ._memory import empty as empty
from ._memory import empty_like as empty_like
from ._memory import is_registered as is_registered
from ._memory import zeros as zeros
from ._mpi import MpiPoints as MpiPoints
from ._observe import Observer as Observer
from ._observe import Operation as Operation
from ._observe import announce_message as announce_message
from ._observe import label as label
from ._observe import observe as observe
from ._points import EnginePoints as EnginePoints
from ._program import Message as Message
from ._reduce import reducer as reducer
from ._registration import RegistrationStats as RegistrationStats
from ._registration import registration_stats as registration_stats
from ._scheduled import ScheduledTransport as ScheduledTransport
from ._segment import host_identity as host_identity
from ._window import Window as Window
from ._window import open_window as open_window

__all__ = [
    "AggregationStats",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommError",
    "EnginePoints",
    "EngineTransport",
    "Mailbox",
    "Message",
    "MpiPoints",
    "Observer",
    "Operation",
    "Part",
    "PeerDiedError",
    "Pending",
    "PointToPoint",
    "RegistrationStats",
    "ScheduledTransport",
    "Window",
    "aggregation_stats",
    "announce_message",
    "blocks_after",
    "blocks_before",
    "choose",
    "empty",
    "empty_like",
    "host_identity",
    "is_registered",
    "label",
    "maxloc",
    "minloc",
    "observe",
    "open_mailbox",
    "open_window",
    "perform",
    "reducer",
    "registration_stats",
    "zeros",
]
