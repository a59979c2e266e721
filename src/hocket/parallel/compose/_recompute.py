"""Computes activations again in back-propagation instead of keeping them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..data import blocks
from ..partition.tensor import reading_cut_parameters
from ..pipeline import checkpointed


def recompute(module: torch.nn.Module) -> list[str]:
    """Have each block of `module` keep only its inputs, and compute the rest again when gradients are wanted.

    Returns:
        The names of the blocks.
    """
    names = []
    for name, block in blocks(module):
        forward = block.forward

        @functools.wraps(forward)
        def again(*args: Any, _forward: Any = forward, _block: torch.nn.Module = block, **kwargs: Any) -> Any:
            def within(*args: Any, **kwargs: Any) -> Any:
                with reading_cut_parameters():  # in back-propagation, too, outside of the model's forward
                    return _forward(*args, **kwargs)

            return checkpointed(within, _block, *args, **kwargs)

        block.forward = again
        names.append(name)
    return names
