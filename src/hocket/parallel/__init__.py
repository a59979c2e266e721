"""Runs training: gradients averaged over ranks, batches shared out, the losses of one device kept."""

from .batches import DistributedLoader, ShardedLoader, average, total
from .compose import Trainer, distribute, resume, shard
from .data import DataParallel, own
from .state import CheckpointError, StateBytes, deferred, optim, read_state_dict

__all__ = [
    "CheckpointError", "DataParallel", "DistributedLoader", "ShardedLoader", "StateBytes", "Trainer", "average",
    "deferred", "distribute", "optim", "own", "read_state_dict", "resume", "shard", "total",
]  # fmt: skip
