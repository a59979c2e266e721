"""Runs a model without a trace: its buffers, gradients and random numbers are as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import torch

from ..state import is_deferred

Tensor = torch.Tensor
_SAMPLED: Final = 4096  # elements of a large gradient that are compared


@contextlib.contextmanager
def without_large_gradients(model: torch.nn.Module, kept: dict[str, torch.Tensor] | None = None) -> Iterator[None]:
    """Open a block where gradients of parameters without memory are dropped as they come, but for a few in `kept`."""

    def sampled(name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if kept is not None:
                few = parameter.grad.flatten()[:: 1 + parameter.numel() // _SAMPLED].clone()
                kept[name] = kept[name] + few if name in kept else few
            parameter.grad = None

        return take

    large = [(name, p) for name, p in model.named_parameters() if is_deferred(p) and p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(sampled(name)) for name, p in large]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Open a block after which buffers, gradients and the state of the random numbers are put back as they were."""
    modules = list(model.modules())
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}.values()
    devices = sorted({p.device for p in parameters if p.is_cuda}, key=str)
    homes = [(module, dict(module._buffers)) for module in modules if module._buffers]
    found = {id(one): one for _, own in homes for one in own.values() if one is not None}.values()
    buffers = [(buffer, buffer.detach().clone()) for buffer in found]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, own in homes:
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
