"""nn.MultiheadAttention with a part of the heads on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hocket.sharding import Shard, as_local, cut, gathered

from ._functions import gather, reduce_from
from ._layers import LayerPartition
from ._numbers import own_numbers


class CutMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention: projections in are column parallel, by heads; the projection out is row parallel."""

    form: LayerPartition  # what is cut
    weights_used: bool  # whether the attention weights, which cost a collective operation more, are used by the model

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do as nn.MultiheadAttention does; attention weights are None where the model was seen not to use them."""
        with as_local():
            return self._attend(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        need_weights: bool,
        attn_mask: torch.Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        form, world = self.form, self.form.world
        key_padding_mask, attn_mask = _whole(key_padding_mask), _whole(attn_mask)
        alike = key is query and value is key
        batched = query.dim() == 3
        heads = self.num_heads // world.size
        q, k, v = self._project(query, key, value, alike)
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q, k, v = (t.unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))

        need_weights = need_weights and self.weights_used
        # The hint tells that the mask is the causal one, which attention then knows without being given it.
        hint = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        mask = None if hint else self._mask(attn_mask, key_padding_mask, q)
        p = self.dropout if self.training else 0.0
        weights = None
        with own_numbers(world, q.device) if p > 0 else nullcontext():
            if need_weights:
                scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
                weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
                y = weights @ v
            else:
                y = F.scaled_dot_product_attention(q, k, v, mask, p, hint)
        y = y.transpose(1, 2).flatten(2)
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        out = form.leave(F.linear(y, self.out_proj.weight), self.out_proj.bias)
        if weights is not None:
            if average_attn_weights:
                weights = reduce_from(world, weights.sum(1)) / self.num_heads
            else:
                weights = gather(world, weights, Shard.even(1, self.num_heads, world.size))
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, alike: bool) -> Any:
        """Return this rank's heads of queries, keys and values."""
        copies: dict[int, torch.Tensor] = {}
        for place, tensor in enumerate((query, key, value)):
            if id(tensor) not in copies:
                copies[id(tensor)] = self.form.enter(tensor, min(place, len(self.form.shared) - 1))
        bias: Any = self.in_proj_bias
        if self._qkv_same_embed_dim and alike:
            return F.linear(copies[id(query)], self.in_proj_weight, bias).chunk(3, -1)
        if self._qkv_same_embed_dim:
            matrices: Any = self.in_proj_weight.chunk(3)
        else:
            matrices = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None, None, None) if bias is None else bias.chunk(3)
        given = (query, key, value)
        return [F.linear(copies[id(t)], m, b) for t, m, b in zip(given, matrices, biases, strict=True)]

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor
    ) -> torch.Tensor | None:
        """Join both masks to one to add to the scores: (batch or 1, this rank's heads or 1, queries or 1, keys)."""
        total = None
        if attn_mask is not None:
            total = _added(attn_mask, q.dtype)
            if total.dim() == 3:
                total = total.view(-1, self.num_heads, *total.shape[1:])
                world = self.form.world
                total = cut(total, Shard.even(1, self.num_heads, world.size), world.rank)
        if padding is not None:
            keys = _added(padding, q.dtype)[:, None, None, :]
            total = keys if total is None else total + keys
        return total

    def extra_repr(self) -> str:
        """Return how it is cut."""
        return f"{self.num_heads} heads, parallel over {self.form.world.size}"


def _whole(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else gathered(mask)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
