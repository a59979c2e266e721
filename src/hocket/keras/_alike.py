"""Ranks alike: weights, seeds, optimizer state and random numbers as rank 0 has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from hocket.parallel.mesh import World
from hocket.parallel.state import broadcast_tensors

from . import _private
from ._divided import DividedOptimizer, unbuilt


class Alike:
    """Keeps a Keras model and its optimizer the same on all ranks, but for what is divided.

    Args:
        model: the Keras model.
        world: the ranks.
        divide: whether the optimizer's state is to be divided among them.
    """

    gathers = False
    """Whether ranks train weights that others do not."""

    def __init__(self, model: Any, world: World, *, divide: bool) -> None:
        self.model = model
        self.world = world
        self.aligned = False
        self.divided: DividedOptimizer | None = None
        self._divides = divide and world.size > 1

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self, data: Any, steps: int | None) -> None:
        """Makes Keras build what is not built yet, by a batch of `data`, a data adapter."""
        iterator = _private.TorchEpochIterator(x=data, steps_per_epoch=steps)
        self.build_with(iterator=iterator)
        iterator.reset()

    def build_with(self, **kwargs: Any) -> None:
        """The same by arguments of Keras' own method; an optimizer that is to be divided is left out."""
        optimizer = getattr(self.model, "optimizer", None)
        with unbuilt(optimizer) if self._divides and optimizer is not None else nullcontext():
            self.model._symbolic_build(**kwargs)

    def divide(self) -> None:
        """Divides the optimizer's state among ranks, if that is wanted and not so yet; a collective operation."""
        if not self._divides:
            return
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        if self.divided is None or not self.divided.holds(optimizer, variables):
            self.divided = None
            self.align()
            self.divided = DividedOptimizer(optimizer, variables, self.world)

    # --- as rank 0 --------------------------------------------------------------------------------------------------

    def align(self) -> None:
        """Gives all ranks rank 0's weights, seeds and optimizer state; a collective operation."""
        self.aligned = True
        if self.world.size == 1:
            return
        state: list[Any] = []
        optimizer = getattr(self.model, "optimizer", None)
        if self.divided is not None and self.divided.optimizer is optimizer:
            self.divided.scatter()
        elif optimizer is not None and self.world.from_root(bool(optimizer.built)):
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            state = optimizer.variables
        values = {id(v): v.value.detach() for v in [*self.model.variables, *state]}
        broadcast_tensors([value for value in values.values() if value.numel()], self.world)

    def send_state(self) -> None:
        """Gives all ranks what rank 0's layers keep besides their weights (moving averages); a collective operation."""
        values = [v.value.detach() for v in self.model.non_trainable_variables]
        if self.world.size > 1 and values:
            broadcast_tensors([value for value in values if value.numel()], self.world)

    def align_once(self) -> None:
        """The same, unless it has been done since the model was compiled; a collective operation."""
        if not all(self.world.from_all(self.aligned)):
            self.align()

    def gather(self) -> None:
        """Gives every rank the weights that others have trained, where these are divided; a collective operation."""

    def collect(self) -> None:
        """Puts a divided optimizer's state together on rank 0; a collective operation."""
        if self.divided is not None and self.divided.optimizer is self.model.optimizer:
            self.divided.collect()

    def agree_on_random_numbers(self) -> None:
        """All ranks go on with rank 0's random numbers, and draw as many: for shuffling, and for dropout."""
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
        """Runs `work` on rank 0 while the others wait; a collective operation.

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
