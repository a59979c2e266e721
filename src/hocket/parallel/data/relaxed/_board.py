"""What workers know of each other: counters of every worker, and its updates that have not been taken yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hocket.comm import CommError, PeerDiedError

RUNNING, FAILED, LEFT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class State:
    """What a worker has told of itself.

    Attributes:
        published: how many updates it has made.
        rests: how often it has come to the end of its work and waited for the others.
        base: its `published` at the last of these.
        status: whether it runs, has failed, or has left after all was done.
        seen: how many updates of each worker are in the parameters of the gradient that it computes now, or, if it
            waits, would be in those of its next one.
    """

    published: int
    rests: int
    base: int
    status: int
    seen: tuple[int, ...]


class Board(Protocol):
    """Carries states and updates between workers. A worker's update arrives before the states that it told later."""

    rank: int
    size: int

    def slot(self) -> torch.Tensor:
        """Where this worker writes its next update, as bytes."""

    def publish(self, state: State) -> None:
        """Gives what `slot` holds to all; `state` counts it, its `seen` is that of the update's gradient."""

    def tell(self, state: State) -> None:
        """Makes this worker's state known."""

    def state(self, peer: int) -> State:
        """What is known of a peer by now."""

    def next(self, peer: int, taken: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """A peer's update after the first `taken`: what its gradient had seen, and its bytes; None if not there."""

    def dead(self) -> set[int]:
        """The peers whose processes have ended, or that are cut off."""

    def wait(self, tries: int) -> None:
        """Leaves the core to others for a moment, longer after many `tries`."""

    def close(self, status: int) -> None:
        """Says that this worker has left or failed, and lets go of what was held."""


def check_alive(board: Board, what: str) -> None:
    """Raises if a peer has died or failed before its work was done.

    Raises:
        PeerDiedError: it is dead.
        CommError: it has failed.
    """
    # The dead first: of those that have failed, some may have failed because of them.
    for peer in sorted(board.dead()):
        if board.state(peer).status == RUNNING:
            raise PeerDiedError(
                f"worker {peer} died while worker {board.rank} {what}: the run cannot go on without its part of the "
                "work; start it again from the last checkpoint",
                peer,
            )
    for peer in range(board.size):
        if peer != board.rank and board.state(peer).status == FAILED:
            raise CommError(
                f"worker {peer} failed while worker {board.rank} {what}: see its own error; this run cannot go on"
            )
