"""Runs a few plans of the user's own model, one of each form, for the planner to fit its constants on."""

from __future__ import annotations

import copy
import gc
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hocket.planner import Constants, MeasuredPlan, Network, Plan, admissible_plans, predict, reference_plans
from hocket.workload import Workload, summed

from ._overheads import timed, usual
from ._trees import tensors_in
from ._world import World

_TURNS = 4
_STEPS = 3  # of a turn; the first one finds the caches as another plan left them
_LONG_S = 12.0  # of all turns of plans that take turns
_ALL_S = 30.0  # of all plans: no other is built after it
_HOPELESS = 5.0  # times the fastest: no search would prefer what is predicted to take so long

_log = logging.getLogger("hocket")


def run_references(
    model: torch.nn.Module,
    optimizer: Any,
    inputs: tuple[Any, ...],
    known: tuple[Workload, Network, Constants],
    world: World,
) -> list[MeasuredPlan]:
    """Train copies of the model for some steps each; a collective operation.

    The loss is the sum of the outputs, the learning rate 0. As many plans as there is memory for take turns, so that a
    slow phase of the machine meets all alike. What a plan cannot do with the model, or has no memory for beside the
    model itself, is left out.

    Args:
        model: the user's, which stays as it is.
        optimizer: the user's, which does, too.
        inputs: of a global batch.
        known: what was captured and measured so far.
        world: the ranks.

    Returns:
        What each plan took; the same on every rank.
    """
    batch = next(len(one) for one in tensors_in(inputs) if one.dim())
    together = world.from_root(_chosen(known, world.size, batch) if world.rank == 0 else [])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    begin = time.perf_counter()
    found: list[MeasuredPlan] = []
    for documents in together:
        steps: list[tuple[Plan, Callable[[], Any]]] = []
        for document in documents:
            if world.from_root(time.perf_counter() - begin) > _ALL_S:
                break
            plan = Plan.from_json(document)
            step, refused = _built(plan, model, optimizer, (*inputs, torch.zeros(batch, device=device)))
            if reason := next(filter(None, world.from_all(refused)), ""):
                _log.debug("calibration: %s was not run: %s", plan.describe(), reason)
            elif step is not None:
                steps.append((plan, step))
        found += _in_turns(steps, device, world)
        del steps
        gc.collect()  # trainers are held by the hooks that they hold
    return found


def _chosen(known: tuple[Workload, Network, Constants], workers: int, batch: int) -> list[list[dict[str, Any]]]:
    """References that there is memory for, the fastest first, in lists of those that have room at the same time."""
    workload, network, constants = known
    admissible = admissible_plans(workload, network, workers=workers, batch=batch, fixed={"recompute": False})
    each = [
        predict(plan, workload, network, workers=workers, batch=batch, constants=constants)
        for plan in reference_plans(admissible, workers)
    ]
    each.sort(key=lambda one: one.step_s)
    found: list[list[dict[str, Any]]] = []
    room = 0.0
    for one in each:
        own = one.memory.total + workload.parameter_bytes  # beside the model that is copied
        if own > network.memory_nbytes or one.step_s > _HOPELESS * each[0].step_s:
            continue
        if not found or own > room:
            found.append([])
            room = float(network.memory_nbytes)
        room -= own
        found[-1].append(one.plan.to_json())
    return found


def _built(
    plan: Plan, model: torch.nn.Module, optimizer: Any, batch: tuple[Any, ...]
) -> tuple[Callable[[], Any] | None, str]:
    """A step of the plan that was made once, or why there is none: models fail in as many ways as there are models."""
    from ._trainer import Trainer  # which makes automatic plans by what is measured here

    device = batch[-1].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a plan that is only tried
        try:
            own, updates = copy.deepcopy((model, optimizer))
            for group in updates.param_groups:
                group["lr"] = 0.0
            trainer = Trainer(own, lambda output, _: summed(output), updates, plan, sample=batch[:-1])
            trainer.step(batch)
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
    return partial(trainer.step, batch), ""


def _in_turns(steps: list[tuple[Plan, Callable[[], Any]]], device: torch.device, world: World) -> list[MeasuredPlan]:
    """What a step of each takes on the slowest rank."""
    each: list[list[float]] = [[] for _ in steps]
    random = torch.random.get_rng_state()
    for _ in range(_TURNS):
        for (_, step), own in zip(steps, each, strict=True):
            own += [timed(step, device, world) for _ in range(_STEPS)][1:]
        if world.from_root(sum(map(sum, each))) > _LONG_S:
            break
    torch.random.set_rng_state(random)
    took = [max(column) for column in zip(*world.from_all([usual(own) for own in each]), strict=True)]
    return [MeasuredPlan(plan, seconds) for (plan, _), seconds in zip(steps, took, strict=True)]
