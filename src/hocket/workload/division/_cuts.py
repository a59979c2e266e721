"""Which parameters and buffers of a layer are cut, and how, by what the layer is in its region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hocket.sharding import Shard

from ._regions import TABLES, TRANSPOSED, Role


def cut_tensors(module: Any, role: Role) -> Iterator[tuple[torch.Tensor, Shard]]:
    """Yield the tensors of a layer of which every rank has a part, each with how it is cut; all others stay whole."""
    for tensor, split in _cut(module, role):
        if tensor is not None:
            yield tensor, split


def _cut(module: Any, role: Role) -> Iterator[tuple[torch.Tensor | None, Shard]]:
    segments, ranks = role.split.segments, role.split.ranks
    if role.kind == "heads":
        size = module.embed_dim
        yield module.in_proj_weight, Shard.even(0, (size,) * 3, ranks)
        yield module.in_proj_bias, Shard.even(0, (size,) * 3, ranks)
        for matrix in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
            yield matrix, Shard.even(0, size, ranks)
        yield module.out_proj.weight, Shard.even(1, size, ranks)
    elif role.kind == "hidden":
        for tensor in module.parameters(recurse=False):
            gates = tensor.shape[0] // module.hidden_size
            yield tensor, Shard.even(0, (module.hidden_size,) * gates, ranks)
    elif role.kind == "channels":
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(module, name, None)
            if tensor is not None:
                per_channel = tensor.shape[0] // sum(segments)
                yield tensor, Shard.even(0, [s * per_channel for s in segments], ranks)
    elif role.kind not in ("dropout", "summed"):
        table = type(module) in TABLES
        output = role.kind == ("vocabulary" if table else "column")
        yield module.weight, Shard.even(int(output == isinstance(module, TRANSPOSED)), segments, ranks)
        if role.kind == "column" and not table:
            yield module.bias, Shard.even(0, segments, ranks)
