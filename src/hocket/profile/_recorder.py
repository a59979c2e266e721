"""Records every operation of this process, always on: it appends, and adds up when somebody asks or enough has come."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hocket.comm import OperationRecord
from hocket.schedule import KINDS, Collective
from hocket.timeline import covered_s

from ._listener import Interval, OperationListener

_FOLD_AFTER = 4096
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class Bin:
    """Messages of more than `above` and at most `upto` bytes, so that a full 64 MiB bucket falls in 32-64 MB.

    Attributes:
        name: Name as reports print it; KB and MB there are powers of 1,024, as in hvprof.
        above: Lower end in bytes, exclusive.
        upto: Upper end in bytes, inclusive.
    """

    name: str
    above: int
    upto: int


HVPROF_BINS = (
    Bin("up to 128 KB", -1, 128 * _KIB),
    Bin("128 KB-16 MB", 128 * _KIB, 16 * _MIB),
    Bin("16-32 MB", 16 * _MIB, 32 * _MIB),
    Bin("32-64 MB", 32 * _MIB, 64 * _MIB),
    Bin("above 64 MB", 64 * _MIB, 2**63),
)
"""The bins in which MVAPICH2-GDR's hvprof reports all-reduce (EDSR on MVAPICH2-GDR), with one for the rest."""


def bus_factor(kind: str, world: int) -> float:
    """Return the bus bytes per byte of the full vector: what a link of a ring would carry (nccl-tests, PERFORMANCE.md).

    Args:
        kind: Kind as in `hocket.comm.OperationRecord`.
        world: Number of ranks.
    """
    return Collective(kind, world).bus_factor if kind in KINDS else 1.0


@dataclass(frozen=True, slots=True)
class OperationTotals:
    """The operations of one kind whose messages fall in one bin.

    Attributes:
        kind: "all_reduce", ...
        bin: Name of the bin.
        count: Number of operations.
        nbytes: Bytes of all operations; of one, the full vector as nccl-tests count it.
        time_s: Time from this rank's start to its end, added up; waiting for late peers is part of it.
        exposed_s: How long the user's thread was blocked on them.
        skew_s: How much of `time_s` this rank waited for the last peer to arrive; that is the peers' computation, not
            communication. 0 where an engine moves the bytes, since it does not tell.
        algbw_Bps: Bytes over time less skew, since nccl-tests let all ranks begin together; 0.0 if nothing is left.
        busbw_Bps: `algbw_Bps` times the collective's bus factor.
    """

    kind: str
    bin: str
    count: int
    nbytes: int
    time_s: float
    exposed_s: float
    skew_s: float
    algbw_Bps: float
    busbw_Bps: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(slots=True)
class _Totals:
    count: int = 0
    nbytes: int = 0
    bus_nbytes: float = 0.0
    time_s: float = 0.0
    exposed_s: float = 0.0
    skew_s: float = 0.0


