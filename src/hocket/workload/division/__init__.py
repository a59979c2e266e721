"""How the layers of a module can be divided among ranks: the one rule of tensor parallelism, told from a recording.

`hocket.parallel.partition.tensor` divides models by it; `hocket.workload.capture` tells by it what dividing would cost.
"""

from .._unchanged import plain_values, seed, unchanged, without_gradients
from ._choose import RegionChoice, apart, choose
from ._cuts import cut_tensors
from ._record import DROPOUTS, Call, RecordedValue, Recording, record, recorded, storage_of
from ._regions import CHANNEL, LAYERS, TABLES, CutParameter, Exchanged, Region, Role
from ._sequence import SEQUENCE, sequences
from ._tally import CollectiveCount, exchanges, tally

__all__ = [
    "CHANNEL", "DROPOUTS", "LAYERS", "SEQUENCE", "TABLES", "Call", "CollectiveCount", "CutParameter", "Exchanged",
    "RecordedValue", "Recording", "Region", "RegionChoice", "Role", "apart", "choose", "cut_tensors", "exchanges",
    "plain_values", "record", "recorded", "seed", "sequences", "storage_of", "tally", "unchanged",
    "without_gradients",
]  # fmt: skip
