"""The ranks of a group on one host: how they are, and what is said of those that are not well."""

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

from ..transport import CollectiveTimeoutError, CommError, PeerDiedError
from . import kernel as _kernel
from ._announcement import AnnouncementBoard
from ._liveness import LONGER, state_of
from ._segment import PAGE, SharedSegment

HEADER_NBYTES = PAGE

# Words of 32 bits in the header of a rank's segment; the announcements lie between them and the message.
PHASE = 0
_STATE = 16
_BLAME = 17
_RELEASED = 18
ASLEEP = 24  # whether this rank sleeps, or is about to, until some counter changes
_MESSAGE = 512  # byte offset
_MESSAGE_NBYTES = 1024

_RUNNING, _FAILED, _LEFT, _TIMED_OUT = 0, 1, 2, 3
_MOST_MISSING = 32  # ranks of which a peer is told that they have not come


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of the group as seen from here."""

    rank: int
    pid: int
    nonce: int
    segment: SharedSegment
    pidfd: int  # -1 for this process itself


class Peers:
    """The ranks of one group, this one included.

    Messages call them by their `numbers` in the world, and say what stands on the `board`.
    """

    def __init__(
        self, group: str, rank: int, peers: Sequence[Peer], numbers: Sequence[int], board: AnnouncementBoard
    ) -> None:
        self.words = [peer.segment.view[:HEADER_NBYTES].cast("I") for peer in peers]
        """The header of each rank."""
        self.counters = [peer.segment.base + 4 * PHASE for peer in peers]
        """The address of each rank's phase counter, on which others sleep."""
        self._group = group
        self._rank = rank
        self._peers = tuple(peers)
        self._numbers = tuple(numbers)
        self._board = board

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank has given up in the middle of an operation, and why."""
        self._explain(error, _FAILED)

    def _explain(self, error: BaseException, state: int) -> None:
        blamed = [self._numbers.index(c) for c in getattr(error, "culprits", ()) if c in self._numbers]
        self.words[self._rank][_BLAME] = blamed[0] + 1 if blamed and isinstance(error, PeerDiedError) else 0
        text = f"{type(error).__name__}: {error}"
        if blamed and isinstance(error, CollectiveTimeoutError):
            text, state = f"{','.join(map(str, blamed[:_MOST_MISSING]))}\n{error}", _TIMED_OUT
        raw = text.encode(errors="replace")[: _MESSAGE_NBYTES - 1]
        view = self._peers[self._rank].segment.view
        view[_MESSAGE : _MESSAGE + len(raw) + 1] = raw + b"\0"
        self._leave(state)

    def leave(self, why: BaseException | None = None) -> None:
        """Tell the peers that this rank takes part no more; `why`: what ends its program, if it fails."""
        # A forked child (a DataLoader worker, say) holds a copy of this object but does not speak for the rank.
        if self._peers[self._rank].pid == os.getpid() and self.words[self._rank][_STATE] == _RUNNING:
            if why is None:
                self._leave(_LEFT)
            else:
                self._explain(why, _LEFT)

    def _leave(self, state: int) -> None:
        if _kernel.fence is not None:
            _kernel.fence()
        self.words[self._rank][_STATE] = state
        _kernel.futex_wake(self.counters[self._rank])

    def release(self) -> None:
        """Tell the peers that this rank reads their memory no more."""
        self.words[self._rank][_RELEASED] = 1

    def all_released(self) -> bool:
        """Return whether every other rank has said so or is dead."""
        dead = self.dead()
        return all(p.rank in dead or self.words[p.rank][_RELEASED] for p in self._peers if p.rank != self._rank)

    def check(self, late: Sequence[int], operation: str) -> None:
        """Raise if one of the ranks that are `late` at `operation` is dead, has left or has failed.

        Raises:
            PeerDiedError: it is dead or has left, or it gave up because of another that is.
            CollectiveTimeoutError: it has waited for others until its time was over.
            CommError: it has failed.
        """
        dead = self.dead()
        for r in late:
            state, blame = self.words[r][_STATE], self.words[r][_BLAME]
            if blame:
                raise self._gone(blame - 1, operation)
            if state == _TIMED_OUT:
                ranks, _, text = self._message(r).partition("\n")
                missing = tuple(map(int, ranks.split(",")))
                raise CollectiveTimeoutError(text, missing, tuple(self._numbers[m] for m in missing))
            if state == _FAILED:
                raise CommError(
                    f"rank {self._numbers[r]} failed in {operation} of group {self._group!r}: {self._message(r)}"
                )
            if state == _LEFT or r in dead:
                raise self._gone(r, operation)

    def timed_out(self, late: Sequence[int], operation: str, timeout_s: float) -> CollectiveTimeoutError:
        """Return the error that names the ranks that have not come to `operation`."""
        where = "; ".join(
            f"rank {self._numbers[r]} was last at {self._board.last(r)}{state_of(self._peers[r].pid)}" for r in late
        )
        return CollectiveTimeoutError(
            f"{operation} of group {self._group!r} passed its timeout of {timeout_s:.1f} s on rank "
            f"{self._numbers[self._rank]}: not arrived: {where}. {LONGER}",
            tuple(late),
            tuple(self._numbers[r] for r in late),
        )

    def dead(self) -> set[int]:
        """Return those whose processes have ended; never waits."""
        poll = select.poll()  # one of its own: two threads cannot use one at once
        for peer in self._peers:
            if peer.pidfd >= 0:
                poll.register(peer.pidfd, select.POLLIN)
        gone = {fd for fd, _ in poll.poll(0)}
        return {peer.rank for peer in self._peers if peer.pidfd in gone}

    def _gone(self, rank: int, operation: str) -> PeerDiedError:
        if self.words[rank][_STATE] == _LEFT:
            why = self._message(rank) or "it ended or destroyed the group"
            how = f"rank {self._numbers[rank]} has left ({why})"
        else:
            how = f"rank {self._numbers[rank]} (process {self._peers[rank].pid}) died"
        return PeerDiedError(
            f"{how} while rank {self._numbers[self._rank]} waited for it in {operation} of group {self._group!r}; "
            f"its last announcement was {self._board.last(rank)}",
            rank,
            (self._numbers[rank],),
        )

    def _message(self, rank: int) -> str:
        raw = bytes(self._peers[rank].segment.view[_MESSAGE : _MESSAGE + _MESSAGE_NBYTES])
        return raw.split(b"\0", 1)[0].decode(errors="replace")
