"""What one rank of a divided model does, seen by running its part alone: exchanges are counted and bring nothing."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hocket.sharding import as_local

from ._share import Exchange, Share
from ._shares import operations_of
from ._timing import time_of
from ._trace import trace_of
from ._units import Loss, Unit, followed

Heard = Callable[[str, int], None]
"""Hears of an exchange: its kind, and bytes of its full tensor."""

_Key = tuple[str, str, int]


class DryRun(Protocol):
    """One rank's part of a model whose ranks stand along some axis. While it is entered the model does that part."""

    def __call__(self, model: nn.Module, ranks: int, heard: Heard) -> AbstractContextManager[None]:
        """Have `model` do what one of `ranks` ranks does of it; raises ValueError if it cannot be divided."""
        ...


def dry_shares(
    model: nn.Module,  # on the device of the batch
    units: list[Unit],  # of the model
    batch: Any,  # a batch
    run: Loss,  # makes the loss
    dry_runs: Mapping[str, DryRun],  # by the name of the axis
    degrees: Sequence[int],  # numbers of ranks
    # of each unit, bytes of parameters, gradients and optimizer state, all of which every rank holds
    state: Mapping[int, tuple[int, int, int]],
    repeats: int,  # timed steps at the least; 0 to time nothing
) -> dict[int, tuple[Share, ...]]:
    """Return one rank's share of each unit, by axis and number of ranks; nothing for what a model cannot do."""
    found: dict[int, tuple[Share, ...]] = {}
    for axis, dry in dry_runs.items():
        for degree in sorted(set(degrees) - {1}):
            try:
                shares = _shares(model, units, batch, run, dry, degree, state, repeats)
            except (ValueError, NotImplementedError, RuntimeError):  # models fail in as many ways as there are models
                break
            for index, share in shares.items():
                found[index] = (*found.get(index, ()), share(axis))
    return found


def _shares(
    model: nn.Module,
    units: list[Unit],
    batch: Any,
    run: Loss,
    dry: DryRun,
    degree: int,
    state: Mapping[int, tuple[int, int, int]],
    repeats: int,
) -> dict[int, Callable[[str], Share]]:
    heard: list[tuple[str, int]] = []
    with dry(model, degree, lambda kind, nbytes: heard.append((kind, nbytes))):
        exchanged = _exchanges(model, units, batch, run, heard)
        trace = trace_of(model, units, batch, run)
        # A rank that has so small a part of each sample may have as many times more samples.
        timing = time_of(model, units, batch, run, repeats, roomy=degree) if repeats else None

    def made(index: int) -> Callable[[str], Share]:
        spent = trace.total(index)
        work = operations_of(trace, index, (spent.saved, spent.saved_fixed), "divided", known=timing is None)
        exchanges = tuple(
            # Sums of statistics have a number for each channel, however many samples there are.
            Exchange(phase, kind, nbytes, count, kind != "all_reduce")
            for (phase, kind, nbytes), count in exchanged.get(index, Counter()).items()
        )
        times = (timing.forward_s[index], timing.backward_s[index]) if timing else (0.0, 0.0)
        fixed = round(timing.fixed_share[index], 6) if timing else 0.0
        return lambda axis: Share(degree, *state[index], work, exchanges, False, axis, *times, fixed)

    return {index: made(index) for index in range(len(units))}


def _exchanges(
    model: nn.Module, units: list[Unit], batch: Any, run: Loss, heard: list[tuple[str, int]]
) -> dict[int, Counter[_Key]]:
    """Return what each unit exchanges in the passes of one step, by phase, kind and bytes."""
    found: dict[int, Counter[_Key]] = {}
    at = 0
    heard.clear()

    def move(index: int, phase: str) -> None:
        """End the unit before: what was heard until now is its own."""
        nonlocal at
        found.setdefault(at, Counter()).update((phase, kind, nbytes) for kind, nbytes in heard)
        heard.clear()
        at = index

    with followed(units, lambda index: move(index, "forward"), lambda index: move(index, "backward")):
        result = run(model, batch)
        move(at, "forward")
        if not isinstance(result, Tensor) or not result.requires_grad:
            raise ValueError("the loss has no gradient")
        with as_local():  # kernels for the meta device ask shards for their strides
            torch.autograd.backward(result)
        move(at, "backward")
    model.zero_grad(set_to_none=True)
    return found
