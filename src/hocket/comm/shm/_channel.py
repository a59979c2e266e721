"""The meeting place of the ranks of one group on one host: phases, announcements and slots.

Everything rests on one primitive. In phase p every rank may write to its slot of parity p, then publishes p, then waits
until all have published p; after that it may read everyone's slot of parity p. A slot is written again in phase p + 2,
which no rank enters before all have published p + 1, and a rank publishes p + 1 only when it has finished reading what
belonged to phase p. So two slots a rank suffice, and no collective needs a closing barrier of its own.

Every operation starts with a phase that carries an announcement (what the rank is about to do, and where its buffer
lies); all compare them, so that a mismatch is found by all ranks in the same phase and the group stays in step.
"""

import time
from collections.abc import Sequence

import torch

from hocket._limits import usable_cores

from ..transport import CollectiveMismatchError, CommError
from . import kernel as _kernel
from ._announcement import NO_OPERATOR, NO_ROOT, AnnouncementBoard
from ._memory import MemoryHandle
from ._peers import ASLEEP, HEADER_NBYTES, PHASE, Peer, Peers
from ._sizes import CPU_SIZES

_WORD = 0xFFFFFFFF
_HALF = 0x80000000

_SPINS_OWN_CORE = 400
_SPINS_SHARED_CORE = 10
_SLICE_S = 0.1
_DYING_S = 2.0  # from when a process gives up its memory until it has ended, at most
_PHASE_WORTH_NBYTES = 3 * 2**18  # where ranks share cores, a rank reduces so much in the time of a phase (measured)
_HEADS_KEPT = 512  # views of slots kept, since making one costs as much as a small copy


SEGMENT_NBYTES = HEADER_NBYTES + 2 * CPU_SIZES.slot


