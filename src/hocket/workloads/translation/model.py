"""The Transformer: an encoder that reads a sentence, and a decoder that writes another, token by token.

Vaswani et al. 2017 (arXiv:1706.03762), with normalisation before each branch instead of after it, and learned
positions.
"""

import torch
from torch import Tensor, nn

from hocket.workloads._attention import Attention, FeedForward
from hocket.workloads.translation.settings import Size

PADDING, BEGIN, END = 0, 1, 2
"""Tokens that are no words: what fills a sentence up, and where it begins and ends."""


class EncoderBlock(nn.Module):
    """Attention to the sentence itself, and a two-layer network. Shape (N, S, width) is kept."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = Attention(size.width, size.heads)
        self.before_network = nn.LayerNorm(size.width)
        self.network = FeedForward(size.width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """``visible``, (N, 1, 1, S), is False for padding."""
        normal = self.before_attention(x)
        x = x + self.attention(normal, normal, visible)
        result: Tensor = x + self.network(self.before_network(x))
        return result


class DecoderBlock(nn.Module):
    """Attention to what is written so far and to what was read, and a two-layer network. (N, T, width) is kept."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_own = nn.LayerNorm(size.width)
        self.own = Attention(size.width, size.heads, causal=True)
        self.before_other = nn.LayerNorm(size.width)
        self.other = Attention(size.width, size.heads)
        self.before_network = nn.LayerNorm(size.width)
        self.network = FeedForward(size.width)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """``memory``, (N, S, width), is the encoder's output; ``visible``, (N, 1, 1, S), is False for padding."""
        normal = self.before_own(x)
        x = x + self.own(normal, normal)
        x = x + self.other(self.before_other(x), memory, visible)
        result: Tensor = x + self.network(self.before_network(x))
        return result


class Transformer(nn.Module):
    """Sentences (N, S) and translations so far (N, T) to scores (N, T, words) of the next word at each position.

    Args:
        size: How large.
        source_words, target_words: Tokens that there are.
        source_length, target_length: Most tokens in a sentence.
    """

    def __init__(
        self, size: Size, *, source_words: int, target_words: int, source_length: int, target_length: int
    ) -> None:
        super().__init__()
        self.source_tokens = nn.Embedding(source_words, size.width)
        self.source_positions = nn.Parameter(torch.randn(source_length, size.width))
        self.encoder = nn.ModuleList(EncoderBlock(size) for _ in range(size.layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.target_tokens = nn.Embedding(target_words, size.width)
        self.target_positions = nn.Parameter(torch.randn(target_length, size.width))
        self.decoder = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        self.decoder_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, target_words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Score the word that comes after each word of ``target``."""
        visible = (source != PADDING)[:, None, None, :]
        return self.decode(target, self.encode(source, visible), visible)

    def encode(self, source: Tensor, visible: Tensor) -> Tensor:
        """Read sentences: (N, S) to (N, S, width)."""
        x = self.source_tokens(source) + self.source_positions[: source.shape[1]]
        for block in self.encoder:
            x = block(x, visible)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def decode(self, target: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """Write on: (N, T) and what was read to scores (N, T, words)."""
        x = self.target_tokens(target) + self.target_positions[: target.shape[1]]
        for block in self.decoder:
            x = block(x, memory, visible)
        scores: Tensor = self.head(self.decoder_norm(x))
        return scores

    def translate(self, source: Tensor, length: int) -> Tensor:
        """Return the most likely word each time: (N, S) to (N, length); what comes after an `END` means nothing."""
        visible = (source != PADDING)[:, None, None, :]
        memory = self.encode(source, visible)
        target = torch.full((len(source), 1), BEGIN, dtype=torch.int64, device=source.device)
        for _ in range(length):
            following = self.decode(target, memory, visible)[:, -1:].argmax(dim=-1)
            target = torch.cat([target, following], dim=1)
        return target[:, 1:]
