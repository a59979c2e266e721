"""Tensor parallelism of any module: layers cut over ranks, found by running the model on a sample."""

from ._numbers import align, own_numbers
from ._parallelize import LayerDecision, ParameterCut, TensorParallel, is_leaf, parallelize
from ._peers import CutParameters, reading_cut_parameters

__all__ = [
    "CutParameters", "LayerDecision", "ParameterCut", "TensorParallel", "align", "is_leaf", "own_numbers",
    "parallelize", "reading_cut_parameters",
]  # fmt: skip
