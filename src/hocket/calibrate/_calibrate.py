"""Measures what the planner's formulas need: the model on these devices, the ranks' network, and what Python costs.

All ranks measure together, as they will train together.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hocket.parallel.batches import mapped, samples_in
from hocket.parallel.compose import old_objects_set_aside
from hocket.parallel.mesh import World, join, link_of
from hocket.parallel.partition import DRY_RUNS
from hocket.parallel.pipeline import in_steps
from hocket.planner import Plan, fitted
from hocket.workload import Workload, WorkloadError, capture, trial

from ._measured_network import MEASURED, measured_network
from ._overheads import degrees, with_overheads
from ._references import Calibration, further_plans, maker_of, merged, run_references

_ROUNDS_OF_MODEL = 5
_ENOUGH_S = 0.3  # of steps of the model in a row


def calibrate(
    model: torch.nn.Module,
    optimizer: Any,
    inputs: Any,
    world: World | None = None,
    say: Callable[[str], None] = lambda line: None,
    seconds: float | None = None,
) -> Calibration:
    """Measure a model and the ranks that are to train it; a collective operation.

    The model is run on each rank's part of a batch, and copies of it are trained by a few plans (`run_references`); its
    parameters and gradients stay as they are.

    Args:
        model: The user's model, on the device that it trains on.
        optimizer: The user's optimizer.
        inputs: Positional inputs of a global batch (a dict: keywords), one sample a rank at the least.
        world: The ranks; all if not given.
        say: Called with a line about each of four parts of the work when it begins, on every rank.
        seconds: About how long to measure: a fifth of it the model, as much what is besides, the rest plans; each part
            is measured once at the least. One to two minutes, and more surely, if not given.
    """
    with old_objects_set_aside():
        return _calibrated(model, optimizer, inputs, world or join(), say, seconds)


def _calibrated(
    model: torch.nn.Module, optimizer: Any, inputs: Any, world: World, say: Callable[[str], None], seconds: float | None
) -> Calibration:
    begin = time.perf_counter()
    say("1 of 4: the model, on one rank and on all at once")
    workload, at_once = _workload(model, optimizer, inputs, world, 0.2 * seconds if seconds else math.inf)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    say("2 of 4: the network")
    network, share = measured_network(device, world)
    network = dataclasses.replace(network, at_once=at_once)
    constants = dataclasses.replace(MEASURED, gather_share=share, fitted_workers=world.size)
    if world.size == 1:
        return Calibration(workload, network, constants)
    if device.type == "cuda":  # where ranks share a GPU, messages go through the host, and collectives do not
        messages_Bps = link_of(world, world, device).rate_Bps
        constants = dataclasses.replace(constants, message_share=min(1.0, messages_Bps / network.rank_Bps))
    say("3 of 4: what steps, stages and shards cost besides")
    until_s = [begin + part * seconds if seconds else math.inf for part in (0.4, 0.85, 0.97)]
    found = Calibration(workload, network, with_overheads(constants, network, device, world, until_s[0]))
    say("4 of 4: some plans of the model itself, a few steps each")
    runs = run_references(model, optimizer, inputs, found, world, until_s[1])
    fit = partial(fitted, workload=workload, network=network, constants=found.constants, batch=samples_in(inputs))
    plans: list[Plan] = []
    if world.rank == 0:
        found = Calibration(workload, *fit(runs), tuple(runs))
        plans = further_plans(found, world.size, samples_in(inputs)) if runs else []
    if world.from_root(bool(plans)):
        runs = merged(runs, run_references(model, optimizer, inputs, found, world, until_s[2], plans))
        if world.rank == 0:
            found = Calibration(workload, *fit(runs), tuple(runs))
    return world.from_root(found)


def _workload(
    model: torch.nn.Module, optimizer: Any, inputs: Any, world: World, most_s: float
) -> tuple[Workload, float]:
    """Return what each rank's part of a batch asks for, and how many ranks can compute at once as fast as one alone."""
    begin = time.perf_counter()
    each = max(1, samples_in(inputs) // world.size)
    part = mapped(inputs, lambda one: one[:each] if one.dim() else one)
    kind = maker_of(optimizer)
    if world.size == 1:
        return capture(model, part, optimizer=kind, degrees=()), 0.0
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    together: list[float] = []
    alone: list[float] = []
    captured: list[Workload] = []
    for done in range(_ROUNDS_OF_MODEL):  # by turns, and the fastest counts: the machine may be slow for a while
        if done and world.from_root(time.perf_counter() - begin) * (1 + 1 / done) > most_s:
            break
        own, failure = _captured(model, part, kind, world.size) if world.rank == 0 else (None, None)
        found, told = world.from_root((own, failure and f"{type(failure).__name__}: {failure}"))
        if found is None:
            raise WorkloadError(f"the model cannot be measured: {told}") from failure
        captured.append(found)
        with trial(model, part) as step:
            steps = max(2, math.ceil(_ENOUGH_S / max(1e-6, found.forward_s + found.backward_s)))
            dist.barrier(group=world.group)
            alone.append(world.from_root(_steps_s(step, steps, device) if world.rank == 0 else 0.0))
            dist.barrier(group=world.group)
            together.append(max(world.from_all(_steps_s(step, steps, device))))
    best = min(captured, key=lambda one: one.forward_s + one.backward_s)
    best = world.from_root(in_steps(best, model, part) if world.rank == 0 else best)
    return best, min(world.size, max(1.0, world.size * min(alone) / min(together)))


def _captured(
    model: torch.nn.Module, part: Any, optimizer: Any, ranks: int
) -> tuple[Workload | None, Exception | None]:
    """Return what is captured of a model, or what it failed with."""
    try:
        return capture(model, part, optimizer=optimizer, degrees=degrees(ranks), dry_runs=DRY_RUNS), None
    except Exception as error:  # of a user's model or its hooks, while other ranks wait
        return None, error


def _steps_s(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return seconds of each of some forward and backward passes in a row."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / steps
