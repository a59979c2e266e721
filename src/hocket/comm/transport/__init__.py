"""The seam between the process group and whatever moves bytes: errors, operators, flat tensors, observers."""

from ._errors import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from ._flat import apart, cut, flatten, split, write_back
from ._reduce import ReduceOperator, reducer
from ._transport import Flats, Membership, Transport
from .observers import (
    Observer,
    OperationRecord,
    ProgressObserver,
    announce_message,
    follow,
    known_group,
    label,
    observe,
)

__all__ = [
    "CollectiveMismatchError", "CollectiveTimeoutError", "CommError", "Flats", "Membership", "Observer",
    "OperationRecord", "PeerDiedError", "ProgressObserver", "ReduceOperator", "Transport", "announce_message", "apart",
    "cut", "flatten", "follow", "known_group", "label", "observe", "reducer", "split", "write_back",
]  # fmt: skip
