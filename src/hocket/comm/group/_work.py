"""The handle of an operation, and the thread that advances what was posted asynchronously."""

import _thread
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from ..transport import CollectiveTimeoutError, CommError
from ..transport import observers as _observe

log = logging.getLogger("hocket.comm")

S = TypeVar("S")


_DEFAULT_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_this_thread = threading.local()


class OperationFuture(torch.futures.Future[list[torch.Tensor]]):
    """The outputs of an operation, once it is over.

    A callback may post operations and wait for them (PowerSGD's do). Ranks must post these in one order, which threads
    that run beside the program would not keep to, and the progress thread could not wait for what it has to carry out.
    So `then` waits for the operation, and the callback runs at once where `then` was called, as with NCCL. DDP itself
    and torch's default hooks, whose callbacks post nothing, go on beside the operation.
    """

    def then(self, callback: Callable[[torch.futures.Future[list[torch.Tensor]]], S]) -> torch.futures.Future[S]:
        """Call `callback` with this future when it is complete; return a future of what it returns."""
        if getattr(callback, "__module__", None) != _DEFAULT_HOOKS:
            with contextlib.suppress(Exception):  # the callback sees it
                self.wait()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[list[torch.Tensor]]], None]) -> None:
        """Call `callback` when this future is complete, in a thread of its own."""
        super().add_done_callback(lambda done: threading.Thread(target=callback, args=(done,), daemon=True).start())


class _Failure:
    """What the future of a failed operation holds.

    Futures of Python have no errors below Python: DDP's reducer takes the first of the tensors in whatever they hold,
    found by pickling it, and crashes where there is none. So it meets the error there.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: object) -> Any:
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error


class HocketWork(Work):
    """An operation that runs, or has run, in this process."""

    # Defaults here rather than in each object: many live for microseconds, and this is on the way of every operation.
    _error: BaseException | None = None
    _done = False
    _gate: _thread.LockType | None = None
    _future: OperationFuture | None = None

    def __init__(self, results: list[torch.Tensor], record: _observe.OperationRecord | None) -> None:
        super().__init__()
        self.record = record
        self._results = results
        self._guard = threading.Lock()

    def over(self, error: BaseException | None) -> None:
        """Mark the operation as over before anyone has seen this handle, who could be waiting."""
        self._error = error
        self._done = True

    def finish(self, error: BaseException | None) -> None:
        """Mark the operation as over and wake whoever waits."""
        with self._guard:
            self._error = error
            future = self._future
            self._done = future is None
        if future is not None:
            try:
                self._settle(future)  # before anyone wakes, who may ask the future for its value
            finally:
                self._done = True
        with self._guard:
            gate = self._gate
        if gate is not None:
            gate.release()

    def _settle(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future._set_unwrap_func(_raise)
            future.set_result(_Failure(self._error))  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over and raise its error, if any.

        Raises:
            CollectiveTimeoutError: `timeout` passed first; the operation goes on.
        """
        if not self._done:
            self._block(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _block(self, timeout: timedelta | None) -> None:
        if getattr(_this_thread, "progresses", False):
            raise CommError(
                "a callback of an operation's future waits for another operation, which the thread that runs the "
                "callback has to carry out: call get_future().then(callback) instead, or do not wait in it"
            )
        begin_s = time.perf_counter()
        with self._guard:
            if self.is_completed():
                return
            if self._gate is None:
                self._gate = _thread.allocate_lock()
                self._gate.acquire()
            gate = self._gate
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not gate.acquire(timeout=seconds if seconds > 0 else -1):
            what = f"{self.record.kind} #{self.record.seq}" if self.record is not None else "the operation"
            raise CollectiveTimeoutError(f"{what} was not finished {seconds:.1f} s after wait() was called", ())
        gate.release()  # for the next thread that waits
        if self.record is not None and _observe.observers:
            _observe.announce_waited(self.record, begin_s, time.perf_counter())

    def is_completed(self) -> bool:
        """Return whether the operation is over, with or without success."""
        return self._done or (self._future is not None and self._future.done())

    def is_success(self) -> bool:
        """Return whether the operation is over without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, if it has one."""
        return self._error

    def synchronize(self) -> None:
        """Do as `wait` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._results

    def source_rank(self) -> int:
        """Only a receive from any rank has one."""
        raise RuntimeError("source_rank() is for recv; this operation is a collective")

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors."""
        with self._guard:
            if self._future is None:
                devices = {one.device for one in self._results if one.is_cuda}  # torch wants to know them
                self._future = OperationFuture(devices=list(devices)) if devices else OperationFuture()
                settle = self._done
            else:
                settle = False
        if settle:
            self._settle(self._future)
        return self._future


class ProgressQueue:
    """Runs the operations of one group one after the other, in the order of posting.

    What is posted asynchronously runs on a thread of its own while the caller goes on; a synchronous operation with
    nothing before it runs on the caller's thread. The thread starts with the first asynchronous operation and sleeps
    when there is nothing to do.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: queue.SimpleQueue[tuple[HocketWork, Callable[[], BaseException | None]] | None] = (
            queue.SimpleQueue()
        )
        self._turn = threading.Lock()
        self._pending = 0
        self._count = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def enter(self) -> bool:
        """Take the turn for this thread if nothing is before it; then `leave` must follow."""
        if self._pending or not self._turn.acquire(blocking=False):
            return False
        if self._pending:
            self._turn.release()
            return False
        return True

    def leave(self) -> None:
        """Give the turn back."""
        self._turn.release()

    def post(self, work: HocketWork, body: Callable[[], BaseException | None]) -> None:
        """Queue `body`, which returns its error, behind everything posted before."""
        with self._count:
            if self._thread is None or (self._closed and not self._thread.is_alive()):
                thread = threading.Thread(target=self._serve, name=f"hocket-{self._name}", daemon=True)
                thread.start()  # fails where there are too many
                self._thread = thread
            self._pending += 1
        self._items.put((work, body))

    def close(self, timeout_s: float) -> bool:
        """Let the thread end after what is queued; False if that takes longer than `timeout_s`."""
        self._closed = True
        if self._thread is None or self._thread is threading.current_thread() or not self._thread.is_alive():
            return True
        self._items.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        torch.set_grad_enabled(False)  # of this thread only
        _this_thread.progresses = True
        while True:
            item = self._items.get()
            if item is None:
                return
            work, body = item
            with self._turn:
                error = body()
                with self._count:
                    self._pending -= 1
            work.finish(error)
            del item, work, body  # tensors must not outlive their operation because the thread is idle
