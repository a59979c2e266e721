"""How long each unit takes, forward and backward, by hooks; and how much of that a small batch takes too."""

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from hocket.sharding import as_local

from ._units import Loss, Unit, hooked, samples

_SMALLER = 8  # how many times the small batch is smaller, whose time says what does not shrink
_ENOUGH_S = 0.5
_OPTIMIZER_STEPS = 7


@dataclass
class Timing:
    """Seconds of each unit, by its index, and the part of them that a small batch takes too."""

    forward_s: dict[int, float]
    backward_s: dict[int, float]
    fixed_share: dict[int, float]


def time_of(model: nn.Module, units: list[Unit], batch: Any, run: Loss, repeats: int) -> Timing:
    """Return times of a step that nothing disturbs, and how much of them does not shrink with the batch.

    Gradients are added to those that are there, as in training, where they lie in buckets.
    """
    for one in model.parameters():
        if one.requires_grad:
            one.grad = torch.zeros_like(one)
    try:
        forward, backward = _usual_steps(model, units, batch, run, repeats)
        size = samples(batch)
        small = max(2, size // _SMALLER)  # batch norm wants two samples
        fixed = dict.fromkeys(forward, 0.0)
        if small < size:
            part = tree_map(lambda one: one[:small] if _counts(one, size) else one, batch)
            less = _usual_steps(model, units, part, run, repeats)
            fixed = {i: _fixed(forward[i] + backward[i], less[0][i] + less[1][i], small / size) for i in forward}
    finally:
        model.zero_grad(set_to_none=True)
    return Timing(forward, backward, fixed)


def usual(seconds: Iterable[float]) -> float:
    """Return the lower quartile: whatever disturbs a measurement makes it longer."""
    found = list(seconds)
    return quantiles(found, n=4, method="inclusive")[0] if len(found) > 1 else found[0]


def _usual_steps(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss, repeats: int
) -> tuple[dict[int, float], dict[int, float]]:
    begun = time.perf_counter()
    _timed_step(model, units, batch, run)  # warms up
    rounds = [_timed_step(model, units, batch, run)]
    enough = time.perf_counter() + min(_ENOUGH_S, 4 * repeats * (time.perf_counter() - begun))
    while len(rounds) < repeats or (len(rounds) < 4 * repeats and time.perf_counter() < enough):
        rounds.append(_timed_step(model, units, batch, run))
    # The whole is the lower quartile of the steps, and shares of it are medians: quartiles of parts would sum to less.
    whole = usual(sum(one[0].values()) + sum(one[1].values()) for one in rounds)
    found = [{i: median(one[way].get(i, 0.0) for one in rounds) for i in range(len(units))} for way in (0, 1)]
    total = sum(found[0].values()) + sum(found[1].values())
    scale = whole / total if total else 1.0
    forward, backward = ({i: seconds * scale for i, seconds in each.items()} for each in found)
    return forward, backward


def _fixed(whole: float, part: float, share: float) -> float:
    """Of t = fixed + batch x slope, known for a batch and for `share` of it, fixed / t of the batch."""
    if not whole:
        return 0.0
    return min(1.0, max(0.0, (part / whole - share) / (1 - share)))


def _timed_step(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of each unit forward, and backward: from when its output's gradient is there to the next one's."""
    cuda = any(one.is_cuda for one in tree_flatten(batch)[0] if isinstance(one, Tensor))
    first: list[torch.cuda.Event] = []  # instants, in their order

    def now() -> Any:
        """Return an instant; on a GPU an event: waiting there would add a launch to each unit, which training hides."""
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        first.append(event)
        return event

    def at_s(instant: Any) -> float:
        return float(first[0].elapsed_time(instant)) / 1e3 if cuda else float(instant)

    begun: list[tuple[int, Any]] = []
    arrived: list[tuple[int, Any]] = []

    def left(index: int, output: Any) -> None:
        for one in tree_flatten(output)[0]:
            if isinstance(one, Tensor) and one.requires_grad:
                with as_local():  # it looks at no gradient: a shard's will do
                    one.register_hook(  # type: ignore[no-untyped-call]
                        lambda _, i=index: arrived.append((i, now()))
                    )

    with ExitStack() as stack:
        for index, unit in enumerate(units):
            module = unit.module
            stack.enter_context(hooked(module.register_forward_pre_hook(lambda *_, i=index: begun.append((i, now())))))
            stack.enter_context(hooked(module.register_forward_hook(lambda _m, _a, out, i=index: left(i, out))))
        if cuda:
            torch.cuda.synchronize()
        start = now()
        result = run(model, batch)
        middle = now()
        with as_local():
            result.backward()  # type: ignore[no-untyped-call]
        end = now()
    if cuda:
        torch.cuda.synchronize()
    start, middle, end = (at_s(one) for one in (start, middle, end))
    begun, arrived = ([(index, at_s(at)) for index, at in each] for each in (begun, arrived))
    forward: defaultdict[int, float] = defaultdict(float)
    backward: defaultdict[int, float] = defaultdict(float)
    if begun:
        begun[0] = (begun[0][0], start)  # what comes before the first layer is the first layer's
    for (index, at), (_, until) in zip(begun, [*begun[1:], (0, middle)], strict=True):
        forward[index] += until - at
    if arrived:
        arrived[0] = (arrived[0][0], middle)
    for (index, at), (_, until) in zip(arrived, [*arrived[1:], (0, end)], strict=True):
        backward[index] += until - at
    return dict(forward), dict(backward)


def _counts(one: Any, size: int) -> bool:
    return isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == size


def optimizer_time(model: nn.Module, optimizer: str) -> float:
    """Seconds of a step of torch's optimizer on copies of the parameters, with gradients of zeros."""
    copies = [nn.Parameter(one.detach().clone()) for one in model.parameters() if one.requires_grad]
    if not copies:
        return 0.0
    for one in copies:
        one.grad = torch.zeros_like(one)
    made: torch.optim.Optimizer
    if optimizer == "adam":
        made = torch.optim.Adam(copies)
    else:
        made = torch.optim.SGD(copies, lr=0.1, momentum=0.9 if optimizer == "momentum" else 0.0)
    made.step()  # the first one makes the state
    rounds = []
    for _ in range(_OPTIMIZER_STEPS):
        if copies[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        made.step()
        if copies[0].is_cuda:
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - start)
    return usual(rounds)
