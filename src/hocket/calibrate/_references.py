"""Runs a few plans of the user's own model, one of each form, for the planner to fit its constants on."""

import copy
import dataclasses
import gc
import io
import logging
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hocket.parallel.batches import samples_in
from hocket.parallel.compose import Trainer, without_loss_check
from hocket.parallel.mesh import World
from hocket.planner import (
    Constants,
    MeasuredPlan,
    Network,
    Plan,
    admissible_plans,
    inner,
    predict,
    reference_plans,
    resemblance,
)
from hocket.workload import OptimizerMaker, Update, Workload, WorkloadError, summed

from ._overheads import in_turns

_TURNS = 8  # over two of the phases of 10 to 20 s that shared machines have
_STEPS = 3
_LONG_S = 20.0
_ALL_S, _BUILT = 30.0, 0.6  # of all plans, and the part of what time is left: no other is built after it
_FEWEST, _LATE_S = 6, 12.0  # so many plans are built in so many seconds in any case: one of each form, as a rule
_HOPELESS = 5.0  # times the fastest: no search would prefer what is predicted to take so long, and it has one turn
_ONCE, _OF_LEFT = 4, 0.25  # steps that a plan with one turn takes, and the part of what time is left that they may
_NEAR, _FINALISTS = 1.1, 2  # times the fastest, and how many of those are run that were not among the references
_DISTURBED, _AGAIN = 0.2, 2  # of the natural logarithm: a run that is off by more is looked into, two at the most

_log = logging.getLogger("hocket")


@dataclass(frozen=True)
class Calibration:
    """What was measured, the same on every rank.

    Attributes:
        workload: The model, with the times that a rank takes when it computes alone.
        network: The ranks' network as a ring of equals, and how many of them compute at full speed at once.
        constants: What collectives of shards reach, and the overhead of steps, stages and blocks.
        runs: Plans of the model that were run, on which the network's `at_once` and the overheads were fitted.
    """

    workload: Workload
    network: Network
    constants: Constants
    runs: tuple[MeasuredPlan, ...] = ()


def kind_of(optimizer: Any) -> str:
    """Return the state that an optimizer keeps, in the words of `hocket.workload.capture`."""
    name = type(optimizer).__name__.lower()
    if "adam" in name or "lamb" in name:
        return "adam"
    return "momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"


