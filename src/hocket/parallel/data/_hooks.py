"""What hangs on parameters: a hook for a gradient that is complete, and one for a gradient on its way."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch


class Receiver(Protocol):
    """Who wants to know that a gradient is complete."""

    def ready(self, number: int, parameter: torch.Tensor) -> None:
        """The gradient of parameter `number` is complete."""


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


def remove(hooks: dict[int, Any]) -> None:
    """Takes hooks off their parameters."""
    for hook in hooks.values():
        hook.remove()
