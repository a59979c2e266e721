"""The meeting place of the ranks of one group on one host: phases, announcements, slots and the watch over peers.

Everything rests on one primitive. In phase p every rank may write to its slot of parity p, then publishes p, then waits
until all have published p; after that it may read everyone's slot of parity p. A slot is written again in phase p + 2,
which no rank enters before all have published p + 1, and a rank publishes p + 1 only when it has finished reading what
belonged to phase p. So two slots a rank suffice, and no collective needs a closing barrier of its own.

Every operation starts with a phase that carries an announcement (what the rank is about to do, and where its buffer
lies); all compare them, so that a mismatch is found by all ranks in the same phase and the group stays in step.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import _kernel
from ._announcement import NO_OPERATOR, NO_ROOT, Board
from ._errors import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError
from ._memory import Place
from ._segment import PAGE, Segment

HEADER_NBYTES = PAGE

_PHASE = 0  # u32 offsets into the header as 'I' words
_STATE = 16
_BLAME = 17
_ASLEEP = 24  # whether this rank sleeps, or is about to, until some counter changes
_MESSAGE = 512  # byte offset; the announcements lie before it
_MESSAGE_NBYTES = 1024

_WORD = 0xFFFFFFFF
_HALF = 0x80000000

RUNNING, FAILED, LEFT = 0, 1, 2

_SPINS_OWN_CORE = 400
_SPINS_SHARED_CORE = 10
_SLICE_S = 0.1
_PHASE_WORTH_NBYTES = 3 * 2**18  # where ranks share cores, a rank reduces so much in the time of a phase (measured)
_HEADS_KEPT = 512  # views of slots kept, since making one costs as much as a small copy


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where one way of doing a collective gives way to another, in bytes. Measured (benchmarks/), not derived.

    Attributes:
        slot: room of one slot; a rank has two.
        one_shot: up to this, every rank of three and more reduces everything itself instead of sharing the work, if
            each has a core.
        piece: how much is copied in one phase by the one-shot way and by plain copies.
        block: how much three and more ranks share the reduction of in one phase.
        chain: from this on, three and more ranks reduce one after the other in a pipeline of pieces.
        direct: from this on, registered buffers are worked on in place; below, the second phase costs more.
        direct_piece: how much is reduced before it is written to all, so that it is still in the core's cache.
    """

    slot: int
    one_shot: int
    piece: int
    block: int
    chain: int
    direct: int
    direct_piece: int


CPU_SIZES = Sizes(
    slot=2 * 2**20,
    one_shot=64 * 2**10,
    piece=2**20,
    block=3 * 2**19,
    chain=4 * 2**20,
    direct=256 * 2**10,
    direct_piece=128 * 2**10,
)


