"""Torch's types, operators and memory in the terms of the aggregator's protocol."""

from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from hocket.aggregator import ElementType, Operator

from ..transport import ReduceOperator

_OPERATORS = {getattr(ReduceOp, one.name): one for one in Operator if hasattr(ReduceOp, one.name)}
_ELEMENTS = {getattr(torch, one.name.lower()): one for one in ElementType}


def wire_operator(op: ReduceOperator) -> Operator | None:
    """Return the aggregator's operator for what `op` does between ranks; None if it has none."""
    return _OPERATORS.get(op.engine_operator)


def wire_element(dtype: torch.dtype) -> ElementType | None:
    """Return the aggregator's type; None if it has none."""
    return _ELEMENTS.get(dtype)


def raw(flat: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a flat tensor as bytes."""
    if flat.stride(0) != 1:  # one element: any stride is contiguous, but not every one can be seen as bytes
        flat = flat.as_strided(flat.shape, (1,))
    array: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array
