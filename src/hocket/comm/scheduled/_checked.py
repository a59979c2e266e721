"""Between hosts as inside one: every operation is announced and compared before it can do harm, and troubles are named.

All ranks exchange frames first (`_frames`): what they are about to do, and for a small operation its data too, which
the frames of all ranks complete. So a small operation takes as many messages as without the comparison. A larger one
begins while the frames are on their way (`_early`). Ranks that differ all raise the same error, and the group goes on.
"""

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .. import torch_adapter as c10d
from ..shm import NO_OPERATOR, NO_ROOT
from ..transport import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommError,
    Flats,
    Membership,
    PeerDiedError,
    ReduceOperator,
    Transport,
)
from ._early import EarlyPoints
from ._execute import NotAgreedError
from ._frames import Frame, FrameExchange, contract_of, differences
from ._scheduled import table_is_given

log = logging.getLogger("hocket.comm")

_GRACE_S: Final = 2.0
"""How long a rank in trouble waits for another to tell of its own: all hear of a lost connection at nearly one time."""
_LOOK_S: Final = 0.05


def host_name() -> str:
    """Return how messages call this host."""
    return os.environ.get("HOCKET_HOST") or socket.gethostname()


class CheckedTransport:
    """See the head of this module; a `Transport`.

    Args:
        inner: Carries out what does not fit in frames.
        points: What `inner` sends its messages by.
        frames: Exchange of frames among all ranks.
        at: The group, in whose store ranks tell of their troubles.
        called: How messages call each rank.
        speaker: The rank through which this one hears of other hosts; itself if it speaks with them.
        path: How reports call what is done with frames alone.
        early_nbytes: From which size on `inner` may begin before the ranks have agreed: it changes nothing of a user's
            before it waits for a message, and each of its ranks waits for one. None: it may not.
        fuses: Whether small operations are done with frames alone.
    """

    def __init__(
        self,
        inner: Transport,
        points: EarlyPoints,
        frames: FrameExchange,
        at: Membership,
        called: Sequence[str],
        speaker: int,
        path: str,
        early_nbytes: int | None = 1,
        *,
        fuses: bool = True,
    ) -> None:
        self.inner = inner
        self._fuses = fuses
        self._early = points
        self._early_nbytes = early_nbytes
        self._frames = frames
        self._store, self._name, self._rank, self._size = at[:4]
        self._numbers = tuple(at.numbers)
        self._speaker = speaker
        self._path = path
        self._seq = 0
        self._called = called
        self._told = False

    def all_reduce(self, flat: Tensor, op: ReduceOperator, timeout_s: float) -> str:
        def small(frames: list[Frame]) -> None:
            _fold(flat, frames, op)

        large = lambda s: self.inner.all_reduce(flat, op, s)  # noqa: E731
        return self._do("all_reduce", flat, timeout_s, large, small, op=op, payload=lambda: _bytes(flat), early=True)

    def reduce(self, flat: Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        def small(frames: list[Frame]) -> None:
            if self._rank == root:
                _fold(flat, frames, op)

        large = lambda s: self.inner.reduce(flat, op, root, s)  # noqa: E731
        return self._do("reduce", flat, timeout_s, large, small, op=op, root=root, payload=lambda: _bytes(flat))

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> str:
        def small(frames: list[Frame]) -> None:
            if self._rank != root:
                _bytes(flat).copy_(frames[root].payload)

        large = lambda s: self.inner.broadcast(flat, root, s)  # noqa: E731
        payload = (lambda: _bytes(flat)) if self._rank == root else None
        return self._do("broadcast", flat, timeout_s, large, small, root=root, payload=payload)

    def all_gather(self, outputs: Flats, flat: Tensor, timeout_s: float) -> str:
        def small(frames: list[Frame]) -> None:
            for output, frame in zip(outputs, frames, strict=True):
                _bytes(output).copy_(frame.payload)

        large = lambda s: self.inner.all_gather(outputs, flat, s)  # noqa: E731
        early = all(output.numel() == flat.numel() for output in outputs)
        return self._do("all_gather", flat, timeout_s, large, small, payload=lambda: _bytes(flat), early=early)

    def gather(self, outputs: Flats | None, flat: Tensor, root: int, timeout_s: float) -> str:
        def small(frames: list[Frame]) -> None:
            for output, frame in zip(outputs or (), frames, strict=outputs is not None):
                _bytes(output).copy_(frame.payload)

        large = lambda s: self.inner.gather(outputs, flat, root, s)  # noqa: E731
        return self._do("gather", flat, timeout_s, large, small, root=root, payload=lambda: _bytes(flat))

    def reduce_scatter(self, output: Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        large = lambda s: self.inner.reduce_scatter(output, inputs, op, s)  # noqa: E731
        early = all(one.numel() == output.numel() for one in inputs)
        return self._do("reduce_scatter", output, timeout_s, large, op=op, early=early)

    def scatter(self, flat: Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        return self._do("scatter", flat, timeout_s, lambda s: self.inner.scatter(flat, inputs, root, s), root=root)

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        """See Transport. The frames carry how much every rank sends to and expects of each other, where it fits."""
        lengths = torch.tensor([t.numel() for t in (*inputs, *outputs)])
        fits = lengths.nbytes <= self._frames.most_nbytes

        def compare(frames: list[Frame]) -> None:
            agree([frame.payload.view(torch.int64).tolist() for frame in frames])

        def agree(table: list[list[int]]) -> None:
            for r in range(self._size):
                for s in range(self._size):
                    sent, expected = table[r][s], table[s][self._size + r]
                    if sent != expected:
                        raise CollectiveMismatchError(
                            f"all_to_all #{self._seq} of group {self._name!r}: rank {self._numbers[r]} sends {sent} "
                            f"elements to rank {self._numbers[s]}, which expects {expected}; input splits and output "
                            "splits must agree"
                        )

        def large(left_s: float) -> str:
            end_s = time.monotonic() + left_s
            if not fits:
                every = [torch.empty_like(lengths) for _ in range(self._size)]
                self.inner.all_gather(every, lengths, left_s)
                agree([one.tolist() for one in every])
            return self.inner.all_to_all(outputs, inputs, max(0.001, end_s - time.monotonic()))

        payload = (lambda: lengths.view(torch.uint8)) if fits else None
        compared = compare if fits else None
        return self._do("all_to_all", inputs[0][:0], timeout_s, large, payload=payload, compare=compared)

    def barrier(self, timeout_s: float) -> str:
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._do("barrier", nothing, timeout_s, self.inner.barrier, lambda _: None)

    def _do(
        self,
        kind: str,
        flat: Tensor,
        timeout_s: float,
        large: Callable[[float], str],
        small: Callable[[list[Frame]], None] | None = None,
        *,
        op: ReduceOperator | None = None,
        root: int = NO_ROOT,
        payload: Callable[[], Tensor] | None = None,
        compare: Callable[[list[Frame]], None] | None = None,
        early: bool = False,
    ) -> str:
        """Exchange frames, compare them, and finish with what they brought, or carry out the operation."""
        self._seq += 1
        nbytes = flat.numel() * flat.element_size()
        fits = small is not None and nbytes <= self._frames.most_nbytes
        fused = fits and self._fuses and not table_is_given()
        early = early and not fused and self._early_nbytes is not None and nbytes >= self._early_nbytes
        operator = NO_OPERATOR if op is None else op.number
        contract = contract_of(self._seq, kind, operator, flat.dtype, root, flat.numel(), fused=fused)
        deadline_s = time.monotonic() + timeout_s
        brings = payload() if payload is not None and (fused or compare is not None) else None
        try:
            alike = self._frames.begin(contract, brings, timeout_s)
            if early and alike:
                self._early.begin(contract, lambda left_s: self._agree(contract, left_s))
                path = large(max(0.001, deadline_s - time.monotonic()))
                self._early.agree(max(0.001, deadline_s - time.monotonic()))
                return path
            frames = self._agree(contract, max(0.001, deadline_s - time.monotonic()))
            if compare is not None:
                compare(frames)
            if fused and small is not None:
                small(frames)
                return self._path
            self._early.begin(contract)
            return large(max(0.001, deadline_s - time.monotonic()))
        except (CommError, NotAgreedError) as raised:
            error = raised.error if isinstance(raised, NotAgreedError) else raised
            if isinstance(error, CollectiveMismatchError):
                raise error from None
            late = isinstance(error, CollectiveTimeoutError) or time.monotonic() >= deadline_s
            raise self._named(error, f"{kind} #{self._seq}", late=late) from error

    def _agree(self, contract: bytes, timeout_s: float) -> list[Frame]:
        """Return all ranks' frames; raises CollectiveMismatchError: they do not all announce this operation."""
        frames = self._frames.finish(timeout_s)
        if any(frame.contract != contract for frame in frames):
            raise CollectiveMismatchError(
                f"ranks of group {self._name!r} disagree at operation #{self._seq}: "
                f"{differences(frames, self._numbers)}; "
                "every rank must call the same operation with equal sizes, types, operator and root"
            )
        return frames

    # --- troubles ---------------------------------------------------------------------------------------------------

    def _named(self, error: CommError, what: str, *, late: bool) -> CommError:
        """Return the error that names the rank at the end of the chain of those that wait for each other."""
        culprits = self._culprits(error)
        first = error.peer if error.peer is not None else culprits[0] if culprits else self._speaker
        note = self._note(error, first, late=late)
        notes: dict[int, Any] = {self._rank: note}

        def ask() -> None:
            self._store.set(f"hocket/trouble/{self._rank}", json.dumps(note))
            end_s = time.monotonic() + _GRACE_S
            while (culprit := self._end_of_chain(notes)) not in notes:
                # Asked before the time: who is gone has told of its trouble before it went, or never will.
                gone = any(note["gone"] and note["waits"] == culprit for note in notes.values())
                if self._store.check([f"hocket/trouble/{culprit}"]):
                    notes[culprit] = json.loads(self._store.get(f"hocket/trouble/{culprit}"))
                elif gone or time.monotonic() >= end_s:
                    break
                else:
                    time.sleep(_LOOK_S)

        try:
            c10d.ask(ask, 2 * _GRACE_S)
        except Exception as trouble:  # the store is gone with its host, or stands still: what was seen here must do
            log.debug("group %s: the store does not answer: %s", self._name, trouble)
        culprit = self._end_of_chain(notes)
        number = self._numbers[culprit]
        mine, its = self._called[self._rank], self._called[culprit]
        where = f"{what} of group {self._name!r}"
        if culprit in notes:
            text = f"{its} failed in {where}, as {mine} heard: {notes[culprit]['text']}"
            return CollectiveTimeoutError(text, (culprit,), (number,)) if notes[culprit]["late"] else CommError(text)
        if any(note["late"] for note in notes.values()):
            text = f"{where} passed its timeout on {mine}: not arrived: {its}. {error}"
            return CollectiveTimeoutError(text, (culprit,), (number,))
        text = f"{its} died or left while {mine} waited in {where}: {error}"
        return PeerDiedError(text, culprit, (number,))

    def leave(self, why: Exception | None) -> None:
        """Tell, where others look when they lose the connection to this rank, what its program ends in, if it fails."""
        if why is None or self._told:
            return
        culprits = self._culprits(why)
        late = isinstance(why, CollectiveTimeoutError)
        text = json.dumps(self._note(why, culprits[0] if culprits else self._rank, late=late))
        with contextlib.suppress(Exception):  # the store is gone, or stands still
            c10d.ask(lambda: self._store.set(f"hocket/trouble/{self._rank}", text), _GRACE_S)

    def _culprits(self, error: Exception) -> list[int]:
        return [self._numbers.index(c) for c in getattr(error, "culprits", ()) if c in self._numbers]

    def _note(self, error: Exception, first: int, *, late: bool) -> dict[str, Any]:
        """Return what others are told of an error that this rank meets, of which rank `first` is the cause."""
        self._told = True
        return {
            "waits": None if first == self._rank else first,
            "gone": isinstance(error, PeerDiedError),
            "late": late,
            "text": str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}",
        }

    def _end_of_chain(self, notes: dict[int, Any]) -> int:
        """Return the rank that is waited for and tells of no trouble, or of one that is not another's fault.

        If this rank waits for one that waits for it, as in another group, it is that one.
        """
        at, seen = self._rank, set[int]()
        while at in notes and at not in seen and notes[at]["waits"] is not None:
            seen.add(at)
            at = int(notes[at]["waits"])
        return at if at != self._rank or len(seen) < 2 else int(notes[at]["waits"])


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _fold(flat: Tensor, frames: Sequence[Frame], op: ReduceOperator) -> None:
    """Reduce what all ranks have brought, in their order, so that all have the same bits."""
    target = flat if op.view is None else flat.view(op.view)
    first, *others = [frame.payload.view(target.dtype) for frame in frames]
    target.copy_(first)
    for one in others:
        op.kernel(target, one, out=target)
    op.finish(flat, len(frames))
