"""A plan carried out on a model: the Trainer, `distribute()`, and what they are composed of."""

from ._distribute import distribute, shard
from ._garbage import old_objects_set_aside
from ._preemption import Preemption
from ._resume import resume
from ._trainer import Trainer, without_loss_check

__all__ = ["Preemption", "Trainer", "distribute", "old_objects_set_aside", "resume", "shard", "without_loss_check"]
