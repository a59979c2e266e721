"""Computes activations again in back-propagation instead of keeping them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..data import blocks


def recompute(module: torch.nn.Module) -> list[str]:
    """Have each block of `module` keep only its inputs, and compute the rest again when gradients are wanted.

    Returns:
        The names of the blocks.
    """
    names = []
    for name, block in blocks(module):
        forward = block.forward

        @functools.wraps(forward)
        def again(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return _forward(*args, **kwargs)
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        block.forward = again
        names.append(name)
    return names
