"""Data parallelism: gradients averaged, and state replicated or sharded (ZeRO), compressed, prioritised or relaxed."""

from ._apart import LESS_RANDOM, PADDED, as_evaluated, as_trained, look_apart
from ._batch_norm import BroadcastBuffers, SynchronisedBatchNorm, normalise, synchronise
from ._coupling import form_of, samples_paired
from ._data_parallel import DataParallel, living, loops_set_aside
from ._exchanged import ExchangedSamples
from ._forward_state import ForwardState, StateProbe, tell
from ._fully_sharded import FullySharded, blocks, gathered
from ._hooks import changes_gradient, has_own_hooks, is_nonlinear, scale_gradients
from ._kept import own
from ._overlap import on_several_hosts
from ._reducer import GradientReducer
from ._replica_marks import ReplicaMarks
from ._sample_numbers import SampleNumbers, StageNumbers, draws_of
from ._strategy import Replicated, ShardingStrategy
from ._zero import ShardedOptimizer
from .relaxed._relaxation import Relaxation

__all__ = [
    "LESS_RANDOM", "PADDED", "BroadcastBuffers", "DataParallel", "ExchangedSamples", "ForwardState", "FullySharded",
    "GradientReducer", "Relaxation", "ReplicaMarks", "Replicated", "SampleNumbers", "ShardedOptimizer",
    "ShardingStrategy", "StageNumbers", "StateProbe", "SynchronisedBatchNorm", "as_evaluated", "as_trained", "blocks",
    "changes_gradient", "draws_of", "form_of", "gathered", "has_own_hooks", "is_nonlinear", "living", "look_apart",
    "loops_set_aside", "normalise", "on_several_hosts", "own", "samples_paired", "scale_gradients", "synchronise",
    "tell",
]  # fmt: skip
