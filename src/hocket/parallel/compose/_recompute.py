"""Computes activations again in back-propagation instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from hocket.sharding import as_local

from ..data import blocks
from ..partition.tensor import reading_cut_parameters
from ..pipeline import checkpointed
from ._forward import replace_forward


def recompute(module: torch.nn.Module) -> list[str]:
    """Have each block of `module` keep only its inputs, and compute the rest again; return the blocks' names.

    An embedding that is a block by itself keeps nothing but its inputs anyway.
    """
    names = []
    for name, block in blocks(module):
        if type(block) in (torch.nn.Embedding, torch.nn.EmbeddingBag):
            continue
        replace_forward(block, _again)
        names.append(name)
    return names


def _again(forward: Callable[..., Any], block: torch.nn.Module) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        divided = torch._C._is_torch_function_enabled()  # not where hooks of a divided layer have it mean its shards

        def within(*args: Any, **kwargs: Any) -> Any:
            # In back-propagation, too, outside of the model's forward.
            with reading_cut_parameters(), nullcontext() if divided else as_local():
                return forward(*args, **kwargs)

        return checkpointed(within, block, *args, **kwargs)

    return again
