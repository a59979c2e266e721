"""The model's state on many ranks: who owns which part, broadcast, clipped, saved, and loaded under any plan."""

from ._broadcast import FlatBundles as FlatBundles
from ._broadcast import broadcast_optimizer_state as broadcast_optimizer_state
from ._broadcast import broadcast_tensors as broadcast_tensors
from ._broadcast import check_model as check_model
from ._broadcast import exclude_from_reduction as exclude_from_reduction
from ._broadcast import is_excluded as is_excluded
from ._broadcast import keepers as keepers
from ._norms import WholeNorms as WholeNorms
from ._norms import clip as clip
from ._owned import Owned as Owned
from ._owned import check_elementwise as check_elementwise
from ._owned import shard_optimizer as shard_optimizer
from ._shards import DimSegment as DimSegment
from ._shards import FlatRange as FlatRange
from ._shards import ParameterPlacement as ParameterPlacement
from ._shards import ShardBox as ShardBox
from ._shards import TensorShard as TensorShard
from ._shards import memory_order as memory_order
from .checkpoint import CheckpointError as CheckpointError
from .memory import StateBytes as StateBytes

__all__ = [
    "CheckpointError",
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
    "exclude_from_reduction",
    "is_excluded",
    "keepers",
    "memory_order",
    "shard_optimizer",
]
