"""Which parameters and buffers of a layer are cut, and how, by what the layer is in its region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ._regions import TRANSPOSED, Role
from ._split import Split


def cut_tensors(module: Any, role: Role) -> Iterator[tuple[torch.Tensor, Split]]:
    """The tensors of a layer of which every rank has a part, each with how it is cut; all others stay whole."""
    for tensor, split in _cut(module, role):
        if tensor is not None:
            yield tensor, split


def _cut(module: Any, role: Role) -> Iterator[tuple[torch.Tensor | None, Split]]:
    segments = role.split.segments
    if role.kind == "heads":
        size = module.embed_dim
        yield module.in_proj_weight, Split(0, (size,) * 3)
        yield module.in_proj_bias, Split(0, (size,) * 3)
        for matrix in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
            yield matrix, Split(0, (size,))
        yield module.out_proj.weight, Split(1, (size,))
    elif role.kind == "channels":
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(module, name, None)
            if tensor is not None:
                per_channel = tensor.shape[0] // sum(segments)
                yield tensor, Split(0, tuple(s * per_channel for s in segments))
    elif role.kind not in ("dropout", "summed"):
        table = type(module) is nn.Embedding
        output = role.kind == ("vocabulary" if table else "column")
        yield module.weight, Split(int(output == isinstance(module, TRANSPOSED)), segments)
        if role.kind == "column" and not table:
            yield module.bias, Split(0, segments)
