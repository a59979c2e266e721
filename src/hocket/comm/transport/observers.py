"""The seam through which `comm` announces its operations; `profile` listens."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class OperationRecord:
    """One collective or point-to-point operation as one rank saw it.

    Times are `time.perf_counter()` in seconds, which on Linux all processes of a host share.

    Attributes:
        group: Name of the process group.
        seq: Number of the operation in its group, from 1.
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter",
            "barrier", "send" or "recv".
        nbytes: Bytes of the full vector S as nccl-tests count it.
        dtype: Torch's name of the element type without "torch.".
        world: Number of ranks in the group.
        path: "shm-direct" (reduced in place), "shm-staged", or the engine's name.
        asynchronous: Whether the caller asked for a Work instead of waiting.
        posted_s: When the caller posted it.
        started_s: When this rank began it.
        published_s: When this rank had itself arrived: what peers need of it first was in place.
        arrived_s: When the last peer had arrived at it; where an engine does not tell, `published_s`.
        finished_s: When this rank had finished it.
        label: Name that the caller gave it with `label(...)`.
        inline: Whether the caller's thread carried it out itself, and so was blocked from `posted_s` to `finished_s`;
            observers hear of no other wait for it.
    """

    group: str
    seq: int
    kind: str
    nbytes: int
    dtype: str
    world: int
    path: str
    asynchronous: bool
    posted_s: float
    started_s: float = 0.0
    arrived_s: float = 0.0
    finished_s: float = 0.0
    label: str | None = None
    published_s: float = 0.0
    inline: bool = False

    @property
    def skew_s(self) -> float:
        """Seconds that this rank, having arrived, waited for the last peer to arrive."""
        return max(0.0, self.arrived_s - max(self.published_s, self.started_s))


class Observer(Protocol):
    """Who wants to hear of operations. Calls may come from a progress thread and must be quick."""

    def operation_finished(self, op: OperationRecord) -> None:
        """Learn that this rank has finished `op`."""

    def operation_waited(self, op: OperationRecord, begin_s: float, end_s: float) -> None:
        """Learn that the user's thread was blocked on `op` from `begin_s` to `end_s` (perf_counter seconds).

        Of an operation that is `inline` its end says that, unless it failed and had none.
        """


class ProgressObserver(Protocol):
    """Who wants to know what this rank is in the middle of: at most one of a process. Calls must be quick."""

    def operation_started(self, op: OperationRecord) -> None:
        """Learn that this rank has begun `op`."""

    def message_waiting(self, peer: int, nbytes: int, receives: bool) -> None:
        """Learn that a thread begins to wait for a message; `peer` is a number of the world, -1 if it may be any."""

    def message_waited(self) -> None:
        """Learn that this wait is over."""


_label: contextvars.ContextVar[str | None] = contextvars.ContextVar("hocket_label", default=None)

# Replaced, never changed, so that a progress thread may walk it without a lock.
observers: tuple[Observer, ...] = ()

progress: ProgressObserver | None = None

members: dict[str, tuple[int, ...]] = {}  # the ranks of every group, as numbers of the world
descriptions: dict[str, str] = {}  # what torch calls groups that it was given a description of


def follow(listener: ProgressObserver | None) -> None:
    """Tell `listener` from now on what this rank is in the middle of, instead of who was told before."""
    global progress
    progress = listener


def known_group(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a group's description, or its name if it has none, and its ranks as numbers of the world."""
    described = descriptions.get(name, "undefined")
    return name if described in ("undefined", "") else described, members.get(name, ())


def observe(observer: Observer) -> Callable[[], None]:
    """Subscribe `observer` to all operations of this process; the returned function ends that."""
    global observers
    observers = (*observers, observer)

    def unsubscribe() -> None:
        global observers
        observers = tuple(o for o in observers if o is not observer)

    return unsubscribe


@contextlib.contextmanager
def label(name: str) -> Iterator[None]:
    """Name the operations that are posted inside the block, for reports."""
    token = _label.set(name)
    try:
        yield
    finally:
        _label.reset(token)


def current_label() -> str | None:
    """Return the name given by the innermost `label` block."""
    return _label.get()


def announce_finished(op: OperationRecord) -> None:
    """Tell all observers that `op` has finished."""
    for observer in observers:
        observer.operation_finished(op)


def announce_waited(op: OperationRecord, begin_s: float, end_s: float) -> None:
    """Tell all observers that the user's thread was blocked on `op`."""
    for observer in observers:
        observer.operation_waited(op, begin_s, end_s)


def announce_message(world: int, begin_s: float, end_s: float) -> None:
    """Tell all observers that the user's thread was blocked on a message of another rank, from begin to end.

    Messages are the handles of their callers, who alone know when they wait; sequences of them have no number.
    """
    if observers:
        op = OperationRecord(
            group="messages",
            seq=0,
            kind="recv",
            nbytes=0,  # which the caller alone knows
            dtype="",
            world=world,
            path="message",
            asynchronous=True,
            posted_s=begin_s,
            started_s=begin_s,
            published_s=begin_s,
            arrived_s=begin_s,
            finished_s=end_s,
        )
        announce_finished(op)
        announce_waited(op, begin_s, end_s)
