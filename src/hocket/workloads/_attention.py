"""Multi-head attention, and the two-layer network that stands beside it in a Transformer (arXiv:1706.03762)."""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Looks up, for each position of one sequence, what positions of another say.

    Args:
        width: Channels; a multiple of ``heads``.
        heads: Look-ups that are made side by side, each on its part of the channels.
        causal: Whether position i may look at positions 0..i only.

    Raises:
        ValueError: ``width`` is no multiple of ``heads``.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"Attention: width {width} is not a multiple of {heads} heads")
        self.head_width = width // heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map positions (N, T, width) that ask and a memory (N, S, width) to (N, T, width).

        ``visible``, broadcastable to (N, heads, T, S), is False where the memory must not be looked at.
        """
        query, key, value = self._heads(self.query(x)), self._heads(self.key(memory)), self._heads(self.value(memory))
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=self.causal)
        result: Tensor = self.output(found.transpose(1, 2).flatten(-2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape (N, T, width) to (N, heads, T, head_width)."""
        split: Tensor = x.unflatten(-1, (-1, self.head_width))  # type: ignore[no-untyped-call]
        return split.transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to the same shape."""
        result: Tensor = self.narrow(F.gelu(self.widen(x)))
        return result
