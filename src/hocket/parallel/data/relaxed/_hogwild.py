"""Hogwild: the workers of one host write to the same parameters, without locks and without waiting."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hocket.comm import CollectiveTimeoutError, MemoryWindow, open_window

from ...mesh import world as _world
from ...state import parameters_of
from . import register as _register
from ._board import FAILED, LEFT, check_alive
from ._flat import FlatParameters
from ._session import RelaxedTraining
from ._stale import TIMEOUT_S, meet

LINEAR = frozenset({"SGD", "SparseAdam", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"})
"""Of torch's optimizers those whose update is their learning rate times something."""

_UPDATES, _RESTS, _STATUS, _WORDS = range(4)
_POLL_S = 5e-4


class Hogwild(RelaxedTraining):
    """Trains one model in memory that all workers of a host share; a context manager around a loop of one's own.

    The optimizer's step adds to the shared parameters while others read and write them (Recht et al. 2011): some
    updates are lost or half seen, which does little harm where gradients are sparse, and often little where they are
    small.
    Sparse gradients (`Embedding(sparse=True)` with SGD or SparseAdam) touch only their rows. Not serially equivalent,
    and without a bound: staleness is counted only. WorkerState of the optimizer stays with each worker.

    Args:
        model: The same model on every worker, on the CPU; rank 0's weights count.
        optimizer: Optimizer of its parameters; one whose update is proportional to its learning rate.
        group: The workers, all on this host; None for torch's default group.
        timeout_s: The longest wait for others at `settle`.

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
        trained = [p for p in parameters_of(model) if p.requires_grad]
        if any(p.device.type != "cpu" for p in trained):
            raise ValueError("Hogwild shares parameters in the memory of a host: keep the model on the CPU")
        world = _world.join(group)
        super().__init__("hogwild", model, optimizer, world)
        self.timeout_s = timeout_s
        self._trained = trained
        self._window: MemoryWindow | None = None
        self._words: list[memoryview] = []
        self._seen = self._rests = 0
        if world.size > 1:
            nbytes = 64 + sum(64 + p.numel() * p.element_size() for p in trained)
            self._window = window = open_window(world.rank, nbytes if world.rank == 0 else 64, world.from_all)
            if window is None:
                raise ValueError("Hogwild works within a host only, where ranks can share memory; use stale:S instead")
            self._words = [window.words(rank, _WORDS) for rank in range(world.size)]
            FlatParameters(trained, lambda size: window.tensor(0)[64 : 64 + size], fill=world.rank == 0)
            world.from_all(None)  # nobody trains before rank 0's values are there
        _register.note("hogwild")

    def begin(self) -> None:
        """Note how many updates the parameters hold; never wait.

        Raises:
            PeerDiedError: a worker has died.
            CommError: a worker has failed.
        """
        self._check("made an update")
        self._seen = self._others()

    @torch.no_grad()
    def step(self, weight: float = 1.0, samples: float = 0.0) -> None:
        """Let the optimizer write its update, times a weight, into the shared parameters.

        The learning rate is multiplied by `weight`, this worker's part of a global batch, so that learning rates stay
        those of synchronous training; `samples` are for the report.
        """
        with torch.enable_grad(), _scaled_rates(self._optimizer, weight):
            self._optimizer.step()
        self.progress.updates += 1
        self.progress.samples += samples
        if self._words:
            self._words[self._world.rank][_UPDATES] = self.progress.updates
            self.progress.staleness[self._others() - self._seen] += 1

    def settle(self) -> None:
        """Wait until all workers have come here, and average the model's buffers; a collective operation.

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
        """See RelaxedTraining; the parameters go back to this worker's own memory."""
        if self._window is not None:
            self._words[self._world.rank][_STATUS] = FAILED if failed else LEFT
            self._window.fence()
            FlatParameters(self._trained)
            self._words = []
            self._window.close()
            self._window = None

    def _others(self) -> int:
        return sum(words[_UPDATES] for rank, words in enumerate(self._words) if rank != self._world.rank)

    def _check(self, what: str) -> None:
        if self._window is None:
            return
        dead = self._window.dead()
        check_alive(self._world.rank, dead, [words[_STATUS] for words in self._words], what)


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
