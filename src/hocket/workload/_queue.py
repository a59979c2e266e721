"""A GPU works through a queue that the host fills ahead of it; what of that a time between two marks shows."""

import math
import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import Any, NamedTuple, Protocol

import torch

_PRODUCT = 2048  # rows and columns of a product that keeps a GPU busy
_STEPS = 4  # in a row, of which the first one begins with an empty queue and does not count
_SHORT_S = 0.5  # a step that is longer is measured once, and not a few times in a row
_BUSY, _AHEAD = 1.05, 2.0  # times what the host takes: the device is behind; far behind, all the time


class Queue(Protocol):
    """A device that runs behind the host."""

    def host_s(self) -> float: ...

    def mark(self) -> Any:
        """Put a mark behind what is queued; nobody waits."""
        ...

    def between_s(self, one: Any, other: Any) -> float:
        """Return the seconds between two marks that the device has passed."""
        ...

    def settle(self) -> None:
        """Wait until the queue is empty."""
        ...

    def occupy(self, seconds: float) -> None:
        """Queue work of no use that takes about so long, or longer; hardly any time of the host's."""
        ...


class CudaQueue:
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._given = torch.zeros(_PRODUCT, _PRODUCT, device=device)
        self._out = torch.empty_like(self._given)
        self._each_s = math.inf
        for _ in range(3):  # the first one loads kernels
            before = self.mark()
            torch.mm(self._given, self._given, out=self._out)
            after = self.mark()
            self.settle()
            self._each_s = min(self._each_s, max(1e-5, self.between_s(before, after)))

    def host_s(self) -> float:
        return time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """See Queue."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_s(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        """See Queue."""
        return float(one.elapsed_time(other)) / 1e3

    def settle(self) -> None:
        """See Queue."""
        torch.cuda.synchronize()

    def occupy(self, seconds: float) -> None:
        """See Queue."""
        for _ in range(math.ceil(seconds / self._each_s)):
            torch.mm(self._given, self._given, out=self._out)


class Whole(NamedTuple):
    """A step as a whole: seconds from one to the next of several in a row, and of the host to queue one."""

    seconds: float
    host_s: float


class ByBatch(NamedTuple):
    """What part of a batch takes: `seconds` x (`fixed` + (1 - `fixed`) x part), and `launch_s` at the least."""

    seconds: float
    fixed: float
    launch_s: float


def whole_step(queue: Queue, step: Callable[[], object], rows: int) -> Whole:
    """Return how long steps take one after the other, as in training, where nobody waits between them."""
    step()  # chooses kernels
    queue.settle()
    begun = queue.host_s()
    step()
    queue.settle()
    long = queue.host_s() - begun > _SHORT_S
    each: list[float] = []
    host: list[float] = []
    for _ in range(1 if long else rows):
        queue.settle()
        begun = queue.host_s()
        step()
        host.append(queue.host_s() - begun)
        first = queue.mark()
        steps = 1 if long else _STEPS - 1
        for _ in range(steps):
            step()
        last = queue.mark()
        queue.settle()
        each.append(queue.between_s(first, last) / steps)
    return Whole(usual(each), min(host))


def by_batch(found: Mapping[float, Whole]) -> ByBatch:
    """Return how time follows the batch, from whole steps by their part of the batch; 1 is among them.

    What does not shrink is told by the smallest batch at which the device is busy all the time. At smaller ones it
    waits for the host, whose time is a floor below which no step falls, and no part of a larger batch's time: the
    host's time runs beside the device's. Where even the whole batch waits for the host, all of it is fixed.
    """
    whole = found[1.0].seconds
    launch_s = min(one.host_s for one in found.values())  # of larger batches the queue may have been full
    parts = sorted(part for part in found if part < 1)
    if not parts:
        return ByBatch(whole, 0.0, launch_s)
    busy = [part for part in parts if found[part].seconds >= _AHEAD * launch_s]
    if not busy and found[parts[-1]].seconds >= _BUSY * launch_s:
        busy = parts[-1:]
    if not busy and whole >= _BUSY * launch_s:
        return ByBatch(whole, 0.0, launch_s)
    part = (busy or parts)[0]
    return ByBatch(whole, fixed_part(whole, found[part].seconds, part), launch_s)


def behind(queue: Queue, work: Callable[[], object]) -> float:
    """Return what the device takes for work whose launches are all queued before it begins, as behind other work.

    Call it once before: what is done for the first time takes longer.
    """
    queue.settle()
    begun = queue.host_s()
    work()
    queue.occupy(2 * (queue.host_s() - begun))
    before = queue.mark()
    work()
    after = queue.mark()
    queue.settle()
    return queue.between_s(before, after)


def fixed_part(whole: float, part: float, share: float) -> float:
    """Of t = fixed + batch x slope, known for a batch and for `share` of it, fixed / t of the batch."""
    if not whole:
        return 0.0
    return min(1.0, max(0.0, (part / whole - share) / (1 - share)))


def usual(seconds: list[float]) -> float:
    """Return the lower quartile: whatever disturbs a measurement makes it longer."""
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]
