"""The seam between the process group and whatever moves bytes: errors, operators, flat tensors, observers."""

from ._errors import CollectiveMismatchError as CollectiveMismatchError
from ._errors import CollectiveTimeoutError as CollectiveTimeoutError
from ._errors import CommError as CommError
from ._errors import PeerDiedError as PeerDiedError
from ._flat import cut as cut
from ._flat import flatten as flatten
from ._flat import split as split
from ._flat import write_back as write_back
from ._reduce import ReduceOperator as ReduceOperator
from ._reduce import reducer as reducer
from ._transport import Flats as Flats
from ._transport import Transport as Transport
from .observers import Observer as Observer
from .observers import Operation as Operation
from .observers import announce_message as announce_message
from .observers import label as label
from .observers import observe as observe

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommError",
    "Flats",
    "Observer",
    "Operation",
    "PeerDiedError",
    "ReduceOperator",
    "Transport",
    "announce_message",
    "cut",
    "flatten",
    "label",
    "observe",
    "reducer",
    "split",
    "write_back",
]
