"""How the layers of a module can be divided among ranks: the one rule of tensor parallelism, told from a recording.

`hocket.parallel.partition.tensor` divides models by it; `hocket.workload.capture` tells by it what dividing would cost.
"""

from ._choose import RegionChoice as RegionChoice
from ._choose import apart as apart
from ._choose import choose as choose
from ._cuts import cut_tensors as cut_tensors
from ._record import DROPOUTS as DROPOUTS
from ._record import Call as Call
from ._record import RecordedValue as RecordedValue
from ._record import Recording as Recording
from ._record import record as record
from ._record import recorded as recorded
from ._record import storage_of as storage_of
from ._regions import CHANNEL as CHANNEL
from ._regions import LAYERS as LAYERS
from ._regions import Region as Region
from ._regions import Role as Role
from ._sequence import SEQUENCE as SEQUENCE
from ._sequence import sequences as sequences
from ._tally import CollectiveCount as CollectiveCount
from ._tally import Exchanged as Exchanged
from ._tally import exchanges as exchanges
from ._tally import tally as tally

__all__ = [
    "CHANNEL",
    "LAYERS",
    "DROPOUTS",
    "SEQUENCE",
    "Call",
    "RegionChoice",
    "CollectiveCount",
    "Exchanged",
    "Recording",
    "Region",
    "Role",
    "RecordedValue",
    "apart",
    "choose",
    "cut_tensors",
    "exchanges",
    "record",
    "recorded",
    "sequences",
    "storage_of",
    "tally",
]
