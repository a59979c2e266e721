"""Asynchronous training with a bound on staleness: nobody waits for a slow worker unless the bound would be passed."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm import CollectiveTimeoutError, open_window

from ...mesh import world as _world
from ...state import broadcast_tensors, parameters_of
from . import register as _register
from ._board import FAILED, LEFT, UpdateBoard, check_alive
from ._engine_board import EngineBoard
from ._flat import FlatParameters
from ._pace import Pace, Rule, most_missed
from ._session import RelaxedTraining
from ._shared_board import SharedBoard, window_nbytes

TIMEOUT_S = 300.0

_CAUSE_S = 1.0  # between hosts a death is seen when its connections are, later than what others say of it


class BoundedStaleness(RelaxedTraining):
    """Trains one model by workers that do not wait for each other; a context manager around a loop of one's own.

    Each worker holds the model and an optimizer. Between `begin` and `step` it computes a gradient of its own batch;
    `step` lets the optimizer make its update and gives the change of the parameters, times a weight, to all others, who
    add it when they next `begin`. See `_pace.py` for the rules. Not serially equivalent: which updates a gradient has
    seen depends on how fast each worker was.

    On one host updates lie in shared memory, between hosts they go through Gloo's point-to-point; a worker has as many
    on the way as the bound says, no more. All workers must use the same group; momentum and other state of the
    optimizer stay with each worker.

    Args:
        model: The same model on every worker; rank 0's weights count.
        optimizer: Optimizer of its parameters. Any of torch's.
        bound: How many updates of one worker an update may have missed ("stale", 1 or more), or how many steps workers
            may be apart ("ssp").
        rule: "stale" (bounded delay) or "ssp" (Ho et al. 2013).
        group: The workers; None for torch's default group.
        timeout_s: The longest wait for another worker; then CollectiveTimeoutError.

    Raises:
        ValueError: workers have different models, or the bound makes no sense.

    Example::

        with BoundedStaleness(model, optimizer, bound=4) as training:
            for inputs, target in my_batches:       # each worker may have another number of them
                training.begin()
                optimizer.zero_grad()
                loss_fn(model(inputs), target).backward()
                training.step(weight=1 / workers)
            training.settle()                       # all workers: the same parameters from here on
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        bound: int,
        rule: Rule = "stale",
        *,
        group: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        least = 1 if rule == "stale" else 0
        if rule not in ("stale", "ssp") or bound < least:
            raise ValueError(
                f'the rule is "stale" with a bound of 1 or more or "ssp" with 0 or more, not {rule}:{bound}'
            )
        world = _world.join(group)
        super().__init__(f"{rule}:{bound}", model, optimizer, world)
        self.timeout_s = timeout_s
        self._flat = FlatParameters(p for p in parameters_of(model) if p.requires_grad)
        self._before = [torch.empty_like(flat) for flat in self._flat.flats]
        self._board: UpdateBoard | None = None
        self._begun = False
        if world.size > 1:
            slots = most_missed(rule, bound)
            self._board = self._open(slots)
            self._pace = Pace(self._board, rule, bound)
            self.progress.staleness = self._pace.staleness
        _register.note(f"{rule}:{bound}")

    def _open(self, slots: int) -> UpdateBoard:
        world, nbytes = self._world, self._flat.nbytes
        window = open_window(world.rank, window_nbytes(world.size, slots, nbytes), world.from_all)
        if window is not None:
            return SharedBoard(window, slots, nbytes)
        return EngineBoard(world, nbytes, self.timeout_s)

    def begin(self) -> None:
        """Wait until the bound allows another gradient, and bring the parameters up to date.

        Raises:
            PeerDiedError: a worker has died.
            CommError: a worker has failed.
            CollectiveTimeoutError: it took longer than `timeout_s`.
        """
        self._begun = True
        if self._board is None:
            return
        pace = self._pace
        self._until(lambda: pace.try_begin(self._apply), pace.held_by, "waited at the bound", resting=False)

    @torch.no_grad()
    def step(self, weight: float = 1.0, samples: float = 0.0) -> None:
        """Let the optimizer update the parameters, and give the change to all workers.

        The change is multiplied by `weight`, here and everywhere: this worker's part of a global batch, so that
        learning rates stay those of synchronous training; `samples` are for the report.

        Raises:
            RuntimeError: there was no `begin` before, so nobody has looked at the bound.
        """
        if not self._begun:
            raise RuntimeError("call begin() before the forward pass of every step(): it is what keeps the bound")
        self._begun = False
        self._flat.check()
        flats = self._flat.flats
        for before, flat in zip(self._before, flats, strict=True):
            before.copy_(flat)
        with torch.enable_grad():
            self._optimizer.step()
        changes = (
            self._flat.views(self._board.slot()) if self._board is not None else [torch.empty_like(f) for f in flats]
        )
        for change, flat, before in zip(changes, flats, self._before, strict=True):
            change.copy_(flat.sub_(before).mul_(weight))
            flat.add_(before)
        self.progress.updates += 1
        self.progress.samples += samples
        if self._board is not None:
            self._pace.publish()

    def settle(self) -> None:
        """Wait until all workers have come here, take all updates, and make parameters and buffers exactly equal.

        A collective operation: for the end of training, or before an evaluation by all workers together.

        Raises:
            PeerDiedError, CommError, CollectiveTimeoutError: see `begin`.
        """
        board, pace = self._board, self._pace if self._board is not None else None
        if board is None or pace is None:
            self.progress.meet(self._world)
            return
        pace.rest()
        self._until(lambda: pace.try_settle(self._apply), pace.awaited, "waited at the end of its work", resting=True)
        meet(self._flat.flats, self._model, self._world)
        self.progress.applied = pace.applied
        self.progress.meet(self._world)

    def close(self, *, failed: bool = False) -> None:
        """See RelaxedTraining; the model and the optimizer are this worker's own after it."""
        if self._board is not None:
            self._board.close(FAILED if failed else LEFT)
            self._board = None

    def report(self) -> dict[str, Any]:
        if self._board is not None:
            self.progress.applied = self._pace.applied
        return super().report()

    def _apply(self, data: torch.Tensor) -> None:
        for flat, change in zip(self._flat.flats, self._flat.views(data), strict=True):
            with torch.no_grad():
                flat.add_(change.to(flat.device))

    def _check(self, board: UpdateBoard, what: str) -> None:
        dead, statuses = board.dead(), self._statuses(board)
        if not dead and FAILED in statuses:  # perhaps because a third worker died, which is known here a little later
            until_s = time.monotonic() + _CAUSE_S
            while not (dead := board.dead()) and time.monotonic() < until_s:
                board.wait(1)
            statuses = self._statuses(board)
        check_alive(board.rank, dead, statuses, what)

    @staticmethod
    def _statuses(board: UpdateBoard) -> list[int]:
        return [board.state(peer).status for peer in range(board.size)]

    def _until(self, ready: Callable[[], bool], late: Callable[[], list[int]], what: str, *, resting: bool) -> None:
        board = self._board
        assert board is not None
        self._check(board, what)
        if ready():
            return
        began_s, tries = time.perf_counter(), 0
        while True:
            self._check(board, what)
            if ready():
                break
            if time.perf_counter() - began_s > self.timeout_s:
                missing = tuple(late())
                raise CollectiveTimeoutError(
                    f"worker {board.rank} {what} for more than {self.timeout_s:.0f} s: no progress of worker(s) "
                    f"{', '.join(map(str, missing))}; give a larger timeout_s if they are only slow",
                    missing,
                )
            board.wait(tries)
            tries += 1
        took_s = time.perf_counter() - began_s
        if resting:
            self.progress.rested_s += took_s
        else:
            self.progress.waited_s += took_s


@torch.no_grad()
def meet(flats: list[torch.Tensor], model: torch.nn.Module, world: _world.World) -> None:
    """Average flat parameters and the model's floating-point buffers over workers; others become rank 0's."""
    if world.size == 1:
        return
    buffers = [b for b in model.buffers() if b.numel()]
    for tensor in (*flats, *(b for b in buffers if b.is_floating_point())):
        tensor.div_(world.size)
        dist.all_reduce(tensor, group=world.group)
    broadcast_tensors([b for b in buffers if not b.is_floating_point()], world)