def maker_of(optimizer: Any) -> str | OptimizerMaker:
    """Return what makes optimizers like one, with the settings of its first parameters, for `capture`.

    One whose copies take no step, since it wants a closure, say, is told by its name (`kind_of`), and so is one that
    talks to other ranks: this one may be alone.
    """
    if type(optimizer).__module__.startswith("torch.distributed"):
        return kind_of(optimizer)
    own = [one for group in optimizer.param_groups for one in group["params"]]

    def twin(parameters: Sequence[torch.nn.Parameter]) -> Any:
        made = object.__new__(type(optimizer))  # copied by torch, it would lack attributes that torch does not know
        attributes = {name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks")}
        replaced: dict[int, Any] = {id(one): parameters[0] for one in own}
        made.__dict__.update(copy.deepcopy(attributes, {**replaced, id(optimizer.state): defaultdict(dict)}))
        made.__dict__.update({name: type(value)() for name, value in vars(optimizer).items() if name not in attributes})
        for number, group in enumerate(made.param_groups):
            group["params"][:] = parameters if number == 0 else []
        return made

    try:
        Update.of(twin, own)
    except WorkloadError:
        return kind_of(optimizer)
    return twin


def counted(optimizer: Any) -> str:
    """Return what `capture` counts of an optimizer, which settings such as `amsgrad` change."""
    own = [one for group in optimizer.param_groups for one in group["params"]]
    found = Update.of(maker_of(optimizer), own)
    return f"{sum(map(found.state_bytes, own))} bytes of state, {found.passes:g} passes"


def run_references(
    model: torch.nn.Module,  # the user's model, which stays as it is
    optimizer: Any,  # the user's optimizer, which stays as it is
    inputs: Any,  # inputs of a global batch, positional or by keyword
    known: Calibration,  # what was captured and measured so far
    world: World,  # the ranks
    # of rank 0's `time.perf_counter`: plans are built in 0.6 of what is left, and six for 12 s in any case
    until_s: float = math.inf,
    plans: Sequence[Plan] | None = None,  # which, on rank 0; references of all forms if None
) -> list[MeasuredPlan]:
    """Train copies of the model for some steps each; a collective operation.

    The loss is the sum of the outputs, the learning rate 0. As many plans as there is memory for take turns, so that a
    slow phase of the machine meets all alike. What a plan cannot do with the model, or has no memory for beside the
    model itself, is left out.

    Returns:
        What each plan took; the same on every rank.
    """
    batch = samples_in(inputs)
    if plans is None and world.rank == 0:
        plans = _references(known, world.size, batch, min(_ALL_S, _OF_LEFT * (until_s - time.perf_counter())))
    together = world.from_root(_in_memory(plans, known, world.size, batch) if world.rank == 0 and plans else [])
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    begin = time.perf_counter()
    built_until_s = begin + min(_ALL_S, _BUILT * (until_s - begin))
    found: list[MeasuredPlan] = []
    refusals: list[str] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for documents in together:
            steps: dict[Plan, Callable[[], Any]] = {}
            step = None
            for plan in map(Plan.from_json, documents):
                enough, now = len(steps) + len(found) >= _FEWEST, time.perf_counter()
                late = now > (built_until_s if enough else max(built_until_s, begin + _LATE_S))
                if world.from_root(late) and (steps or found):
                    break
                step, refused = _built(plan, model, optimizer, inputs)
                if reason := world.first(refused):
                    refusals.append(f"{plan.describe()}: {reason}")
                elif step is not None:
                    steps[plan] = step
            took = in_turns(
                list(steps.values()), device, world, turns=_TURNS, together=_STEPS, long_s=_LONG_S, until_s=until_s,
                hopeless=_HOPELESS,
            )  # fmt: skip
            found += [MeasuredPlan(plan, seconds) for plan, seconds in zip(steps, took, strict=True)]
            del steps, step
            gc.collect()  # trainers are held by the hooks that they hold
    # What some plans cannot do with a model is no news; that none can be run means that predictions rest on small ones.
    for line in refusals:
        _log.log(logging.DEBUG if found else logging.WARNING, "calibration: a plan was not run: %s", line)
    return found


def further_plans(known: Calibration, workers: int, batch: int) -> list[Plan]:
    """Return plans to run after the references have been fitted; none where nothing is open.

    The plans that are predicted to be the fastest, unless they were run: one of them will be chosen. Runs that took
    longer than predicted: they were disturbed, or the formulas are wrong there. Of runs that took less, which no
    disturbance explains, the plan that is most like them. And first of all, the run that was the fastest, which tells
    whether the machine is as fast as it was.
    """
    ran = {run.plan.resolve(workers): run.step_s for run in known.runs}
    timed = partial(
        predict, workload=known.workload, cluster=known.network, workers=workers, batch=batch,
        constants=known.constants,
    )  # fmt: skip
    plain = dataclasses.replace(known.constants, seen=())
    off = {plan: math.log(step_s / timed(plan, constants=plain).step_s) for plan, step_s in ran.items()}
    every = admissible_plans(known.workload, known.network, workers=workers, batch=batch, fixed={"recompute": False})
    new = sorted((one for one in map(timed, every) if one.plan not in ran), key=lambda one: one.step_s)
    fastest_s = min([*(timed(plan).step_s for plan in ran), *(one.step_s for one in new[:1])])
    finalists = [one.plan for one in new if one.step_s <= _NEAR * fastest_s][:_FINALISTS]
    slow = [plan for plan in sorted(off, key=off.__getitem__, reverse=True) if off[plan] > _DISTURBED][:_AGAIN]
    quick = [plan for plan in sorted(off, key=off.__getitem__) if off[plan] < -_DISTURBED][:1]
    neighbours = [max((one.plan for one in new), key=partial(resemblance, plan)) for plan in quick if new]
    wanted = list(dict.fromkeys([*finalists, *slow, *neighbours]))
    return [min(ran, key=ran.__getitem__), *wanted] if wanted else []


def merged(before: Sequence[MeasuredPlan], after: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return runs as if all had been made at one time; the first of `after` was run before, too.

    A phase of the machine makes all plans slower alike, a disturbance one of them: of what plans that were run twice
    say of the phase, that which is nearest to none counts. Of such a plan the shorter step counts: whatever disturbs a
    measurement makes it longer.
    """
    steps = {run.plan: run.step_s for run in before}
    if not after or after[0].plan not in steps:
        return list(before)
    twice = (steps[run.plan] / run.step_s for run in after if run.plan in steps)
    phase = min(twice, key=lambda one: abs(math.log(one)))
    for run in after:
        steps[run.plan] = min(steps.get(run.plan, math.inf), phase * run.step_s)
    return [MeasuredPlan(plan, step_s) for plan, step_s in steps.items()]


def _references(known: Calibration, workers: int, batch: int, most_s: float = math.inf) -> list[Plan]:
    """Return references that can be hoped for, in the order in which they should be run.

    The fastest first, but the first of each form of parallelism before all others: it says most of plans of its form.
    Data parallelism in several parts of a batch is a form of its own, and with sharded gradients another: where ranks
    share processors, what a part costs besides is seen in them alone.
    Of a form that cannot be hoped for the fastest comes last of the first ones, if its steps take at most `most_s`:
    without a run nothing would say that it is as slow as the formulas do.
    """
    workload, network, constants = known.workload, known.network, known.constants
    admissible = admissible_plans(workload, network, workers=workers, batch=batch, fixed={"recompute": False})
    each = [
        predict(plan, workload, network, workers=workers, batch=batch, constants=constants)
        for plan in reference_plans(admissible, workers)
    ]
    each.sort(key=lambda one: one.step_s)
    hopeful = [one for one in each if one.step_s <= _HOPELESS * each[0].step_s]
    tried = {_axes(one.plan) for one in hopeful}
    for one in each[len(hopeful) :]:
        if _axes(one.plan) not in tried and _ONCE * one.step_s <= most_s:
            tried.add(_axes(one.plan))
            hopeful.append(one)
    forms = [
        (
            *_axes(one.plan), one.plan.shard_degree,
            one.plan.micro_batches > 2 * one.plan.pipeline_parallel_degree,  # few say nothing of what each costs
            *_in_parts(one.plan),
        )
        for one in hopeful
    ]  # fmt: skip
    turns = [forms[:number].count(form) for number, form in enumerate(forms)]
    return [one.plan for _, one in sorted(zip(turns, hopeful, strict=True), key=lambda pair: pair[0])]


def _in_parts(plan: Plan) -> tuple[bool, bool]:
    parts = plan.accumulate > 1 and not any(_axes(plan))
    return parts, parts and plan.shard == "gradients"


def _axes(plan: Plan) -> tuple[bool, ...]:
    return plan.shard == "parameters", *(axis.degree(plan) > 1 for axis in inner())


def _in_memory(plans: Sequence[Plan], known: Calibration, workers: int, batch: int) -> list[list[dict[str, Any]]]:
    """Return plans that there is memory for, in lists of those that fit at the same time."""
    workload, network, constants = known.workload, known.network, known.constants
    found: list[list[dict[str, Any]]] = []
    free_nbytes = 0.0
    for plan in plans:
        one = predict(plan, workload, network, workers=workers, batch=batch, constants=constants)
        own = one.memory.total + workload.parameter_bytes  # beside the model that is copied
        if own > network.memory_nbytes:
            continue
        if not found or own > free_nbytes:
            found.append([])
            free_nbytes = float(network.memory_nbytes)
        free_nbytes -= own
        found[-1].append(one.plan.to_json())
    return found


def is_untried(plan: Plan, known: Calibration, workers: int, batch: int) -> bool:
    """Return whether no run was by such a plan, with other buckets or cuts at the most, and a copy fits in memory."""
    plans = [one.resolve(workers) for one in (plan, *(run.plan for run in known.runs))]
    same = [dataclasses.replace(one, bucket_bytes=None, split=(), predicted={}, reasons={}) for one in plans]
    return same[0] not in same[1:] and bool(_in_memory([plan], known, workers, batch))


def why_refused(plan: Plan, model: torch.nn.Module, optimizer: Any, inputs: Any) -> str:
    """Return why copies of a model and its optimizer, which stay as they are, cannot train by a plan; "" if they can.

    A collective operation.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        reason = _built(plan, model, optimizer, inputs)[1]
    gc.collect()  # trainers are held by the hooks that they hold
    return reason


def _built(plan: Plan, model: torch.nn.Module, optimizer: Any, inputs: Any) -> tuple[Callable[[], Any] | None, str]:
    """Return a step of the plan that was made once, or why there is none: each model fails in its own way."""
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # what is said of a plan that is only tried
        warnings.simplefilter("ignore")
        try:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            own, updates = copy.deepcopy((model, optimizer))
            for group in updates.param_groups:
                group["lr"] = 0.0
            batch = inputs if isinstance(inputs, Mapping) else (*inputs, torch.zeros(samples_in(inputs), device=device))
            settings: dict[str, Any] = {"sample": inputs, "loss_reduction": "sum"}
            trainer = without_loss_check(Trainer(own, lambda output, _: summed(output), updates, plan, **settings))
            trainer.step(batch)
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
    return partial(trainer.step, batch), ""
