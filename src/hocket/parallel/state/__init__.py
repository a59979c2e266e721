"""The model's state on many ranks: who owns which part, broadcast, clipped, saved, and loaded under any plan."""

from ._broadcast import (
    FlatBundles,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_model,
    check_replicas,
    exclude_from_reduction,
    is_excluded,
    keepers,
)
from ._deferred import Deferred, deferred, is_deferred, made_of
from ._lock import lock_until_exit
from ._manifest import CheckpointError, alike
from ._norms import WholeNorms, clip
from ._owned import Owned, check_elementwise, shard_optimizer
from ._parameters import named_parameters_of, parameters_of
from ._shards import DimSegment, FlatRange, ParameterPlacement, ShardBox, TensorShard, memory_order
from ._updates import UpdateTrial, drawn_alike
from .checkpoint import random_state
from .memory import StateBytes, give_back, process_memory
from .sources import IncompatibleKeys, export_checkpoint, read_state_dict, verify_checkpoint
from .whole import ModelOutline

__all__ = [
    "CheckpointError", "Deferred", "DimSegment", "FlatBundles", "FlatRange", "IncompatibleKeys", "ModelOutline",
    "Owned", "ParameterPlacement", "ShardBox", "StateBytes", "TensorShard", "UpdateTrial", "WholeNorms", "alike",
    "broadcast_optimizer_state", "broadcast_tensors", "check_elementwise", "check_model", "check_replicas", "clip",
    "deferred", "drawn_alike", "exclude_from_reduction", "export_checkpoint", "give_back", "is_deferred",
    "is_excluded", "keepers", "lock_until_exit", "made_of", "memory_order", "named_parameters_of",
    "parameters_of", "process_memory",
    "random_state", "read_state_dict", "shard_optimizer", "verify_checkpoint",
]  # fmt: skip
