"""Runs collectives: the torch backend "hocket", its transports, and the seams that others build on."""

from .aggregated import AggregationStats as AggregationStats
from .aggregated import aggregation_stats as aggregation_stats
from .engines import EnginePointToPoint as EnginePointToPoint
from .engines import EngineTransport as EngineTransport
from .engines import MpiPointToPoint as MpiPointToPoint
from .group import maxloc as maxloc
from .group import minloc as minloc
from .p2p import ShmStreams as ShmStreams
from .p2p import open_streams as open_streams
from .scheduled import EndpointExecutor as EndpointExecutor
from .scheduled import Message as Message
from .scheduled import PendingMessage as PendingMessage
from .scheduled import PointToPoint as PointToPoint
from .scheduled import ScheduledTransport as ScheduledTransport
from .scheduled import blocks_after as blocks_after
from .scheduled import blocks_before as blocks_before
from .scheduled import choose as choose
from .scheduled import perform as perform
from .shm import MemoryWindow as MemoryWindow
from .shm import RegistrationStats as RegistrationStats
from .shm import empty as empty
from .shm import empty_like as empty_like
from .shm import host_identity as host_identity
from .shm import is_registered as is_registered
from .shm import open_window as open_window
from .shm import registration_stats as registration_stats
from .shm import zeros as zeros
from .transport import CollectiveMismatchError as CollectiveMismatchError
from .transport import CollectiveTimeoutError as CollectiveTimeoutError
from .transport import CommError as CommError
from .transport import Observer as Observer
from .transport import Operation as Operation
from .transport import PeerDiedError as PeerDiedError
from .transport import announce_message as announce_message
from .transport import label as label
from .transport import observe as observe
from .transport import reducer as reducer

__all__ = [
    "AggregationStats",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommError",
    "EnginePointToPoint",
    "EngineTransport",
    "ShmStreams",
    "Message",
    "MpiPointToPoint",
    "Observer",
    "Operation",
    "EndpointExecutor",
    "PeerDiedError",
    "PendingMessage",
    "PointToPoint",
    "RegistrationStats",
    "ScheduledTransport",
    "MemoryWindow",
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
    "open_streams",
    "open_window",
    "perform",
    "reducer",
    "registration_stats",
    "zeros",
]