class Recorder(OperationListener):
    """Listens to the operations of this process between `start` and `stop`, or inside a `with` block.

    Recording appends to a list and costs about a microsecond; nothing is synchronised and no device is waited for. What
    has come is added up when somebody asks, or when it is much.

    Args:
        bins: Bins of message sizes, for the histogram.
        keep: How many of the last operations are kept one by one.
    """

    def __init__(self, bins: Sequence[Bin] = HVPROF_BINS, *, keep: int = 100_000) -> None:
        super().__init__()
        self._bins = tuple(bins)
        self._finished: list[OperationRecord] = []
        self._waited: list[tuple[OperationRecord, float, float]] = []
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], _Totals] = {}
        self._paths: dict[str, int] = {}
        self._events: deque[OperationRecord] = deque(maxlen=keep)
        self._waits: deque[Interval] = deque(maxlen=keep)
        self._communication_s = 0.0
        self._exposed_s = 0.0
        self._counted_until_s = float("-inf")

    # --- listening --------------------------------------------------------------------------------------------------

    def operation_finished(self, op: OperationRecord) -> None:
        self._finished.append(op)
        if op.inline:
            self._waited.append((op, op.posted_s, op.finished_s))
        if len(self._finished) >= _FOLD_AFTER:
            self._fold()

    def operation_waited(self, op: OperationRecord, begin_s: float, end_s: float) -> None:
        self._waited.append((op, begin_s, end_s))

    # --- answers ----------------------------------------------------------------------------------------------------

    def histogram(self) -> list[OperationTotals]:
        """Return the operations by kind and message size, by name of kind and in order of bins; no empty bins."""
        self._fold()
        order = {size.name: i for i, size in enumerate(self._bins)}
        rows = []
        for (kind, name), total in sorted(self._sums.items(), key=lambda item: (item[0][0], order[item[0][1]])):
            own_s = total.time_s - total.skew_s
            seconds = own_s if own_s > 0 else float("inf")
            rows.append(
                OperationTotals(
                    kind,
                    name,
                    total.count,
                    total.nbytes,
                    total.time_s,
                    total.exposed_s,
                    total.skew_s,
                    total.nbytes / seconds,
                    total.bus_nbytes / seconds,
                )
            )
        return rows

    def hidden_share(self) -> float | None:
        """Return the share of communication time that did not block the user's thread; None without communication.

        Communication time is the union of the operations' intervals, so that concurrent operations count once; exposed
        is that part of it in which the user's thread waited.
        """
        self._fold()
        if self._communication_s == 0.0:
            return None
        return 1.0 - self._exposed_s / self._communication_s

    def communication_s(self) -> float:
        """Return the seconds in which at least one operation was under way."""
        self._fold()
        return self._communication_s

    def exposed_s(self) -> float:
        """Return the seconds of communication in which the user's thread was blocked."""
        self._fold()
        return self._exposed_s

    def paths(self) -> dict[str, int]:
        """Return how many operations went which way ("shm-direct", "shm-staged", an engine's name)."""
        self._fold()
        return dict(self._paths)

    def operations(self) -> list[OperationRecord]:
        """Return the last operations, in the order in which they finished."""
        self._fold()
        return list(self._events)

    def waits(self) -> list[Interval]:
        """Return when the user's thread was blocked on an operation, of late: begin and end in perf_counter seconds."""
        self._fold()
        return list(self._waits)

    def events(self) -> list[dict[str, Any]]:
        """Return the last operations as JSON values, in the order in which they finished, after one with the clocks.

        Times are perf_counter seconds; the first event tells what to add for seconds since the epoch.
        """
        self._fold()
        clock = {"event": "clock", "epoch_minus_perf_counter_s": time.time() - time.perf_counter()}
        return [clock, *({"event": "operation", **asdict(op)} for op in self._events)]

    # --- adding up --------------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        with self._lock:
            # Lists are taken whole; what a progress thread appends meanwhile goes to the new ones.
            finished, self._finished = self._finished, []
            waited, self._waited = self._waited, []
            for op in finished:
                self._add(op)
            for op, begin_s, end_s in waited:
                self._sum(op).exposed_s += end_s - begin_s
                self._waits.append((begin_s, end_s))
            self._count_time([(op.started_s, op.finished_s) for op in finished], [w[1:] for w in waited])

    def _add(self, op: OperationRecord) -> None:
        total = self._sum(op)
        total.count += 1
        total.nbytes += op.nbytes
        total.bus_nbytes += op.nbytes * bus_factor(op.kind, op.world)
        total.time_s += op.finished_s - op.started_s
        total.skew_s += op.skew_s
        self._paths[op.path] = self._paths.get(op.path, 0) + 1
        self._events.append(op)

    def _sum(self, op: OperationRecord) -> _Totals:
        for size in self._bins:
            if size.above < op.nbytes <= size.upto:
                return self._sums.setdefault((op.kind, size.name), _Totals())
        raise ValueError(f"no bin for a message of {op.nbytes} bytes; bins must cover all sizes")

    def _count_time(self, busy: list[Interval], blocked: list[Interval]) -> None:
        after = self._counted_until_s
        busy = [(max(begin, after), end) for begin, end in busy if end > max(begin, after)]
        self._communication_s += (busy_s := covered_s(busy))
        self._exposed_s += max(0.0, busy_s + covered_s(blocked) - covered_s([*busy, *blocked]))
        self._counted_until_s = max([after, *(end for _, end in busy)])
