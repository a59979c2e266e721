"""How far results that ought to be equal may be apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from hocket.comm import torch_adapter

from ..batches import tensors_in

_ROWS = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Relative to the largest element, by the precision of parameters: what sums in another order never reach."""

_SCALARS = {torch.float64: 1e-6, torch.float32: 1e-4}

_LOW = 5e-2
"""Where some layer gives half precision: a few of its roundings."""


class Tolerances:
    """How far results may be apart, by the lowest precision of parameters and of what layers give."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._types = {one.dtype for one in module.parameters() if one.is_floating_point()} or {torch.float32}
        self._device = next((one.device.type for one in module.parameters()), "cpu")
        # Convolutions on GPUs round float32 to TF32, unless the program forbids it.
        self._low = self._device != "cpu" or any(dtype not in _ROWS for dtype in self._types)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Open a block in which layers may show that they compute in half precision, and autocast outside is off."""

        def note(_: Any, __: Any, output: Any) -> None:
            self._low |= any(t.is_floating_point() and t.dtype not in _ROWS for t in tensors_in(output))

        handle = register_module_forward_hook(note)
        try:
            with torch.autocast(self._device, enabled=False), torch_adapter.uncompiled():
                yield
        finally:
            handle.remove()

    def close(self, one: torch.Tensor, other: torch.Tensor, times: float = 1.0) -> bool:
        """Return whether two tensors are equal but for rounding."""
        return one.shape == other.shape and (not one.numel() or distance(one, other) <= times * self.of(one))

    def of(self, one: torch.Tensor) -> float:
        """Return how far a tensor may be off, relative."""
        return _LOW if self._low else max((_ROWS if one.dim() else _SCALARS)[dtype] for dtype in self._types)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors' elements, relative to the largest element."""
    a, b = one.detach().double(), other.detach().double()
    return float((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-30))
