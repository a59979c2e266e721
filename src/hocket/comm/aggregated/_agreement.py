"""What the ranks of a group agree on when an aggregator serves them: no operation is lost, whatever becomes of it.

Operations have numbers, the same on all ranks. An all_reduce or all_gather that one rank has finished has been begun by
all, so ranks are never more than one operation apart. When the aggregator fails, every rank comes to `_settle`, over
the host-based transport, with the number of the operation that it stands at:

- all at the same number: nobody has finished it; all repeat it through the hosts with the original inputs, which no
  rank has touched, since results arrive in other memory;
- some one further: those have the result and keep it until the next operation ends; the first of them sends it to the
  others, who are thereby done with it, and all meet again at the next number.

For reduce, broadcast and reduce_scatter, where one rank's result does not help another, the aggregator says that the
operation is over only when all ranks have confirmed their parts: if any rank has heard that, all have their results.

An operation may fail on one rank alone: the aggregator told it that a rank is late, while that one was cut off from the
aggregator. The group is over there, and that rank settles no more, not when it leaves either: it would stand at the
next number as if it had the result. Who settles without it learns that it has gone, and fails too.

With several ranks on a host each rail has an agreement of its own, and a rank that is behind keeps the others of its
host. A rank further on its rail may wait for those before it comes to its next operation here, which it would not
reach. So it watches, and settles meanwhile, by messages of a tag of their own.

A rank that turns to the hosts for an operation that the aggregator cannot do settles first too, so that nobody is left
behind; and now and then, at numbers that all ranks know, they ask each other whether the aggregator is back.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hocket.aggregator import AggregationError, ElementType, FailCode, GroupFailedError, Kind, Operator

from ..transport import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerDiedError, Transport
from ._session import AggregationSession
from ._shards import ShardedWork
from ._wire_types import raw

log = logging.getLogger("hocket.comm")

PATH: Final = "aggregator"
_ASK_EVERY: Final = 16
"""While the aggregator is away, ranks ask each other after 1, 2, 4, 8 operations, and then after every so many."""
_LEAST_RECOVERY_S: Final = 10.0
_WATCH_S: Final = 0.2


@dataclass(slots=True)
class AggregationStats:
    """What became of the operations of a group that has an aggregator.

    Attributes:
        served: Operations that the aggregator has served.
        elsewhere: Operations done through the hosts: the aggregator cannot do them, or was away.
        repeated: Operations interrupted at the aggregator and done again through the hosts.
        received: Operations interrupted on this rank only, and finished with another rank's result.
        failures: How often the aggregator was lost.
        returns: How often it came back.
    """

    served: int = 0
    elsewhere: int = 0
    repeated: int = 0
    received: int = 0
    failures: int = 0
    returns: int = 0


@dataclass(slots=True)
class Request:
    """An operation in the aggregator's terms."""

    kind: Kind  # kind of operation
    send: Tensor | None  # contribution of this rank
    receive: Tensor | None  # memory where the result arrives; the user's only where its old content is nobody's input
    deliver: Callable[[], object]  # function that puts the result in its place
    operator: Operator = Operator.NONE  # operator that combines
    element: ElementType = ElementType.UINT8  # type of the elements
    root: int = 0  # root of reduce and broadcast
    kept: bool = False  # whether a rank that has finished it can help the others by what is in `receive`


_agreements: "weakref.WeakSet[Agreement]" = weakref.WeakSet()


