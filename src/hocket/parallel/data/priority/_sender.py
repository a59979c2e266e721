"""A thread that reduces chunks in a given order, with a bounded number of bytes on their way."""

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm

from ...mesh import World


class Sender:
    """Averages flat tensors over ranks; the only one to post operations on its group, always in the same order.

    Nobody else uses the group of `world`; a chunk that has been begun is waited for until `deadline_s`.
    """

    def __init__(self, world: World, deadline_s: float) -> None:
        self._world = world
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._flats: list[torch.Tensor] = []
        self._order: list[int] = []
        self._credit_nbytes = 0
        self._ready: list[bool] = []
        self._done: list[bool] = []
        self._begun = False
        self._closed = False
        self._outstanding_nbytes = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.ready_s: list[float] = []  # when each chunk was ready in the last round, on the clock of perf_counter
        self.done_s: list[float] = []

    def lay_out(self, flats: Sequence[torch.Tensor], order: Sequence[int], credit_nbytes: int) -> None:
        """Say what is to be averaged, and in which order; between rounds."""
        with self._changed:
            self._flats, self._order, self._credit_nbytes = list(flats), list(order), credit_nbytes
            self._done = [True] * len(flats)

    def begin(self) -> None:
        """Begin a round: every chunk is to become ready once, and will be done once."""
        with self._changed:
            self._ready = [False] * len(self._flats)
            self._done = [False] * len(self._flats)
            self.ready_s = [0.0] * len(self._flats)
            self.done_s = [0.0] * len(self._flats)
            self._begun = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hocket-priority", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ready(self, chunk: int) -> None:
        """Take notice that the values of a chunk are complete."""
        with self._changed:
            self._ready[chunk] = True
            self.ready_s[chunk] = time.perf_counter()
            self._changed.notify_all()

    def wait(self, chunks: Sequence[int]) -> None:
        """Wait until chunks of the round that was begun are averaged.

        RuntimeError if they were not in time, or what went wrong with an operation.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._error is not None or all(self._done[chunk] for chunk in chunks), self._deadline_s
            )
            if self._error is not None:
                raise self._error
            if not in_time:
                late = [chunk for chunk in chunks if not self._done[chunk]]
                raise RuntimeError(
                    f"rank {self._world.rank} waited {self._deadline_s:.0f} s for the averages of gradient chunks "
                    f"{late[:5]}: another rank has stopped, or has not come to this step"
                )

    def close(self) -> None:
        """Let what was begun end, then the thread."""
        with self._changed:
            thread = self._thread
            complete = self._begun and all(self._ready)
        if complete and self._error is None:
            self.wait(range(len(self._flats)))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(self._deadline_s)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._begun or self._closed)  # a program may do other things for long
                if not self._begun:
                    return
                self._begun = False
            try:
                self._round()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _round(self) -> None:
        works = []
        for place, chunk in enumerate(self._order):
            flat = self._flats[chunk]
            nbytes = flat.numel() * flat.element_size()
            with self._changed:
                self._changed.wait_for(lambda: self._free(chunk, nbytes))  # noqa: B023  it is called here only
                if self._closed or self._error is not None:
                    return
                self._outstanding_nbytes += nbytes
            with comm.label(f"priority chunk {chunk}, sent {place}"):
                work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._world.group, async_op=True)
            works.append(work)
            work.get_future().add_done_callback(functools.partial(self._land, chunk, nbytes))
        for work in works:  # which has the group's deadline; its error is told by `_land`
            work.wait()

    def _free(self, chunk: int, nbytes: int) -> bool:
        """Return whether there is something to do about a chunk."""
        if self._closed or self._error is not None:
            return True
        on_the_way = self._outstanding_nbytes
        return self._ready[chunk] and (not on_the_way or on_the_way + nbytes <= self._credit_nbytes)

    def _land(self, chunk: int, nbytes: int, future: Any) -> None:
        """Count an operation that is over; on the thread that ran it."""
        try:
            future.value()
            error = None
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error = self._error or error
            self._done[chunk] = error is None
            self.done_s[chunk] = time.perf_counter()
            self._outstanding_nbytes -= nbytes
            self._changed.notify_all()
