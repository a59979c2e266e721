"""Runs training: gradients averaged over ranks, batches shared out, the losses of one device kept."""

from .batches import DistributedLoader as DistributedLoader
from .batches import ShardedLoader as ShardedLoader
from .batches import average as average
from .batches import total as total
from .compose import Trainer as Trainer
from .compose import distribute as distribute
from .compose import shard as shard
from .data import DataParallel as DataParallel
from .state import CheckpointError as CheckpointError
from .state import StateBytes as StateBytes
from .state import optim as optim

__all__ = [
    "CheckpointError",
    "DataParallel",
    "DistributedLoader",
    "ShardedLoader",
    "StateBytes",
    "Trainer",
    "average",
    "distribute",
    "optim",
    "shard",
    "total",
]