class Agreement:
    """Takes each operation to where it is done, and through the aggregator's end; see the head of this module.

    `hosts` carries what ranks say here, without the aggregator; coming in there the first time may take `timeout_s`.
    Ranks `watch` if nobody else uses it.
    """

    def __init__(
        self,
        session: AggregationSession,
        hosts: Transport,
        size: int,
        name: str,
        timeout_s: float,
        *,
        watch: bool = False,
    ) -> None:
        self.stats = AggregationStats()
        self.name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._settled_before = False  # the operation to come has its number already, and all ranks have met at it
        self._trouble = ""  # why the group is over on this rank
        self._timeout_s = max(timeout_s, _LEAST_RECOVERY_S)
        self._session = session
        self._hosts = hosts
        self._size = size
        self._number = 0
        self._unsettled = False  # whether a rank may still be behind this one
        self._must_settle = False  # whether this rank was behind, and the others wait at the next number
        self._kept: Tensor | None = None  # the result of the operation before
        self._results: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._away_since = 0
        self._at_aggregator = False
        self._work: ShardedWork | None = None  # the last operation that has begun at the aggregator
        weakref.finalize(self, session.close)
        _agreements.add(self)
        session.begin(timeout_s)
        self._ask(timeout_s)
        if watch:
            target = (weakref.ref(self), self._ended)
            threading.Thread(target=_watch, args=target, name=f"hocket-settle-{name}", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Leave the aggregator, once no rank needs the result of the last operation from this one.

        All ranks call it, as they call an operation.
        """
        self._ended.set()
        free = self._lock.acquire(timeout=timeout_s)
        try:
            if free and not self._settled_before and not self._trouble:
                self._number += 1
                if self._unsettled or self._must_settle:
                    self._settle(None, timeout_s)
        finally:
            self._session.close()
            if free:
                self._lock.release()

    def result_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a result; not that of the result before, which may still be asked for."""
        which = self._number % 2
        nbytes = numel * dtype.itemsize
        if self._results[which].numel() < nbytes:
            self._results[which] = torch.empty(nbytes, dtype=torch.uint8)
        return self._results[which][:nbytes].view(dtype)

    def do(self, make: Callable[[], Request] | None, through_hosts: Callable[[float], str], timeout_s: float) -> str:
        """Do one operation, at the aggregator if it is there and can do it (then `make` says it in its terms)."""
        with self._lock:
            if self._trouble:
                raise CommError(f"{self.name} cannot be used any more: {self._trouble}")
            try:
                return self._do(make, through_hosts, timeout_s)
            except CollectiveMismatchError:  # on all ranks
                raise
            except BaseException as error:
                self._trouble = f"operation {self._number} failed on this rank: {error!r}"
                raise

    def settle_if_lost(self) -> None:
        """Settle for the operation to come if the aggregator is lost and a rank may be behind; nothing if one runs."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._settled_before or self._trouble:
                return
            if not (self._must_settle or self._unsettled and not self._session.ready):
                return
            self._number += 1
            self._settled_before = True
            self._settle(None, self._timeout_s)
        except Exception as error:  # for who comes with the next operation
            self._trouble = f"the ranks could not agree how to go on: {error}"
        finally:
            self._lock.release()

    def _do(self, make: Callable[[], Request] | None, through_hosts: Callable[[float], str], timeout_s: float) -> str:
        if self._settled_before:
            self._settled_before = False
        else:
            self._number += 1
            self._meet(timeout_s)
        if self._at_aggregator and make is None and self._unsettled:
            self._settle(None, timeout_s)
        if make is None or not self._at_aggregator:
            self.stats.elsewhere += 1
            self._kept = None
            return through_hosts(timeout_s)
        request = make()
        try:
            self._serve(request, timeout_s)
        except AggregationError as error:
            return self._recover(request, through_hosts, error, timeout_s)
        self._finish(request)
        self.stats.served += 1
        return PATH

    def _meet(self, timeout_s: float) -> None:
        """Before an operation: settle with those who wait for that, or ask whether the aggregator is back."""
        if self._must_settle:
            self._settle(None, timeout_s)
        elif not self._at_aggregator:
            away = self._number - self._away_since
            if away % _ASK_EVERY == 0 or (away < _ASK_EVERY and away & (away - 1) == 0):
                self._ask(timeout_s)

    def _serve(self, request: Request, timeout_s: float) -> None:
        self._work = None
        self._work = self._session.group.post(
            request.kind,
            None if request.send is None else raw(request.send),
            None if request.receive is None else raw(request.receive),
            operator=request.operator,
            element=request.element,
            root=request.root,
            timeout_s=timeout_s,
        )
        self._work.wait()

    def _finish(self, request: Request) -> None:
        self._work = None
        request.deliver()
        self._kept = request.receive if request.kept else None
        self._unsettled = True

    def _recover(
        self, request: Request, through_hosts: Callable[[float], str], error: AggregationError, timeout_s: float
    ) -> str:
        """After the aggregator has failed in the middle of an operation."""
        if isinstance(error, GroupFailedError):
            if error.code == FailCode.TIMEOUT:
                missing = () if error.member is None else (self._session.position.order[error.member],)
                raise CollectiveTimeoutError(f"{self.name} at the aggregator: {error}", missing) from None
            if error.code == FailCode.MISMATCH:
                self._go_away()
                self._unsettled = False
                raise CollectiveMismatchError(f"{self.name} at the aggregator: {error}") from None
        log.warning("%s: operation %d goes on through the hosts: %s", self.name, self._number, error)
        self.stats.failures += 1
        try:
            behind = self._settle(request, max(timeout_s, _LEAST_RECOVERY_S))
        except Exception as trouble:
            message = f"{self.name}: {error}; and the ranks could not agree how to go on: {trouble}"
            if isinstance(error, GroupFailedError) and error.member is not None:
                raise PeerDiedError(message, self._session.position.order[error.member]) from trouble
            raise CommError(message) from trouble
        if behind:
            self._finish(request)
            self._unsettled = False
            self.stats.received += 1
            return f"{PATH}, received"
        self.stats.repeated += 1
        self._kept = None
        return f"{through_hosts(timeout_s)}, repeated"

    def _settle(self, failed: Request | None, timeout_s: float) -> bool:
        """Bring all ranks to one number; see the head of this module.

        Args:
            failed: Operation that this rank could not finish; None if it has not begun the one it stands at.
            timeout_s: Seconds for all of it.

        Returns:
            Whether this rank was behind: then `failed` is done, and its result is in place.
        """
        deadline_s = time.monotonic() + timeout_s
        lost = failed is not None or self._must_settle or not self._session.ready
        if lost and not self._must_settle:
            self._session.lose()
        while True:
            table = self._exchange([self._number, int(lost)], deadline_s)
            numbers = [number for number, _ in table]
            lowest, highest = min(numbers), max(numbers)
            if highest > lowest + 1:
                raise CommError(f"ranks stand at operations {numbers}: they have not called the same ones")
            if highest == lowest:
                break
            if not lost:
                lost = True
                self._session.lose()
            behind = self._number == lowest
            self._hand_over(failed if behind else None, numbers.index(highest), deadline_s)
            if behind:
                self._must_settle = True
                self._at_aggregator = False
                return True
        self._must_settle = self._unsettled = False
        if any(someone_lost for _, someone_lost in table):
            self._go_away(already_lost=lost)
        return False

    def _hand_over(self, failed: Request | None, source: int, deadline_s: float) -> None:
        """Give the result of the last operation to those who have not got it.

        Raises CommError: another rank cannot have finished `failed`, since this one has not done its part.
        """
        if failed is not None and (self._work is None or not self._work.may_be_over):
            raise CommError(
                f"a rank went on from operation {self._number} ({failed.kind.name.lower()}), of which the result has "
                "not come here"
            )
        kept = self._kept if failed is None else (failed.receive if failed.kept else None)
        if kept is None:
            return
        self._hosts.broadcast(kept, source, max(1.0, deadline_s - time.monotonic()))

    def _exchange(self, words: Sequence[int], deadline_s: float) -> list[list[int]]:
        """Return what every rank says, in the order of ranks."""
        mine = torch.tensor(words, dtype=torch.int64)
        table = torch.zeros(self._size, len(words), dtype=torch.int64)
        self._hosts.all_gather(list(table), mine, max(1.0, deadline_s - time.monotonic()))
        rows: list[list[int]] = table.tolist()
        return rows

    def _go_away(self, *, already_lost: bool = False) -> None:
        """From this number on operations go through the hosts, on all ranks."""
        if not already_lost:
            self._session.lose()
        self._at_aggregator = False
        self._away_since = self._number

    def _ask(self, timeout_s: float) -> None:
        """Return whether all ranks are in the same incarnation of the group; then the aggregator is used again."""
        table = self._exchange([self._session.ready], time.monotonic() + timeout_s)
        generations = {generation for (generation,) in table}
        if len(generations) == 1 and 0 not in generations:
            self._at_aggregator = True
            if self._away_since:
                self.stats.returns += 1
                log.info("%s: the aggregator serves again from operation %d on", self.name, self._number)


def _watch(agreement: "weakref.ref[Agreement]", ended: threading.Event) -> None:
    """Let an agreement look around until it has ended or is gone."""
    while not ended.wait(_WATCH_S) and (found := agreement()) is not None:
        found.settle_if_lost()
        del found


def aggregation_stats() -> dict[str, AggregationStats]:
    """Return what became of operations, for each group of this process that has an aggregator."""
    return {agreement.name: agreement.stats for agreement in _agreements}
