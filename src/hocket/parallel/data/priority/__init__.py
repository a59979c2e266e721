"""Gradients of the layers that are needed first are averaged first, while the next forward pass has begun already."""

from ._chunks import Chunk, Stretch, cut, order
from ._prioritised import Prioritised

__all__ = ["Chunk", "Prioritised", "Stretch", "cut", "order"]
