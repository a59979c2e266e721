"""Small modules in the many ways in which people write attention, MLPs and convolutions, each with inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

D = 16


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, 24, bias=False), nn.Linear(D, 24, bias=False)
        self.w2 = nn.Linear(24, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(24, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, dim=-1)
        return self.down(a * torch.sigmoid(b))


class GLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(24, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.glu(self.up(x), dim=-1))


class SeparateHeads(nn.Module):
    """Queries, keys and values of their own, softmax by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.num_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_heads, -1).transpose(1, 2)
        mask = torch.tril(torch.ones(t, t, device=x.device)) == 0
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask, float("-inf"))
        y = scores.softmax(dim=-1) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, D))


class FusedViT(nn.Module):
    """One matrix for all three, taken apart by reshape, permute and unbind."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = 4, (D // 4) ** -0.5
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class PerHeadFused(nn.Module):
    """As in GPT-NeoX: the three lie side by side within each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.query_key_value(x)
        qkv = qkv.view(qkv.size(0), qkv.size(1), 4, 3 * D // 4).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.permute(0, 2, 1, 3).contiguous()
        return self.dense(y.view(y.size(0), y.size(1), -1))


class Llama(nn.Module):
    """Grouped queries, rotary positions, keys and values repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.dim = 8, 4, 4
        self.wq, self.wo = nn.Linear(D, 32, bias=False), nn.Linear(32, D, bias=False)
        self.wk, self.wv = nn.Linear(D, 16, bias=False), nn.Linear(D, 16, bias=False)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos[None, :, None, :] + torch.cat((-b, a), dim=-1) * sin[None, :, None, :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.dim)
        k, v = (w(x).view(b, t, self.n_kv, self.dim) for w in (self.wk, self.wv))
        angles = torch.outer(torch.arange(t), torch.tensor([1.0, 0.1])).to(x)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (z[:, :, :, None, :].expand(b, t, self.n_kv, 2, self.dim).reshape(b, t, -1, self.dim) for z in (k, v))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FusedGrouped(nn.Module):
    """One matrix for many queries and fewer keys and values, in slices; a norm within heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(D, 32 + 16 + 16), nn.Linear(32, D)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        qkv = self.wqkv(x)
        q, k, v = qkv[..., :32], qkv[..., 32:48], qkv[..., 48:]
        q = self.norm(q.unflatten(-1, (8, 4))).transpose(1, 2)
        k = self.norm(k.unflatten(-1, (4, 4))).transpose(1, 2)
        v = v.unflatten(-1, (4, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, 32))


class EinsumAttention(nn.Module):
    """Heads by einsum, a learned bias for each head, and a learned factor for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.bias = nn.Parameter(torch.randn(4, 6, 6))
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.unflatten(-1, (4, 4)) for z in self.qkv(x).split(D, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + self.bias
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return self.out(y.flatten(-2) * self.gain)


class TorchAttention(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True, **options)
        self.cross = nn.MultiheadAttention(D, 4, kdim=6, vdim=10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 4:] = True
        mask = torch.full((x.shape[0] * 4, x.shape[1], x.shape[1]), 0.5, dtype=x.dtype).tril()
        y, weights = self.attn(x, x, x, key_padding_mask=padding, attn_mask=mask)
        other = y.transpose(0, 1)
        y, _ = self.cross(other, other[..., :6], other[..., 6:], need_weights=False)
        return y, weights


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, 4:] = True
        return self.encoder(x, src_key_padding_mask=padding) * ~padding[..., None]


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.short = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


class Inverted(nn.Module):
    """As in MobileNet: a convolution of each channel between two of all channels; a channel-wise activation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depth = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm, self.act, self.project = nn.GroupNorm(4, 16), nn.PReLU(16), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.project(self.act(self.norm(self.depth(self.expand(x)))))


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.tail = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(F.pixel_shuffle(self.up(x), 2))


class Joined(nn.Module):
    """Two branches side by side, then one layer over both; one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 8), nn.Linear(D, 12)
        self.join, self.again = nn.Linear(20, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat([F.relu(self.a(x)), torch.tanh(self.b(x))], dim=-1))
        return self.again(F.relu(self.again(x)))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv3d(2, 8, 3, padding=1), nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.c3, self.head = nn.Conv1d(4, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c2(F.max_pool3d(F.leaky_relu(self.c1(x)), 2))
        return self.head(self.c3(x.flatten(2)).mean(-1))


class Curvature(nn.Module):
    """An output that depends on its own second derivatives by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = torch.func.vmap(torch.func.hessian(lambda one: self.net(one).sum()))(x.flatten(0, 1))
        return self.net(x) + second.view(*x.shape, -1).sum((-2, -1))[..., None]


class Tied(nn.Module):
    """An odd number of words: the common matrix of input and output can be cut by features only."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(words, D, padding_idx=1), nn.Linear(D, words)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class TransposedLinear(nn.Module):
    """As the linear layers of GPT-2: the weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.2), nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.outputs)


