"""Tensor parallelism of any module: layers cut over ranks, found by running the model on a sample."""

from ._numbers import align as align
from ._numbers import own_numbers as own_numbers
from ._parallelize import LayerDecision as LayerDecision
from ._parallelize import ParameterCut as ParameterCut
from ._parallelize import TensorParallel as TensorParallel
from ._parallelize import is_leaf as is_leaf
from ._parallelize import parallelize as parallelize

__all__ = ["ParameterCut", "LayerDecision", "TensorParallel", "align", "is_leaf", "own_numbers", "parallelize"]
