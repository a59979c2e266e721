"""Batches whose size is global: loaders, samplers, shares, random numbers, and walks through nested structures."""

from ._batch_shard import BatchShard as BatchShard
from ._batch_shard import fingerprint as fingerprint
from ._cut import BatchPart as BatchPart
from ._cut import BatchSplitter as BatchSplitter
from ._cut import Cutter as Cutter
from ._loader import DistributedLoader as DistributedLoader
from ._loader import ShardedLoader as ShardedLoader
from ._loader import SharedLoader as SharedLoader
from ._rng import RandomStream as RandomStream
from ._rng import RngStates as RngStates
from ._rng import mix as mix
from ._rng import restored as restored
from ._samples import Key as Key
from ._samples import RankSampler as RankSampler
from ._samples import SeededDataset as SeededDataset
from ._samples import each as each
from ._totals import average as average
from ._totals import total as total
from ._user_loader import expected_size as expected_size
from ._user_loader import inner_loader as inner_loader
from .trees import mapped as mapped
from .trees import samples_in as samples_in
from .trees import tensors_in as tensors_in

__all__ = [
    "BatchPart",
    "BatchShard",
    "BatchSplitter",
    "Cutter",
    "DistributedLoader",
    "Key",
    "RandomStream",
    "RankSampler",
    "RngStates",
    "SeededDataset",
    "ShardedLoader",
    "SharedLoader",
    "average",
    "each",
    "expected_size",
    "fingerprint",
    "inner_loader",
    "mapped",
    "mix",
    "restored",
    "samples_in",
    "tensors_in",
    "total",
]