class TransposedAttention(nn.Module):
    """Queries, keys and values by one transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = TransposedLinear(D, 3 * D), TransposedLinear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.view(*x.shape[:-1], 4, -1).transpose(1, 2) for one in self.qkv(x).split(D, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(y.reshape(*x.shape))


class Experts(nn.Module):
    """Experts as parameters of three dims, chosen by the data: looped over, or one matrix for every token."""

    def __init__(self, looped: bool) -> None:
        super().__init__()
        self.looped = looped
        self.router = nn.Parameter(torch.randn(4, D))
        self.up, self.down = nn.Parameter(torch.randn(4, 48, D) * 0.2), nn.Parameter(torch.randn(4, D, 24) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(4, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, D)
        weights, chosen = F.linear(tokens, self.router).softmax(-1).topk(2)
        if not self.looped:
            total = torch.zeros_like(tokens)
            for k in range(2):
                up = (self.up[chosen[:, k]] @ tokens.unsqueeze(-1)).squeeze(-1) + self.up_bias[chosen[:, k]]
                gate, value = up.chunk(2, dim=-1)
                hidden = (F.silu(gate) * value).unsqueeze(-1)
                total = total + torch.bmm(self.down[chosen[:, k]], hidden).squeeze(-1) * weights[:, k, None]
            return total.view_as(x)
        total = torch.zeros_like(tokens)
        for expert in range(4):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            up = F.linear(tokens[rows], self.up[expert], self.up_bias[expert])
            gate, value = up[..., ::2], up[..., 1::2]
            out = F.linear(F.silu(gate) * value, self.down[expert]) * weights[rows, place, None]
            total = total.index_add(0, rows, out)
        return total.view_as(x)


class Direct(nn.Module):
    """Parameters of the module's own, in products of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.v, self.scale = (
            nn.Parameter(torch.randn(*shape) * 0.2) for shape in ((D, 24), (24,), (D, 24), (D,))
        )
        self.heads, self.out = nn.Parameter(torch.randn(D, 4, 6) * 0.2), nn.Parameter(torch.randn(4, 6, D) * 0.2)
        self.table, self.odd = nn.Parameter(torch.randn(7, D)), nn.Parameter(torch.randn(D, D) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.embedding(torch.arange(x.shape[1]), self.table)
        h = F.linear(F.gelu(x @ self.w + self.b), self.v) * self.scale
        q = torch.einsum("btd,dhe->bhte", h, self.heads)
        a = F.softmax(q @ q.transpose(-1, -2), -1) @ q
        return torch.einsum("bhte,heo->bto", a, self.out).sort(-1).values @ self.odd.t()


class Recurrent(nn.Module):
    """A recurrent layer of which everything is used."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, states = self.layer(x)
        for state in states if isinstance(states, tuple) else (states,):
            y = y + state.sum((0, 1)).repeat(y.shape[-1] // state.shape[-1])
        y, _ = self.layer(x.sin(), states)
        return y.sin() + torch.stack(states).sum() if isinstance(states, tuple) else y.sin() + states.sum()


class Cells(nn.Module):
    """Loops over steps."""

    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for cell in self.cells:
            state = None
            for step in x.unbind(1):
                state = cell(step, state)
            found += list(state) if isinstance(state, tuple) else [state]
        return torch.cat(found, -1)


class WeightNormed(nn.Module):
    """Weights made of directions and lengths: by a parametrization, or by the hook of old."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.c = norm(nn.Linear(D, 24)), norm(nn.Linear(24, D)), norm(nn.Conv1d(6, 8, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(self.b(F.relu(self.a(x)))).tanh()
        return y


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 6, D),)


def _pictures() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 8, 6, 6),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "gated_mlp": (GatedMLP, _tokens),
    "fused_gate": (FusedGate, _tokens),
    "glu": (GLU, _tokens),
    "separate_heads": (SeparateHeads, _tokens),
    "fused_vit": (FusedViT, _tokens),
    "per_head_fused": (PerHeadFused, _tokens),
    "llama": (Llama, _tokens),
    "fused_grouped": (FusedGrouped, _tokens),
    "einsum_attention": (EinsumAttention, _tokens),
    "torch_attention": (TorchAttention, _tokens),
    "encoder": (Encoder, _tokens),
    "bottleneck": (Bottleneck, _pictures),
    "inverted": (Inverted, _pictures),
    "upsampler": (Upsampler, _pictures),
    "joined": (Joined, _tokens),
    "transposed": (lambda: nn.Sequential(TransposedLinear(D, 24), nn.GELU(), TransposedLinear(24, D)), _tokens),
    "transposed_attention": (TransposedAttention, _tokens),
    "experts_looped": (lambda: Experts(True), _tokens),
    "experts_batched": (lambda: Experts(False), _tokens),
    "direct": (Direct, _tokens),
    "lstm": (lambda: Recurrent(nn.LSTM(D, 8, 2, bidirectional=True)), _tokens),
    "gru": (lambda: Recurrent(nn.GRU(D, 8, batch_first=True)), _tokens),
    "rnn": (lambda: Recurrent(nn.RNN(D, 8, 2, nonlinearity="relu", bias=False)), _tokens),
    "cells": (lambda: Cells([nn.LSTMCell(D, 8), nn.GRUCell(D, 8), nn.RNNCell(D, 8)]), _tokens),
    "bags": (lambda: nn.EmbeddingBag(12, 8, mode="mean"), lambda: (torch.randint(0, 12, (3, 6)),)),
    "weight_norm": (lambda: WeightNormed(nn.utils.parametrizations.weight_norm), _tokens),
    "curvature": (Curvature, _tokens),
    "volume": (Volume, lambda: (torch.randn(2, 2, 4, 4, 4),)),
    "tied_odd": (lambda: Tied(11), lambda: (torch.randint(0, 11, (3, 6)),)),
    "tied_even": (lambda: Tied(12), lambda: (torch.randint(0, 12, (3, 6)),)),
}
