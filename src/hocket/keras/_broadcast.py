"""Broadcasts of rank 0's weights, seeds, optimizer state and random numbers, and what rank 0 does alone."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from hocket.parallel.mesh import World
from hocket.parallel.state import broadcast_tensors

from . import _private
from ._zero import ZeroOptimizer, unbuilt


class StateBroadcast:
    """Keeps a Keras model and its optimizer the same on all ranks, but for what is sharded.

    With `shard`, the optimizer's state is sharded among them.
    """

    gathers = False
    """Whether ranks train weights that others do not."""

    def __init__(self, model: Any, world: World, *, shard: bool) -> None:
        self.model = model
        self.world = world
        self.aligned = False
        self.zero_optimizer: ZeroOptimizer | None = None
        self._shards_optimizer = shard and world.size > 1

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self, data: Any, steps: int | None, *, compiled: bool = True) -> None:
        """Make Keras build what is not built yet, by a batch of `data`, a data adapter; Keras' verbs rewind it."""
        self.build_with(iterator=_private.TorchEpochIterator(x=data, steps_per_epoch=steps), compiled=compiled)

    def build_with(self, *, compiled: bool = True, **kwargs: Any) -> None:
        """Build by arguments of Keras' own method; an optimizer that is to be sharded is left out.

        Without `compiled` the model alone is built, as there are no targets for the losses and metrics.

        Keras' verb does not do so a second time, which would take another batch, and random numbers, where a
        `compute_loss` of the program's own leaves Keras' loss unbuilt for ever.
        """
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        names = () if compiled else ("_compile_loss", "_compile_metrics", "optimizer")
        apart = {name: vars(model)[name] for name in names if name in vars(model)}
        vars(model).update(dict.fromkeys(names))
        try:
            with unbuilt(optimizer) if self._shards_optimizer and optimizer is not None else nullcontext():
                type(model)._symbolic_build(model, **kwargs)
        finally:
            for name in names:
                del vars(model)[name]
            vars(model).update(apart)
        model.__dict__["_symbolic_build"] = lambda **_: model.__dict__.pop("_symbolic_build", None)

    def shard_optimizer(self) -> None:
        """Shard the optimizer's state over ranks, if that is wanted and not so yet; a collective operation."""
        if not self._shards_optimizer:
            return
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        if self.zero_optimizer is None or not self.zero_optimizer.holds(optimizer, variables):
            self.zero_optimizer = None
            self.align()
            self.zero_optimizer = ZeroOptimizer(optimizer, variables, self.world)

    # --- as rank 0 --------------------------------------------------------------------------------------------------

    def align(self) -> None:
        """Give all ranks rank 0's weights, seeds and optimizer state; a collective operation."""
        self.aligned = True
        if self.world.size == 1:
            return
        state: list[Any] = []
        optimizer = getattr(self.model, "optimizer", None)
        if self.zero_optimizer is not None and self.zero_optimizer.optimizer is optimizer:
            self.zero_optimizer.scatter()
        elif optimizer is not None and self.world.from_root(bool(optimizer.built)):
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            state = optimizer.variables
        values = {id(v): v.value.detach() for v in [*self.model.variables, *state]}
        broadcast_tensors([value for value in values.values() if value.numel()], self.world)

    def send_state(self) -> None:
        """Give all ranks what rank 0's layers keep besides their weights (moving averages); a collective operation."""
        values = [v.value.detach() for v in self.model.non_trainable_variables]
        if self.world.size > 1 and values:
            broadcast_tensors([value for value in values if value.numel()], self.world)

    def align_once(self) -> None:
        """Align, unless it has been done since the model was compiled; a collective operation."""
        if not all(self.world.from_all(self.aligned)):
            self.align()

    def gather(self) -> None:
        """Give every rank the weights that others have trained, where these are sharded; a collective operation."""

    def collect(self) -> None:
        """Put a sharded optimizer's state together on rank 0; a collective operation."""
        if self.zero_optimizer is not None and self.zero_optimizer.optimizer is self.model.optimizer:
            self.zero_optimizer.collect()

    def agree_on_random_numbers(self) -> None:
        """Have all ranks go on with rank 0's random numbers, and draw as many: for shuffling, and for dropout."""
        if self.world.size == 1:
            return
        numpy_random: Any = np.random
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        mine = (torch.get_rng_state(), random.getstate(), numpy_random.get_state(), cuda)
        torch_state, python_state, numpy_state, cuda = self.world.from_root(mine)
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy_random.set_state(numpy_state)
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)

    def on_root(self, work: Callable[[], Any]) -> None:
        """Run `work` on rank 0 while the others wait; a collective operation.

        Raises:
            Exception: whatever `work` has raised, on rank 0.
            OSError: on other ranks, with what rank 0 has raised.
        """
        problem: str | None = None
        error: Exception | None = None
        if self.world.rank == 0:
            try:
                work()
            except Exception as caught:
                error, problem = caught, f"{type(caught).__name__}: {caught}"
        problem = self.world.from_root(problem)
        if error is not None:
            raise error
        if problem is not None:
            raise OSError(f"rank 0 could not read or write the model's file: {problem}")
