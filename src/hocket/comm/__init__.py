"""Runs collectives: the torch backend "hocket", its transports, and the seams that others build on.

Names are loaded when they are first asked for: `import torch` registers the backend in every program.
"""

from typing import TYPE_CHECKING

from hocket._lazy import lazy

if TYPE_CHECKING:
    from .aggregated import AggregationStats, aggregation_stats
    from .engines import EnginePointToPoint, EngineTransport, MpiPointToPoint
    from .group import maxloc, minloc
    from .p2p import ShmStreams, open_streams
    from .scheduled import (
        EndpointExecutor,
        Message,
        PendingMessage,
        PointToPoint,
        ScheduledTransport,
        blocks_after,
        blocks_before,
        choose,
        perform,
    )
    from .shm import (
        MemoryWindow,
        empty,
        empty_like,
        host_identity,
        is_registered,
        open_window,
        zeros,
    )
    from .timeouts import timeout_setting
    from .transport import (
        CollectiveMismatchError,
        CollectiveTimeoutError,
        CommError,
        Observer,
        OperationRecord,
        PeerDiedError,
        ProgressObserver,
        announce_message,
        follow,
        known_group,
        label,
        observe,
        reducer,
    )

__all__ = [
    "AggregationStats", "CollectiveMismatchError", "CollectiveTimeoutError", "CommError", "EndpointExecutor",
    "EnginePointToPoint", "EngineTransport", "MemoryWindow", "Message", "MpiPointToPoint", "Observer",
    "OperationRecord", "PeerDiedError", "PendingMessage", "PointToPoint", "ProgressObserver", "ScheduledTransport",
    "ShmStreams", "aggregation_stats", "announce_message", "blocks_after", "blocks_before", "choose", "empty",
    "empty_like", "follow", "host_identity", "is_registered", "known_group", "label", "maxloc", "minloc", "observe",
    "open_streams", "open_window", "perform", "reducer", "timeout_setting", "zeros",
]  # fmt: skip

__getattr__ = lazy(
    __name__,
    {
        "aggregated": "AggregationStats aggregation_stats",
        "engines": "EnginePointToPoint EngineTransport MpiPointToPoint",
        "group": "maxloc minloc",
        "p2p": "ShmStreams open_streams",
        "scheduled": (
            "EndpointExecutor Message PendingMessage PointToPoint ScheduledTransport blocks_after "
            "blocks_before choose perform"
        ),
        "shm": ("MemoryWindow empty empty_like host_identity is_registered open_window zeros"),
        "timeouts": "timeout_setting",
        "transport": (
            "CollectiveMismatchError CollectiveTimeoutError CommError Observer OperationRecord PeerDiedError "
            "ProgressObserver announce_message follow known_group label observe reducer"
        ),
    },
)
