"""Data parallelism: gradients averaged, and state replicated or sharded (ZeRO), compressed, prioritised or relaxed."""

from ._batch_norm import BroadcastBuffers as BroadcastBuffers
from ._batch_norm import normalise as normalise
from ._batch_norm import synchronise as synchronise
from ._data_parallel import DataParallel as DataParallel
from ._data_parallel import living as living
from ._fully_sharded import FullySharded as FullySharded
from ._fully_sharded import blocks as blocks
from ._hooks import scale_gradients as scale_gradients
from ._overlap import on_several_hosts as on_several_hosts
from ._reducer import GradientReducer as GradientReducer
from ._strategy import Replicated as Replicated
from ._strategy import ShardingStrategy as ShardingStrategy
from ._zero import ShardedOptimizer as ShardedOptimizer
from .relaxed._relaxation import Relaxation as Relaxation

__all__ = [
    "BroadcastBuffers",
    "DataParallel",
    "FullySharded",
    "GradientReducer",
    "Relaxation",
    "Replicated",
    "ShardedOptimizer",
    "ShardingStrategy",
    "blocks",
    "living",
    "normalise",
    "on_several_hosts",
    "scale_gradients",
    "synchronise",
]
