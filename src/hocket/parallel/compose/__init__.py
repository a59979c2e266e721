"""A plan carried out on a model: the Trainer, `distribute()`, and what they are composed of."""

from ._distribute import distribute, shard
from ._preemption import Preemption
from ._resume import resume
from ._trainer import Trainer

__all__ = ["Preemption", "Trainer", "distribute", "resume", "shard"]
