"""Torch's types, operators and memory in the terms of the aggregator's protocol."""

from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from hocket.aggregator import ElementType, Operator

from ..transport import ReduceOperator

_OPERATORS = {
    ReduceOp.SUM: Operator.SUM,
    ReduceOp.MIN: Operator.MIN,
    ReduceOp.MAX: Operator.MAX,
    ReduceOp.BAND: Operator.BAND,
    ReduceOp.BOR: Operator.BOR,
    ReduceOp.BXOR: Operator.BXOR,
}
_ELEMENTS = {
    torch.int8: ElementType.INT8,
    torch.uint8: ElementType.UINT8,
    torch.int16: ElementType.INT16,
    torch.uint16: ElementType.UINT16,
    torch.int32: ElementType.INT32,
    torch.uint32: ElementType.UINT32,
    torch.int64: ElementType.INT64,
    torch.uint64: ElementType.UINT64,
    torch.float16: ElementType.FLOAT16,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
}


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
