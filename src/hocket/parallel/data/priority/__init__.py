"""Gradients of the layers that are needed first are averaged first, while the next forward pass has begun already."""

from ._chunks import Chunk as Chunk
from ._chunks import Stretch as Stretch
from ._chunks import cut as cut
from ._chunks import order as order
from ._prioritised import Prioritised as Prioritised

__all__ = ["Chunk", "Prioritised", "Stretch", "cut", "order"]
