"""Who may go on, and who must wait: the rules of bounded staleness, without processes, memory or clocks of the wall.

Every worker holds all parameters and adds to them the updates that all workers publish. A worker waits, if at all,
*before* it takes the parameters for its next gradient. While it waits it goes on to take what others publish and tells
them so; hence of the workers that wait for each other, the one that has told its latest state is not waited for, and
some worker can always go on.

"stale" (bounded delay, as in Agarwal and Duchi 2011; Lian et al. 2015): worker i begins the gradient of its k-th update
when every other worker's present gradient has seen i's update k - S or later. So an update that reaches a worker has
missed S of that worker's own updates at most, however slow its maker is, and nobody waits for a slow worker that comes
round once in S of its own steps.

"ssp" (stale-synchronous parallel, Ho et al. 2013): a worker that has made c updates goes on when every other has made
c - S. A worker that is slow throughout is waited for in the end.
"""

from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch

from ._board import LEFT, RUNNING, UpdateBoard, WorkerState

Rule = Literal["stale", "ssp"]
Apply = Callable[[torch.Tensor], None]


def most_missed(rule: Rule, bound: int) -> int:
    """Return how many of its own updates a worker may be ahead of what an update that reaches it has seen."""
    # With clocks at most S apart at the start of a gradient, two such differences and the two steps under way add up.
    return bound if rule == "stale" else 2 * bound + 2


class Pace:
    """One worker's side of the rules."""

    def __init__(self, board: UpdateBoard, rule: Rule, bound: int) -> None:
        # for each update of another worker that was applied here, how many of this worker's own updates its gradient
        # had not seen: how often each number occurred
        self.staleness: Counter[int] = Counter()
        self.published = 0  # updates of this worker
        self.applied = 0  # updates of others
        self._board = board  # what connects the worker with the others
        self._rule = rule  # "stale" or "ssp"
        self._bound = bound  # S above
        self._most = most_missed(rule, bound)
        self._seen = [0] * board.size
        self._rests = 0
        self._base = 0

    def try_begin(self, apply: Apply) -> bool:
        """Take what has arrived; say whether the next gradient may be begun from that."""
        held = self.held_by()  # before taking: what a peer had published before it told its state is then taken
        self.take(apply)
        return not held

    def held_by(self) -> list[int]:
        """Return the peers that must be waited for before the next gradient."""
        mine = self._board.rank
        held = []
        for peer in range(self._board.size):
            if peer == mine:
                continue
            state = self._board.state(peer)
            if state.status == LEFT:
                continue
            if self.published + 1 - state.seen[mine] > self._most:
                held.append(peer)
            elif self._rule == "ssp" and state.rests <= self._rests:
                clock = state.published - state.base if state.rests == self._rests else 0
                if clock < self.published - self._base - self._bound:
                    held.append(peer)
        return held

    def take(self, apply: Apply) -> None:
        """Apply every update that has arrived, and tell the others."""
        mine, changed = self._board.rank, False
        for peer in range(self._board.size):
            if peer == mine:
                continue
            while (found := self._board.next(peer, self._seen[peer])) is not None:
                seen, data = found
                missed = self.published - seen[mine]
                assert missed <= self._most, f"an update of worker {peer} missed {missed} of worker {mine}'s updates"
                apply(data)
                self.staleness[missed] += 1
                self._seen[peer] += 1
                self.applied += 1
                changed = True
        if changed:
            self._board.tell(self._state())

    def publish(self) -> None:
        """Give what was written to the board's slot to all."""
        # The update is in this worker's own parameters too, but its gradient had not seen itself.
        self.published += 1
        self._board.publish(self._state())
        self._seen[self._board.rank] = self.published

    def rest(self) -> None:
        """Say that this worker has no more work for now."""
        self._base = self.published
        self._rests += 1
        self._board.tell(self._state())

    def try_settle(self, apply: Apply) -> bool:
        """Take what has arrived; say whether all workers rest and everything is taken."""
        states = [self._board.state(peer) for peer in range(self._board.size) if peer != self._board.rank]
        resting = all(state.rests >= self._rests or state.status == LEFT for state in states)
        self.take(apply)
        return resting

    def awaited(self) -> list[int]:
        """Return the peers that do not rest yet."""
        others = (peer for peer in range(self._board.size) if peer != self._board.rank)
        return [p for p in others if self._board.state(p).rests < self._rests and self._board.state(p).status != LEFT]

    def _state(self) -> WorkerState:
        return WorkerState(self.published, self._rests, self._base, RUNNING, tuple(self._seen))
