"""A plan carried out on a model: the Trainer, `distribute()`, and what they are composed of."""

from ._distribute import distribute, shard
from ._trainer import Trainer

__all__ = ["Trainer", "distribute", "shard"]
