"""Scales what flows back through the outputs of a model."""

from __future__ import annotations

from typing import Any

import torch

from ..batches import trees as _trees


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.clone()  # a loop may go on to change the output in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return (gradient * ctx.factor if ctx.factor else torch.zeros_like(gradient)), None


def scale_gradients(output: Any, factor: float) -> Any:
    """A structure like `output` whose tensors have the same values and `factor` times the gradient.

    Raises:
        TypeError: there is no tensor with a gradient in `output` that could be reached.
    """
    scaled = 0

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal scaled
        if not tensor.requires_grad:
            return tensor
        scaled += 1
        result: torch.Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return result

    result = _trees.mapped(output, scale)
    if not scaled:
        raise TypeError(
            f"found no tensor that requires a gradient in the model's output of type {type(output).__name__}; "
            "return tensors in tuples, lists, mappings or dataclasses, so that hocket can weigh their gradients"
        )
    return result
