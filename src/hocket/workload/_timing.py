"""How long each unit takes, forward and backward, by hooks; and how much of that a small batch takes too.

A GPU works behind the host. There hooks tell how a step's time is shared among units, and what a step takes as a whole,
at several sizes of the batch, is measured without them (`_queue`): hooks add to the host's time, which training hides
behind kernels that still run, and a small batch does not.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hocket.sharding import as_local

from ._optimizers import OptimizerMaker
from ._queue import CudaQueue, Queue, behind, by_batch, fixed_part, usual, whole_step
from ._share import WorkloadError
from ._units import Loss, Unit, followed, samples

_SMALLER = 8  # how many times the small batch is smaller, whose time says what does not shrink
_ENOUGH_S = 0.5
_MOST_AHEAD_S = 0.2
_OPTIMIZER_STEPS = 7


@dataclass
class Timing:
    """Seconds of each unit, by its index, and the part of them that a small batch takes too.

    `launch_s` is what the host takes to launch both passes of all of them, where a device works behind it.
    """

    forward_s: dict[int, float]
    backward_s: dict[int, float]
    fixed_share: dict[int, float]
    launch_s: float = 0.0


def time_of(model: nn.Module, units: list[Unit], batch: Any, run: Loss, repeats: int, roomy: int = 1) -> Timing:
    """Return times of a step that nothing disturbs, and how much of them does not shrink with the batch.

    Gradients are added to those that are there, as in training, where they lie in buckets. A batch that is too small
    for a smaller one is compared with one that is `roomy` times as large, if there is memory for it.
    """
    place = next((one.device for one in tree_flatten(batch)[0] if isinstance(one, Tensor) and one.is_cuda), None)
    queue = None if place is None else CudaQueue(place)
    for one in model.parameters():
        if one.requires_grad:
            one.grad = torch.zeros_like(one)
    try:
        timing = _by_hooks(model, units, batch, run, repeats, queue, roomy)
        return timing if queue is None else by_whole_steps(timing, model, batch, run, repeats, queue)
    finally:
        model.zero_grad(set_to_none=True)


def _by_hooks(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss, repeats: int, queue: Queue | None, roomy: int
) -> Timing:
    forward, backward = _usual_steps(model, units, batch, run, repeats, queue)
    size = samples(batch)
    small = max(2, size // _SMALLER)  # batch norm wants two samples
    fixed = dict.fromkeys(forward, 0.0)
    if small < size:
        try:
            less = _usual_steps(model, units, _part(batch, size, small), run, repeats, queue)
        except (RuntimeError, ValueError, IndexError) as error:  # as graphs, whose edges name samples, and fixed sizes
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            rule = f"{type(model).__name__} runs on {size} samples, and not on the first {small} of them ({said})"
            why = "which tells what a step takes however few they are; samples are counted by the first tensor's rows"
            raise WorkloadError(f"capture: {rule}, {why}; capture on meta, where nothing is timed") from error
        fixed = {i: fixed_part(forward[i] + backward[i], less[0][i] + less[1][i], small / size) for i in forward}
    elif roomy > 1:
        more = _usual_steps(model, units, _repeated(batch, size, roomy), run, repeats, queue)
        for i in forward:
            own, large = forward[i] + backward[i], more[0][i] + more[1][i]
            fixed[i] = min(1.0, fixed_part(large, own, 1 / roomy) * large / own) if own else 0.0
    return Timing(forward, backward, fixed)


def by_whole_steps(timing: Timing, model: nn.Module, batch: Any, run: Loss, repeats: int, queue: Queue) -> Timing:
    """Return the times in their proportions, but such that they sum to what whole steps take, at each size."""
    size = samples(batch)
    sizes = {size, *(max(2, size // part) for part in (2, 4, _SMALLER))}

    def step(given: Any) -> None:
        result = run(model, given)
        with as_local():
            result.backward()  # type: ignore[no-untyped-call]

    found = {
        count / size: whole_step(queue, partial(step, _part(batch, size, count)), repeats)
        for count in sorted(sizes, reverse=True)
        if count <= size
    }
    told = by_batch(found)
    both = {i: timing.forward_s[i] + timing.backward_s[i] for i in timing.forward_s}
    scale = told.seconds / total if (total := sum(both.values())) else 1.0
    forward, backward = ({i: one * scale for i, one in each.items()} for each in (timing.forward_s, timing.backward_s))
    return Timing(forward, backward, dealt(told.fixed, both, timing.fixed_share), told.launch_s)


def dealt(fixed: float, seconds: dict[int, float], shares: dict[int, float]) -> dict[int, float]:
    """Return shares of units whose mean over their seconds is `fixed`, in the proportions of `shares`, 1 at most."""
    total = sum(seconds.values())
    found, free = dict.fromkeys(shares, 0.0), dict(shares)
    left = fixed * total  # seconds that are still to be dealt
    while left > 0 and free:
        weight = sum(seconds[i] * share for i, share in free.items())
        if not weight:
            rest = sum(seconds[i] for i in free)
            return found | dict.fromkeys(free, min(1.0, left / rest) if rest else 0.0)
        full = [i for i, share in free.items() if share * left > weight]
        if not full:
            return found | {i: share * left / weight for i, share in free.items()}
        for i in full:
            found[i], left = 1.0, left - seconds[i]
            del free[i]
    return found


def _part(batch: Any, size: int, count: int) -> Any:
    return tree_map(lambda one: one[:count] if _counts(one, size) else one, batch) if count < size else batch


def _repeated(batch: Any, size: int, times: int) -> Any:
    return tree_map(lambda one: torch.cat([one] * times) if _counts(one, size) else one, batch)


def _usual_steps(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss, repeats: int, queue: Queue | None
) -> tuple[dict[int, float], dict[int, float]]:
    begun = time.perf_counter()
    _timed_step(model, units, batch, run, queue, 0.0)  # warms up
    once = time.perf_counter()
    rounds = [_timed_step(model, units, batch, run, queue, 0.0)]
    # A device that has so much to do before finds all launches queued that the host, slowed by hooks, makes meanwhile.
    ahead_s = 0.0 if queue is None else min(_MOST_AHEAD_S, time.perf_counter() - once)
    step = partial(_timed_step, model, units, batch, run, queue, ahead_s)
    if queue is not None:
        rounds = [step()]
    enough = time.perf_counter() + min(_ENOUGH_S, 4 * repeats * (time.perf_counter() - begun))
    while len(rounds) < repeats or (len(rounds) < 4 * repeats and time.perf_counter() < enough):
        rounds.append(step())
    # The whole is the lower quartile of the steps, and shares of it are medians: quartiles of parts would sum to less.
    whole = usual([sum(one[0].values()) + sum(one[1].values()) for one in rounds])
    found = [{i: median(one[way].get(i, 0.0) for one in rounds) for i in range(len(units))} for way in (0, 1)]
    total = sum(found[0].values()) + sum(found[1].values())
    scale = whole / total if total else 1.0
    forward, backward = ({i: seconds * scale for i, seconds in each.items()} for each in found)
    return forward, backward


def _timed_step(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss, queue: Queue | None, ahead_s: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of each unit forward, and backward: from when its output's gradient is there to the next one's.

    Of a device that runs behind the host these are its own instants; it is occupied for `ahead_s` before.
    """
    now: Callable[[], Any] = time.perf_counter if queue is None else queue.mark
    begun: list[tuple[int, Any]] = []
    arrived: list[tuple[int, Any]] = []

    with followed(units, lambda i: begun.append((i, now())), lambda i: arrived.append((i, now()))):
        if queue is not None:
            queue.settle()
            queue.occupy(ahead_s)
        start = now()
        result = run(model, batch)
        middle, ahead, early = now(), len(begun), len(arrived)
        with as_local():
            result.backward()  # type: ignore[no-untyped-call]
        end = now()
    del begun[ahead:]  # what is checkpointed runs again in the backward pass, and belongs to that
    del arrived[:early]  # what the forward pass takes derivatives of belongs to that
    if queue is not None:
        queue.settle()
        first = start
        start, middle, end = (queue.between_s(first, one) for one in (start, middle, end))
        begun, arrived = ([(index, queue.between_s(first, at)) for index, at in each] for each in (begun, arrived))
    forward: defaultdict[int, float] = defaultdict(float)
    backward: defaultdict[int, float] = defaultdict(float)
    begun[:1] = [(begun[0][0] if begun else 0, start)]  # what comes before the first layer is the first layer's
    for (index, at), (_, until) in zip(begun, [*begun[1:], (0, middle)], strict=True):
        forward[index] += until - at
    arrived[:1] = [(arrived[0][0] if arrived else 0, middle)]
    for (index, at), (_, until) in zip(arrived, [*arrived[1:], (0, end)], strict=True):
        backward[index] += until - at
    return dict(forward), dict(backward)


def _counts(one: Any, size: int) -> bool:
    return isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == size


def optimizer_time(model: nn.Module, make: OptimizerMaker) -> float:
    """Seconds of a step of an optimizer on copies of the parameters, with gradients of zeros."""
    copies = [nn.Parameter(one.detach().clone()) for one in model.parameters() if one.requires_grad]
    if not copies:
        return 0.0
    for one in copies:
        one.grad = torch.zeros_like(one)
    made = make(copies)
    made.step()  # the first one makes the state
    if copies[0].is_cuda:  # the host has launched the update long before the last gradient is there
        queue = CudaQueue(copies[0].device)
        return usual([behind(queue, made.step) for _ in range(_OPTIMIZER_STEPS)])
    rounds = []
    for _ in range(_OPTIMIZER_STEPS):
        start = time.perf_counter()
        made.step()
        rounds.append(time.perf_counter() - start)
    return usual(rounds)
