"""GPT: a Transformer decoder that predicts the next byte.

Radford et al. 2019 ("Language models are unsupervised multitask learners"): normalisation before each branch, GELU,
learned positions, and one table for reading tokens and for predicting them. Tokens are bytes, 256 in all.
"""

import math

import torch
from torch import Tensor, nn

from hocket.workloads._attention import Attention, FeedForward
from hocket.workloads.language_model.settings import SIZES, Size

VOCABULARY = 256
_INITIAL_SPREAD = 0.02  # standard deviation of weights at the start, as in GPT-2


class Block(nn.Module):
    """Attention and a two-layer network, each beside a shortcut. Shape (N, T, width) is kept."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = Attention(size.width, size.heads, causal=True)
        self.before_network = nn.LayerNorm(size.width)
        self.network = FeedForward(size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what earlier positions say, then what follows from it."""
        normal = self.before_attention(x)
        x = x + self.attention(normal, normal)
        result: Tensor = x + self.network(self.before_network(x))
        return result


class GPT(nn.Module):
    """(N, T) bytes as int64 to (N, T, 256) scores of the byte that comes after each; T is at most the context.

    Args:
        size: One of `SIZES`, or a `Size` of your own.

    Raises:
        ValueError: ``size`` has no such name.
    """

    def __init__(self, size: str | Size = "demo") -> None:
        super().__init__()
        if isinstance(size, str):
            if size not in SIZES:
                raise ValueError(f"GPT: size {size!r} is not one of {', '.join(SIZES)}")
            size = SIZES[size]
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) * _INITIAL_SPREAD)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_SPREAD)
        for name, parameter in self.named_parameters():
            # What is added to the shortcut adds up over the layers; GPT-2 starts it smaller for that.
            if name.endswith(("attention.output.weight", "network.narrow.weight")):
                nn.init.normal_(parameter, std=_INITIAL_SPREAD / math.sqrt(2 * size.layers))
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next byte at every position."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores
