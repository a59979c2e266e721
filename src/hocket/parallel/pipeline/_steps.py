"""What a model's steps take, and what crosses between them: where a planner may cut it."""

from __future__ import annotations

from typing import Any

import torch

from hocket.workload import Workload, WorkloadStep, refined

from ._measure import measured
from ._partition import cuts, weights
from ._trace import SplitError, trace

__all__ = ["in_steps", "steps_of"]


def steps_of(model: torch.nn.Module, sample: Any) -> list[WorkloadStep]:
    """Return the steps between which `split` cuts a model, measured on this device.

    The model's parameters, buffers, gradients and random numbers are as before afterwards.

    Raises:
        SplitError: the model's forward cannot be traced.
    """
    traced = trace(model, sample)
    times = measured(traced)
    seen: dict[int, int] = {}  # of each parameter the first step that uses it
    found: list[WorkloadStep] = []
    for number, (node, cut) in enumerate(zip(traced.steps, cuts(traced), strict=True)):
        own = weights(traced, node)
        fresh = {id(one): one.numel() for one in own if id(one) not in seen}
        before = min((seen[id(one)] for one in own if id(one) in seen), default=None)
        seen.update(dict.fromkeys(fresh, number))
        seconds = times.forward_s[number], times.backward_s[number]
        counts = cut.nbytes, sum(fresh.values()), len(fresh)
        tied_to = "" if before is None else found[before].name
        found.append(WorkloadStep(node.name, times.modules[number], *seconds, *counts, tied_to))
    return found


def in_steps(workload: Workload, model: torch.nn.Module, sample: Any) -> Workload:
    """Return the workload with the steps between which `split` would cut its model, if it can be cut.

    The workload was captured with the sample; the model stays as it is.
    """
    try:
        return refined(workload, steps_of(model, sample))
    except SplitError:
        return workload
