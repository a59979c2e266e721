"""Modules of which something cannot be cut, or is guessed wrongly at first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations


class Centered(torch.autograd.Function):
    """Looks like a copy; its gradient depends on all features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] - gradients[0].mean(-1, keepdim=True)


class Deceptive(nn.Module):
    """Two MLPs, of which one cannot be cut where the rule of cumsum is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(F.relu(self.a(x))).sin()
        return x + self.d(self.c(x.sum(-1, keepdim=True) + x).cumsum(-1))


class OwnFunction(Deceptive):
    """An autograd function of the user's, whose backward needs all features, between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(F.relu(self.a(x))).sin()
        return x + self.d(Centered.apply(self.c(x.sum(-1, keepdim=True) + x)))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.nine = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(9, 9))
        self.spectral = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.indivisible = nn.Linear(9, 7)
        self.row_only = nn.Linear(8, 9)
        self.outside = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.sorting, self.sorted = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attn = nn.MultiheadAttention(9, 3, batch_first=True)
        self.words = nn.Embedding(6, 8, max_norm=1.0)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, hard: bool = False) -> torch.Tensor:
        x = x + self.words(ids)
        x = F.linear(x, self.own)
        x = self.outside(x) + self.outside.weight.sum()
        x = self.spectral(self.normed(x))
        if hard:
            x = self.unused(x)
        x = self.sorted(self.sorting(x).sort(dim=-1).values)
        x = self.row_only(x)
        x, _ = self.attn(x, x, x)
        return self.indivisible(x @ self.nine)


class Dropping(nn.Module):
    """Dropout where tensors are whole, where they are cut, and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Dropout(0.5)
        self.up, self.inside, self.down = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attn = nn.MultiheadAttention(8, 4, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        x = x + self.down(self.inside(self.up(x)))
        b, t, c = x.shape
        q, k, v = (z.view(b, t, 4, 2).transpose(1, 2) for z in self.qkv(x).split(c, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.attn(x, x, x, need_weights=False)[0]
