"""Hogwild: the workers of one host write to the same parameters, without locks and without waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.comm import CollectiveTimeoutError, CommError, MemoryWindow, PeerDiedError, open_window

from ...mesh import world as _world
from ...state import (
    broadcast_optimizer_state,
    broadcast_tensors,
    check_model,
)
from . import register as _register
from ._board import FAILED, LEFT, RUNNING
from ._flat import FlatParameters
from ._progress import Progress
from ._session import Session
from ._stale import TIMEOUT_S, meet

LINEAR = frozenset({"SGD", "SparseAdam", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"})
"""Of torch's optimizers those whose update is their learning rate times something."""

_UPDATES, _RESTS, _STATUS, _WORDS = range(4)
_POLL_S = 5e-4


class Hogwild(Session):
    """Trains one model in memory that all workers of a host share; a context manager around a loop of one's own.

    The optimizer's step adds to the shared parameters while others read and write them (Recht et al. 2011): some
    updates are lost or half seen, which does little harm where gradients are sparse, and often little where they are
    small.
    Sparse gradients (`Embedding(sparse=True)` with SGD or SparseAdam) touch only their rows. Not serially equivalent,
    and without a bound: staleness is counted only. State of the optimizer stays with each worker.

    Args:
        model: alike on every worker, on the CPU; rank 0's weights count.
        optimizer: of its parameters; one whose update is proportional to its learning rate.
        group: the workers, all on this host; None for torch's default group.
        timeout_s: the longest wait for others at `settle`.

    Raises:
        ValueError: workers have different models or are on several hosts, or the optimizer cannot be used.

    Example::

        with Hogwild(model, optimizer) as training:
            for inputs, target in my_batches:
                training.begin()
                optimizer.zero_grad()
                loss_fn(model(inputs), target).backward()
                training.step(weight=1 / workers)
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, *, group: Any = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        if type(optimizer).__name__ not in LINEAR:
            raise ValueError(
                f"Hogwild weighs updates by the learning rate, and that of {type(optimizer).__name__} is not known to "
                f"be proportional to it; use one of {', '.join(sorted(LINEAR))}"
            )
        trained = [p for p in model.parameters() if p.requires_grad]
        if any(p.device.type != "cpu" for p in trained):
            raise ValueError("Hogwild shares parameters in the memory of a host: keep the model on the CPU")
        self.progress = Progress("hogwild")
        self.timeout_s = timeout_s
        self._world = world = _world.join(group)
        self._model, self._optimizer = model, optimizer
        self._trained = trained
        self._window: MemoryWindow | None = None
        self._words: list[memoryview] = []
        self._seen = self._rests = 0
        if world.size > 1:
            check_model(model, world)
            broadcast_tensors([*model.parameters(), *model.buffers()], world)
            broadcast_optimizer_state(optimizer, world)
            nbytes = 64 + sum(64 + p.numel() * p.element_size() for p in trained)
            self._window = window = open_window(world.rank, nbytes if world.rank == 0 else 64, world.from_all)
            if window is None:
                raise ValueError("Hogwild works within a host only, where ranks can share memory; use stale:S instead")
            self._words = [window.words(rank, _WORDS) for rank in range(world.size)]
            FlatParameters(trained, lambda size: window.tensor(0)[64 : 64 + size], fill=world.rank == 0)
            world.from_all(None)  # nobody trains before rank 0's values are there
        _register.note("hogwild")

    def begin(self) -> None:
        """Notes how many updates the parameters hold; never waits.

        Raises:
            PeerDiedError: a worker has died.
            CommError: a worker has failed.
        """
        self._check("made an update")
        self._seen = self._others()

    @torch.no_grad()
    def step(self, weight: float = 1.0, samples: float = 0.0) -> None:
        """Lets the optimizer write its update, times a weight, into the shared parameters.

        Args:
            weight: by what the learning rate is multiplied: this worker's part of a global batch, so that learning
                rates stay those of synchronous training.
            samples: of the gradient, for the report.
        """
        with torch.enable_grad(), _scaled_rates(self._optimizer, weight):
            self._optimizer.step()
        self.progress.updates += 1
        self.progress.samples += samples
        if self._words:
            self._words[self._world.rank][_UPDATES] = self.progress.updates
            self.progress.staleness[self._others() - self._seen] += 1

    def settle(self) -> None:
        """Waits until all workers have come here, and averages the model's buffers; a collective operation.

        Raises:
            PeerDiedError, CommError: see `begin`.
            CollectiveTimeoutError: it took longer than `timeout_s`.
        """
        if self._words:
            self._rests += 1
            self._words[self._world.rank][_RESTS] = self._rests
            began_s = time.perf_counter()
            while late := tuple(r for r in range(self._world.size) if self._words[r][_RESTS] < self._rests):
                self._check("waited at the end of its work")
                if time.perf_counter() - began_s > self.timeout_s:
                    raise CollectiveTimeoutError(
                        f"worker {self._world.rank} waited at the end of its work for more than {self.timeout_s:.0f} s "
                        f"for worker(s) {', '.join(map(str, late))}",
                        late,
                    )
                time.sleep(_POLL_S)
            self.progress.rested_s += time.perf_counter() - began_s
            meet([], self._model, self._world)
        self.progress.meet(self._world)

    def close(self, *, failed: bool = False) -> None:
        """Leaves: the parameters go back to this worker's own memory.

        Args:
            failed: whether to tell the others that this worker cannot go on, rather than that all is done.
        """
        if self._window is not None:
            self._words[self._world.rank][_STATUS] = FAILED if failed else LEFT
            self._window.fence()
            FlatParameters(self._trained)
            self._words = []
            self._window.close()
            self._window = None

    def report(self) -> dict[str, Any]:
        """Updates and the histogram of staleness, as JSON values; see `Progress`."""
        return {**self.progress.to_json(), "serially_equivalent": False}

    def _others(self) -> int:
        return sum(words[_UPDATES] for rank, words in enumerate(self._words) if rank != self._world.rank)

    def _check(self, what: str) -> None:
        if self._window is None:
            return
        mine = self._world.rank
        for rank in sorted(self._window.dead()):
            if self._words[rank][_STATUS] == RUNNING:
                raise PeerDiedError(
                    f"worker {rank} died while worker {mine} {what}: the run cannot go on without its part of the "
                    "work; start it again from the last checkpoint",
                    rank,
                )
        for rank, words in enumerate(self._words):
            if rank != mine and words[_STATUS] == FAILED:
                raise CommError(f"worker {rank} failed while worker {mine} {what}: see its own error")


@contextmanager
def _scaled_rates(optimizer: Any, weight: float) -> Iterator[None]:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * weight
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
