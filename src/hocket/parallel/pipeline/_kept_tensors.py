"""Runs of a model that leave its buffers, gradients and random numbers as before, and keep few gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import torch

from hocket.workload.division import without_gradients

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
def tensors_unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Open a block after which buffers, gradients and torch's random numbers are as before; all else may go on."""
    homes = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    found = {id(one): one for _, own in homes for one in own.values() if one is not None}.values()
    buffers = [(buffer, buffer.detach().clone()) for buffer in found]
    with without_gradients(model):
        try:
            yield
        finally:
            for module, own in homes:
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
