"""A plan carried out on a model: the Trainer, `distribute()`, and what they are composed of."""

from ._distribute import distribute as distribute
from ._distribute import shard as shard
from ._trainer import Trainer as Trainer

__all__ = ["Trainer", "distribute", "shard"]
