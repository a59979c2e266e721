"""The compressors by the names that plans use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hocket.planner import parse_compression

from ._cast import Bf16, Fp16
from ._compressor import Compressor
from ._int8 import Int8
from ._onebit import OneBit
from ._powersgd import PowerSgd
from ._terngrad import TernGrad
from ._topk import TopK

COMPRESSORS: Mapping[str, Callable[..., Compressor]] = MappingProxyType(
    {kind.name: kind for kind in (Fp16, Bf16, Int8, TopK, OneBit, TernGrad, PowerSgd)}
)
"""What makes a compressor, by the method's name; it takes the parameter, where the method has one."""


def compressor(text: str) -> Compressor | None:
    """Return the compressor that a plan's `compression` names, as "int8" or "topk:0.01"; None for "none".

    Raises:
        ValueError: there is no such method, or its parameter makes no sense.
    """
    spec = parse_compression(text)
    if spec is None:
        return None
    values: list[Any] = [] if spec.value is None else [spec.value]
    return COMPRESSORS[spec.method](*values)
