"""Data parallelism: gradients averaged, and state replicated or sharded (ZeRO), compressed, prioritised or relaxed."""

from ._batch_norm import normalise as normalise
from ._batch_norm import synchronise as synchronise
from ._blocks import blocks as blocks
from ._buffers import Buffers as Buffers
from ._data_parallel import DataParallel as DataParallel
from ._data_parallel import living as living
from ._fully_sharded import FullySharded as FullySharded
from ._overlap import on_several_hosts as on_several_hosts
from ._reducer import Reducer as Reducer
from ._replicas import Form as Form
from ._replicas import Replicas as Replicas
from ._scale import scale_gradients as scale_gradients
from ._scattered import Scattered as Scattered
from .relaxed._relaxation import Relaxation as Relaxation

__all__ = [
    "Buffers",
    "DataParallel",
    "Form",
    "FullySharded",
    "Reducer",
    "Relaxation",
    "Replicas",
    "Scattered",
    "blocks",
    "living",
    "normalise",
    "on_several_hosts",
    "scale_gradients",
    "synchronise",
]
