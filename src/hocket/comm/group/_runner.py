"""Runs the operations of one group in order, tells the observers, and ends the group when one of them breaks it."""

import contextlib
import copy
import functools
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from .. import torch_adapter
from ..shm import Channel
from ..transport import CollectiveMismatchError, CommError
from ..transport import observers as _observe
from ._work import HocketWork, ProgressQueue

Action = Callable[[float], str]
"""Does the work within so many seconds and returns the path taken."""

_CLOSE_S = 5.0
_THREADS = 8  # whose names are kept at most


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ending() -> Exception | None:
    """Return the error in which this program ends, if it does: its peers in all groups are to hear of the cause."""
    under_way = sys.exc_info()[1]  # in a `finally` that destroys the groups
    error = under_way if isinstance(under_way, CommError) else getattr(sys, "last_value", None)
    return error if isinstance(error, Exception) else None


class Runner:
    """The operations of one group.

    `channel` is None where its ranks share no host; `timeout` is for operations that name none.
    """

    def __init__(self, name: str, size: int, channel: Channel | None, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        self.seq = 0
        self._name = name
        self._size = size
        self._channel = channel
        self._broken: CommError | None = None
        self._thread, self._threads = 0, dict[int, str]()  # the last that has called, and the names of all
        self._queue = ProgressQueue(name)

    def submit(
        self, kind: str, opts: Any, results: list[torch.Tensor], payload: Any, action: Action, written: bool = True
    ) -> HocketWork:
        """Run `action` now, or queue it.

        The future of the operation will hold `results`, which `action` writes to if `written` is True; reports count
        the bytes of `payload`; `opts` are c10d's: time-out and whether the caller waits. Raises CommError: an earlier
        operation has broken the group.
        """
        if self._broken is not None:
            again = copy.copy(self._broken)
            again.add_note(
                f"That was before: group {self._name!r} is over, for all of this program. Start the ranks again."
            )
            raise again
        if self._thread != threading.get_ident():
            self._note_thread()
        timeout_s = opts.timeout.total_seconds()
        if timeout_s <= 0:
            timeout_s = self.timeout_s
        record = self._record(kind, payload, opts.asyncOp) if _observe.observers else None
        work = HocketWork(results, record)
        if opts.asyncOp or not self._queue.enter():
            # What this thread's inference mode permits the progress thread must be permitted too.
            inference = torch.is_inference_mode_enabled()
            if opts.asyncOp and written:  # counted now: autograd may keep a result before it is there
                torch.autograd.graph.increment_version(results)
            self._queue.post(work, lambda: self._run_beside(action, record, timeout_s, inference, opts.asyncOp))
            self.seq += 1
            return work
        self.seq += 1
        if record is not None:
            record.inline = True
        try:
            with torch_adapter.unseen():  # as on the progress thread, and as any other backend's copies
                error = self._run(action, record, timeout_s)
        finally:
            self._queue.leave()
        if error is not None and record is not None:
            _observe.announce_waited(record, record.posted_s, time.perf_counter())
        if error is not None and not isinstance(error, Exception):
            raise error
        work.over(error)
        return work

    def _run_beside(
        self,
        action: Action,
        record: _observe.OperationRecord | None,
        timeout_s: float,
        inference: bool,
        counted: bool,
    ) -> BaseException | None:
        """On the progress thread, beside computation that needs the cores more than waiting does."""
        # A program may ask for gradients of a result before it has waited for it; leaving inference mode turns them on.
        versions = torch_adapter.uncounted() if counted else contextlib.nullcontext()
        with torch.inference_mode(inference), torch.no_grad(), versions:
            if self._channel is None:
                return self._run(action, record, timeout_s)
            self._channel.patient = True
            try:
                return self._run(action, record, timeout_s)
            finally:
                self._channel.patient = False

    def _run(self, action: Action, record: _observe.OperationRecord | None, timeout_s: float) -> BaseException | None:
        if self._broken is not None:
            return copy.copy(self._broken)
        try:
            if record is None:
                action(timeout_s)
                return None
            record.started_s = record.posted_s if record.inline else time.perf_counter()
            if _observe.progress is not None:
                _observe.progress.operation_started(record)
            record.path = action(timeout_s)
            record.finished_s = time.perf_counter()
            if self._channel is not None:
                record.published_s, record.arrived_s = self._channel.published_s, self._channel.arrived_s
            else:
                record.published_s = record.arrived_s = record.started_s
            _observe.announce_finished(record)
        except CollectiveMismatchError as error:
            if set(self._threads) - {threading.main_thread().ident}:
                names = ", ".join(map(repr, self._threads.values()))
                error.args = (
                    f"{error}. On this rank operations of this group were called in thread {names}: if two threads "
                    "call at once, another rank may come to theirs in another order",
                )
            return error
        except BaseException as error:
            self._break(error)
            return error
        return None

    def close(self) -> None:
        """Finish what is queued, then tell the peers that this rank takes part no more."""
        if self._queue.close(_CLOSE_S) and self._channel is not None:
            self._channel.release()
        self.leave()

    def refuse(self, error: CommError) -> None:
        """Answer whatever is submitted from now on with this error; the peers are not told."""
        self._broken = error

    def settle(self, timeout_s: float) -> None:
        """Wait until the progress thread has ended, or for so many seconds.

        A thread that returns from torch while the interpreter ends would abort the process.
        """
        self._queue.close(timeout_s)

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank has given up, and why."""
        if self._channel is not None:
            self._channel.fail(error)

    def leave(self) -> None:
        """Tell the peers at once that this rank takes part no more, and what has failed in its program if that ends."""
        if self._channel is not None:
            self._channel.leave(ending())

    def _note_thread(self) -> None:
        """Remember who calls, for where ranks disagree; threads that Python has not made have no telling names."""
        self._thread, thread = threading.get_ident(), threading.current_thread()
        if not isinstance(thread, threading._DummyThread) and len(self._threads) < _THREADS:
            self._threads[self._thread] = thread.name

    def _record(self, kind: str, payload: Any, asynchronous: bool) -> _observe.OperationRecord:
        if isinstance(payload, torch.Tensor):
            nbytes, dtype = payload.nbytes, _name(payload.dtype)
        else:
            nbytes, dtype = sum(one.nbytes for one in payload), _name(payload[0].dtype) if payload else ""
        return _observe.OperationRecord(
            self._name, self.seq + 1, kind, nbytes, dtype, self._size, "", asynchronous, time.perf_counter(),
            0.0, 0.0, 0.0, _observe.current_label(),
        )  # fmt: skip

    def _break(self, error: BaseException) -> None:
        """After an error in the middle of an operation the ranks are out of step: the group is over."""
        if isinstance(error, CommError):
            self._broken = error
        else:
            self._broken = CommError(
                f"group {self._name!r} cannot be used any more since an operation failed on this rank: {error!r}"
            )
        if self._channel is not None:
            self._channel.fail(error)
