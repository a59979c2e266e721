"""Hooks on gradients: for one that is complete, and to scale one on its way, at a parameter or at a model's output."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..batches import trees as _trees


class Receiver(Protocol):
    """Who wants to know that a gradient is complete."""

    def ready(self, number: int, parameter: torch.Tensor) -> None:
        """Take notice that the gradient of parameter `number` is complete."""


class Ready:
    """The hook of one parameter; it does not keep the receiver alive."""

    def __init__(self, receiver: Receiver, number: int) -> None:
        self._receiver = weakref.ref(receiver)
        self._number = number

    def __call__(self, parameter: torch.Tensor) -> None:
        receiver = self._receiver()
        if receiver is not None:
            receiver.ready(self._number, parameter)


class Scale:
    """A hook that scales gradients on their way to `.grad`."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        # What weighs nothing must not be heard of even if it is infinite.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)


def weak_hook(call: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Return a hook that calls a bound method with `arguments` alone, and does not keep the method's object alive."""
    reference = weakref.WeakMethod(call)

    def hook(*_: Any) -> None:
        method = reference()
        if method is not None:
            method(*arguments)

    return hook


def remove(hooks: dict[int, Any]) -> None:
    """Take hooks off their parameters."""
    for hook in hooks.values():
        hook.remove()


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
    """Return a structure like `output` whose tensors have the same values and `factor` times the gradient.

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
