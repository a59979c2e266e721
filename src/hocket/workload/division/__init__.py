"""How the layers of a module can be divided among ranks: the one rule of tensor parallelism, told from a recording.

`hocket.parallel.partition.tensor` divides models by it; `hocket.workload.capture` tells by it what dividing would cost.
"""

from ._call import NO_ANSWER as NO_ANSWER
from ._call import Operand as Operand
from ._call import Part as Part
from ._call import Site as Site
from ._choose import Choice as Choice
from ._choose import apart as apart
from ._choose import choose as choose
from ._cuts import cut_tensors as cut_tensors
from ._record import DROPOUTS as DROPOUTS
from ._record import Call as Call
from ._record import Recording as Recording
from ._record import Value as Value
from ._record import function_name as function_name
from ._record import leaves as leaves
from ._record import mapped as mapped
from ._record import record as record
from ._record import recorded as recorded
from ._record import storage_of as storage_of
from ._regions import CHANNEL as CHANNEL
from ._regions import Region as Region
from ._regions import Role as Role
from ._rules import DROPOUT as DROPOUT
from ._sequence import SEQUENCE as SEQUENCE
from ._sequence import sequences as sequences
from ._shape_rules import ALL_RULES as ALL_RULES
from ._split import CannotSplit as CannotSplit
from ._split import Split as Split
from ._split import cut as cut
from ._split import join as join
from ._split import reshaped as reshaped
from ._tally import CollectiveCount as CollectiveCount
from ._tally import Exchanged as Exchanged
from ._tally import exchanges as exchanges
from ._tally import tally as tally

__all__ = [
    "ALL_RULES",
    "CHANNEL",
    "DROPOUT",
    "DROPOUTS",
    "NO_ANSWER",
    "SEQUENCE",
    "Call",
    "CannotSplit",
    "Choice",
    "CollectiveCount",
    "Exchanged",
    "Operand",
    "Part",
    "Recording",
    "Region",
    "Role",
    "Site",
    "Split",
    "Value",
    "apart",
    "choose",
    "cut",
    "cut_tensors",
    "exchanges",
    "function_name",
    "join",
    "leaves",
    "mapped",
    "record",
    "recorded",
    "reshaped",
    "sequences",
    "storage_of",
    "tally",
]