SEGMENT_NBYTES = HEADER_NBYTES + 2 * CPU_SIZES.slot


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of the group as seen from here."""

    rank: int
    pid: int
    nonce: int
    segment: Segment
    pidfd: int  # -1 for this process itself


class Channel:
    """This rank's end of a group on one host.

    Args:
        name: the group, for messages.
        rank: this rank in the group.
        peers: all ranks in order, this one included.
        global_ranks: the ranks' numbers in the world, for messages.
    """

    sizes = CPU_SIZES

    def __init__(self, name: str, rank: int, peers: Sequence[Peer], global_ranks: Sequence[int]) -> None:
        self.name = name
        self.rank = rank
        self.size = len(peers)
        self.peers = tuple(peers)
        self.others = tuple(r for r in range(self.size) if r != rank)
        self.seq = 0
        self._phase = 0
        self.global_ranks = tuple(global_ranks)
        self._words = [peer.segment.view[:HEADER_NBYTES].cast("I") for peer in peers]
        self._mine = self._words[rank]
        self._wake_address = peers[rank].segment.base + 4 * _PHASE
        self._awaited = [(r, self._words[r]) for r in self.others]
        self._board = Board([peer.segment for peer in peers], rank)
        self._slots = self._make_slots()
        self._typed: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._heads: dict[tuple[torch.dtype, int], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        self._deadline_s = 0.0
        self._timeout_s = 0.0
        self._kind = "barrier"
        self._poll: select.poll | None = None
        cores = len(os.sched_getaffinity(0))
        self._spins = _SPINS_OWN_CORE if self.size <= cores else _SPINS_SHARED_CORE
        self.one_shot = self.sizes.one_shot
        """Up to how many bytes every rank reduces everything itself."""
        if self.size > max(cores, 2):
            # It does n times S of work in one phase; shared, it is at most 2.5 times S in two.
            self.one_shot = max(self.one_shot, int(_PHASE_WORTH_NBYTES / (self.size - 2.5)))
        self.patient = False
        """Whether waiting should leave the core alone at once: set while a progress thread runs beside computation."""
        self.published_s = self.arrived_s = 0.0

    def _make_slots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Everyone's slots as bytes, those of even and those of odd phases."""
        room = self.sizes.slot
        tensors = [peer.segment.tensor for peer in self.peers]
        return (
            [t.narrow(0, HEADER_NBYTES, room) for t in tensors],
            [t.narrow(0, HEADER_NBYTES + room, room) for t in tensors],
        )

    # --- operations -------------------------------------------------------------------------------------------------

    def begin(
        self,
        kind: str,
        *,
        timeout_s: float,
        dtype: torch.dtype = torch.uint8,
        numel: int = 0,
        operator: int = NO_OPERATOR,
        root: int = NO_ROOT,
        extra: int = 0,
        place: Place | None = None,
    ) -> None:
        """Starts an operation: writes this rank's announcement, to be published with the first phase.

        Args:
            kind: one of KINDS.
            timeout_s: seconds that the whole operation may take.
            dtype: element type; must agree among ranks.
            numel: number of elements; must agree.
            operator: the Reducer's number; must agree.
            root: root's rank; must agree.
            extra: anything one integer can say that need not agree.
            place: where this rank's buffer lies, if it is registered.
        """
        self.seq += 1
        self._kind = kind
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._board.write(self.seq, kind, dtype, numel, operator, root, extra, place)

    def meet(self) -> None:
        """The first phase of an operation: publishes, waits for all, and compares the announcements.

        Raises:
            CollectiveMismatchError: ranks announced different operations; all ranks raise it and stay in step.
        """
        self.published_s = time.perf_counter()
        self.phase()
        self.arrived_s = time.perf_counter()
        if not self._board.agree(self.seq):
            raise CollectiveMismatchError(
                f"ranks of group {self.name!r} disagree at operation #{self.seq}: "
                f"{self._board.differences(self.seq, self.global_ranks)}; "
                "every rank must call the same operation with equal sizes, types, operator and root"
            )

    def registered(self) -> int:
        """After `meet`: how many ranks announced that their buffer is registered."""
        return self._board.registered(self.seq)

    def details(self) -> list[tuple[int, Place | None]]:
        """After `meet`: what every rank announced besides the contract, as (extra, place)."""
        return self._board.details(self.seq)

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Everyone's slot for the phase that comes next, as flat tensors of `dtype` (`sizes.slot` bytes each)."""
        return self._both_slots(dtype)[(self._phase + 1) & 1]

    def heads(self, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, ...]:
        """The first `numel` elements of everyone's slot for the phase that comes next."""
        both = self._heads.get((dtype, numel))
        if both is None:
            if len(self._heads) >= _HEADS_KEPT:
                self._heads.clear()
            even, odd = self._both_slots(dtype)
            with torch.inference_mode(False):
                both = (tuple(s[:numel] for s in even), tuple(s[:numel] for s in odd))
            self._heads[dtype, numel] = both
        return both[(self._phase + 1) & 1]

    def _both_slots(self, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        typed = self._typed.get(dtype)
        if typed is None:
            even, odd = self._slots
            with torch.inference_mode(False):  # a view made in inference mode could not be written outside it
                typed = self._typed[dtype] = ([s.view(dtype) for s in even], [s.view(dtype) for s in odd])
        return typed

    # --- phases -----------------------------------------------------------------------------------------------------

    def phase(self) -> None:
        """Publishes this rank's next phase and waits until every rank has published it.

        Peers that wait for this rank's counter are woken. A peer first says that it is asleep and then sleeps, unless
        the counter has changed; this rank has changed the counter and then looks who is asleep. With a full fence
        between the two on both sides, one sees the other.
        """
        self._phase = target = (self._phase + 1) & _WORD
        fence, awaited = _kernel.fence, self._awaited
        if fence is not None:
            fence()
        self._mine[_PHASE] = target
        _kernel.full_fence()
        for _, words in awaited:
            if words[_ASLEEP]:
                _kernel.futex_wake(self._wake_address)
                break
        for rank, words in awaited:
            if (words[_PHASE] - target) & _WORD >= _HALF:
                self._wait(rank, words, target)
        if fence is not None:
            fence()

    def _wait(self, rank: int, words: memoryview, target: int) -> None:
        yield_core = _kernel.yield_core
        for _ in range(0 if self.patient else self._spins):
            yield_core()
            if (words[_PHASE] - target) & _WORD < _HALF:
                return
        self._mine[_ASLEEP] = 1
        try:
            self._sleep_until(rank, words, target)
        finally:
            self._mine[_ASLEEP] = 0

    def _sleep_until(self, rank: int, words: memoryview, target: int) -> None:
        address = self.peers[rank].segment.base + 4 * _PHASE
        while True:
            _kernel.full_fence()
            seen = words[_PHASE]
            if (seen - target) & _WORD < _HALF:
                return
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._late()
            _kernel.futex_wait(address, seen, min(_SLICE_S, left_s))
            if words[_PHASE] == seen:
                self._check_peers(target)

    # --- failures ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells the peers that this rank has given up in the middle of an operation, and why."""
        self._mine[_BLAME] = error.rank + 1 if isinstance(error, PeerDiedError) else 0
        text = f"{type(error).__name__}: {error}".encode()[: _MESSAGE_NBYTES - 1]
        view = self.peers[self.rank].segment.view
        view[_MESSAGE : _MESSAGE + len(text) + 1] = text + b"\0"
        self._leave(FAILED)

    def leave(self) -> None:
        """Tells the peers that this rank takes part no more."""
        # A forked child (a DataLoader worker, say) holds a copy of this object but does not speak for the rank.
        if self.peers[self.rank].pid == os.getpid() and self._mine[_STATE] == RUNNING:
            self._leave(LEFT)

    def _leave(self, state: int) -> None:
        if _kernel.fence is not None:
            _kernel.fence()
        self._mine[_STATE] = state
        _kernel.futex_wake(self._wake_address)

    def _check_peers(self, target: int) -> None:
        """Raises if a rank that has not reached `target` is dead, has left or has failed."""
        late = [r for r, words in self._awaited if (words[_PHASE] - target) & _WORD >= _HALF]
        dead = self._dead()
        for r in late:
            state, blame = self._words[r][_STATE], self._words[r][_BLAME]
            if blame:
                raise self._gone(blame - 1)
            if state == FAILED:
                raise CommError(
                    f"rank {self._number(r)} failed in {self._operation()} of group {self.name!r}: {self._message(r)}"
                )
            if state == LEFT or r in dead:
                raise self._gone(r)

    def _dead(self) -> set[int]:
        if self._poll is None:
            self._poll = select.poll()
            for peer in self.peers:
                if peer.pidfd >= 0:
                    self._poll.register(peer.pidfd, select.POLLIN)
        gone = {fd for fd, _ in self._poll.poll(0)}
        return {peer.rank for peer in self.peers if peer.pidfd in gone}

    def _gone(self, rank: int) -> PeerDiedError:
        if self._words[rank][_STATE] == LEFT:
            how = f"rank {self._number(rank)} has left (it ended or destroyed the group)"
        else:
            how = f"rank {self._number(rank)} (process {self.peers[rank].pid}) died"
        return PeerDiedError(
            f"{how} while rank {self._number(self.rank)} waited for it in {self._operation()} of group {self.name!r}; "
            f"its last announcement was {self._board.last(rank)}",
            rank,
        )

    def _late(self) -> CollectiveTimeoutError:
        target = self._phase
        late = [r for r, words in self._awaited if (words[_PHASE] - target) & _WORD >= _HALF]
        where = "; ".join(f"rank {self._number(r)} was last at {self._board.last(r)}" for r in late)
        return CollectiveTimeoutError(
            f"{self._operation()} of group {self.name!r} passed its timeout of {self._timeout_s:.1f} s on rank "
            f"{self._number(self.rank)}: not arrived: {where}",
            tuple(late),
        )

    def _number(self, rank: int) -> int:
        return self.global_ranks[rank]

    def _operation(self) -> str:
        return f"{self._kind} #{self.seq}"

    def _message(self, rank: int) -> str:
        raw = bytes(self.peers[rank].segment.view[_MESSAGE : _MESSAGE + _MESSAGE_NBYTES])
        return raw.split(b"\0", 1)[0].decode(errors="replace")
