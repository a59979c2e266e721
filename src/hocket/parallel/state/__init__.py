"""The model's state on many ranks: who owns which part, broadcast, clipped, saved, and loaded under any plan."""

from ._broadcast import (
    FlatBundles,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_model,
    exclude_from_reduction,
    is_excluded,
    keepers,
)
from ._deferred import Deferred, deferred, is_deferred
from ._norms import WholeNorms, clip
from ._owned import Owned, check_elementwise, shard_optimizer
from ._shards import DimSegment, FlatRange, ParameterPlacement, ShardBox, TensorShard, memory_order
from .checkpoint import CheckpointError
from .memory import StateBytes

__all__ = [
    "CheckpointError",
    "Deferred",
    "DimSegment",
    "FlatBundles",
    "FlatRange",
    "Owned",
    "ParameterPlacement",
    "ShardBox",
    "StateBytes",
    "TensorShard",
    "WholeNorms",
    "broadcast_optimizer_state",
    "broadcast_tensors",
    "check_elementwise",
    "check_model",
    "clip",
    "deferred",
    "exclude_from_reduction",
    "is_deferred",
    "is_excluded",
    "keepers",
    "memory_order",
    "shard_optimizer",
]
