"""Runs training: gradients averaged over ranks, batches shared out, the losses of one device kept."""

from . import optim as optim
from ._calibrate import Calibration as Calibration
from ._calibrate import calibrate as calibrate
from ._checkpoint import CheckpointError as CheckpointError
from ._data_parallel import DataParallel as DataParallel
from ._distribute import distribute as distribute
from ._distribute import shard as shard
from ._loader import DistributedLoader as DistributedLoader
from ._loader import ShardedLoader as ShardedLoader
from ._memory import StateBytes as StateBytes
from ._totals import average as average
from ._totals import total as total
from ._trainer import Trainer as Trainer

__all__ = [
    "Calibration",
    "CheckpointError",
    "DataParallel",
    "DistributedLoader",
    "ShardedLoader",
    "StateBytes",
    "Trainer",
    "average",
    "calibrate",
    "distribute",
    "optim",
    "shard",
    "total",
]
