"""What workers know of each other: counters of every worker, and its updates that have not been taken yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hocket.comm import CommError, PeerDiedError

RUNNING, FAILED, LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker has told of itself."""

    published: int  # how many updates the worker has made
    rests: int  # how often the worker has come to the end of its work and waited for the others
    base: int  # the worker's `published` when it last came there
    status: int  # whether the worker runs, has failed, or has left after all was done
    # how many updates of each worker are in the parameters of the gradient that it computes now, or, if it waits, would
    # be in those of its next one
    seen: tuple[int, ...]


class UpdateBoard(Protocol):
    """Carries states and updates between workers. A worker's update arrives before the states that it told later."""

    rank: int
    size: int

    def slot(self) -> torch.Tensor:
        """Return where this worker writes its next update, as bytes."""

    def publish(self, state: WorkerState) -> None:
        """Give what `slot` holds to all; `state` counts it, its `seen` is that of the update's gradient."""

    def tell(self, state: WorkerState) -> None: ...

    def state(self, peer: int) -> WorkerState:
        """Return what is known of a peer by now."""

    def next(self, peer: int, taken: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Return a peer's update after the first `taken`: what its gradient had seen, and bytes; None if not there."""

    def dead(self) -> set[int]:
        """Return the peers whose processes have ended, or that are cut off."""

    def wait(self, tries: int) -> None:
        """Leave the core to others for a moment, longer after many `tries`."""

    def close(self, status: int) -> None:
        """Say that this worker has left or failed, and let go of what was held."""


def check_alive(rank: int, dead: set[int], statuses: Sequence[int], what: str) -> None:
    """Raise if a peer has died or failed before its work was done.

    `statuses` were read after `dead`, the peers whose processes have ended; `what` is what this worker was doing.

    Raises:
        PeerDiedError: it is dead.
        CommError: it has failed.
    """
    # The dead first: of those that have failed, some may have failed because of them.
    for peer in sorted(dead):
        if statuses[peer] == RUNNING:
            raise PeerDiedError(
                f"worker {peer} died while worker {rank} {what}: the run cannot go on without its part of the "
                "work; start it again from the last checkpoint",
                peer,
            )
    for peer, status in enumerate(statuses):
        if peer != rank and status == FAILED:
            raise CommError(
                f"worker {peer} failed while worker {rank} {what}: see its own error; this run cannot go on"
            )