class Channel:
    """This rank's end of a group on one host.

    `peers` are all ranks in order, this one included; messages call them by their numbers in the world, `global_ranks`.
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
        self._board = AnnouncementBoard([peer.segment for peer in peers], rank)
        self._watch = Peers(name, rank, peers, global_ranks, self._board)
        self._mine = self._watch.words[rank]
        self._wake_address = self._watch.counters[rank]
        self._awaited = [(r, self._watch.words[r]) for r in self.others]
        self._slots = self._make_slots()
        self._typed: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._heads: dict[tuple[torch.dtype, int], tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        self._deadline_s = 0.0
        self._timeout_s = 0.0
        self._kind = "barrier"
        cores = usable_cores()
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
        """Return everyone's slots as bytes, those of even and those of odd phases."""
        slot_nbytes = self.sizes.slot
        tensors = [peer.segment.tensor for peer in self.peers]
        return (
            [t.narrow(0, HEADER_NBYTES, slot_nbytes) for t in tensors],
            [t.narrow(0, HEADER_NBYTES + slot_nbytes, slot_nbytes) for t in tensors],
        )

    # --- operations -------------------------------------------------------------------------------------------------

    def begin(
        self,
        kind: str,  # one of KINDS
        *,
        timeout_s: float,  # seconds that the whole operation may take
        dtype: torch.dtype = torch.uint8,  # element type; must agree among ranks
        numel: int = 0,  # number of elements; must agree
        operator: int = NO_OPERATOR,  # the ReduceOperator's number; must agree
        root: int = NO_ROOT,  # root's rank; must agree
        place: MemoryHandle | None = None,  # memory of this rank's buffer, if it is registered
    ) -> None:
        """Start an operation: write this rank's announcement, to be published with the first phase."""
        self.seq += 1
        self._kind = kind
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._board.write(self.seq, kind, dtype, numel, operator, root, place)

    def meet(self) -> None:
        """Do the first phase of an operation: publish, wait for all, and compare the announcements.

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

    def places(self) -> list[MemoryHandle | None]:
        """After `meet`: where every rank announced that its buffer lies; None where that is not registered."""
        return self._board.places(self.seq)

    def slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return everyone's slot for the next phase, as flat tensors of `dtype` (`sizes.slot` bytes each)."""
        return self._both_slots(dtype)[(self._phase + 1) & 1]

    def heads(self, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, ...]:
        """Return the first `numel` elements of everyone's slot for the phase that comes next."""
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
        """Publish this rank's next phase and wait until every rank has published it.

        Peers that wait for this rank's counter are woken. A peer first says that it is asleep and then sleeps, unless
        the counter has changed; this rank has changed the counter and then looks who is asleep. With a full fence
        between the two on both sides, one sees the other.
        """
        self._phase = target = (self._phase + 1) & _WORD
        fence, awaited = _kernel.fence, self._awaited
        if fence is not None:
            fence()
        self._mine[PHASE] = target
        _kernel.full_fence()
        for _, words in awaited:
            if words[ASLEEP]:
                _kernel.futex_wake(self._wake_address)
                break
        for _, words in awaited:
            if (words[PHASE] - target) & _WORD >= _HALF:
                self._wait_for_all(target)
                break
        if fence is not None:
            fence()

    def _wait_for_all(self, target: int) -> None:
        """Wait for those that have not published `target`, nor have taken it back (`fail`) while others were late."""
        while late := [(rank, words) for rank, words in self._awaited if (words[PHASE] - target) & _WORD >= _HALF]:
            self._wait(*late[0], target)

    def _wait(self, rank: int, words: memoryview, target: int) -> None:
        yield_core = _kernel.yield_core
        for _ in range(0 if self.patient else self._spins):
            yield_core()
            if (words[PHASE] - target) & _WORD < _HALF:
                return
        self._mine[ASLEEP] = 1
        try:
            self._sleep_until(rank, words, target)
        finally:
            self._mine[ASLEEP] = 0

    def _sleep_until(self, rank: int, words: memoryview, target: int) -> None:
        address = self._watch.counters[rank]
        while True:
            _kernel.full_fence()
            seen = words[PHASE]
            if (seen - target) & _WORD < _HALF:
                return
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._watch.timed_out(self._late(), self._operation(), self._timeout_s)
            _kernel.futex_wait(address, seen, min(_SLICE_S, left_s))
            if words[PHASE] == seen:
                self._watch.check(self._late(), self._operation())

    def _late(self) -> tuple[int, ...]:
        """Return the ranks that have not come to the phase that this rank waits for."""
        return tuple(r for r, words in self._awaited if (words[PHASE] - self._phase) & _WORD >= _HALF)

    def _operation(self) -> str:
        return f"{self._kind} #{self.seq}"

    def unseen(self, rank: int, trouble: OSError) -> CommError:
        """Return the error for a peer whose memory cannot be read: a dying process gives it up before it has ended.

        Raises:
            PeerDiedError: the peer has died.
        """
        deadline_s = time.monotonic() + _DYING_S
        while time.monotonic() < deadline_s:
            self._watch.check((rank,), self._operation())
            time.sleep(0.01)
        return CommError(
            f"rank {self.global_ranks[self.rank]} cannot map the registered buffer of rank {self.global_ranks[rank]} "
            f"in {self._operation()} of group {self.name!r}: {trouble} (too many open files? raise ulimit -n)"
        )

    def check(self, ranks: Sequence[int], operation: str) -> None:
        """Raise what is known of the ranks that have died, left or failed, which `operation` waits for; see Peers."""
        self._watch.check(ranks, operation)

    def dead(self) -> set[int]:
        """Return the ranks, by their numbers in the world, whose processes have ended; never waits."""
        return {self.global_ranks[r] for r in self._watch.dead()}

    # --- leaving ----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank has given up in the middle of an operation, and why.

        A phase that others have yet to come to is taken back: they are to hear of the failure there, and not to go on
        as if all had gone well.
        """
        self._watch.fail(error)
        if self._late():
            self._mine[PHASE] = (self._phase - 1) & _WORD

    def release(self) -> None:
        """Give up what this rank has mapped, when its last operation is over; slots in shared memory need nothing."""

    def leave(self, why: BaseException | None = None) -> None:
        """Tell the peers that this rank takes part no more; `why`: what ends its program, if it fails."""
        self._watch.leave(why)
