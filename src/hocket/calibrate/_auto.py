"""`plan="auto"`: the model and the network are measured by all ranks at once, and the planner's choice is taken."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hocket.parallel.batches import called, mapped, samples_in
from hocket.parallel.data import has_own_hooks, is_nonlinear
from hocket.parallel.mesh import World
from hocket.parallel.partition import DRY_RUNS
from hocket.parallel.pipeline import SplitError, trace
from hocket.parallel.state import check_elementwise
from hocket.planner import AXES, Plan, PlanError, PlanFinding, inner, search, with_reasons
from hocket.workload import trial
from hocket.workload.division import unchanged

from ._calibrate import calibrate
from ._kept import VARIABLE, busy, keep, key_of, key_with_loss, taken, unknown_word
from ._loss import LossOfSample, loss_by_made_up_targets, with_loss
from ._references import Calibration, is_untried, maker_of, why_refused

_ALONE = {"shard": "none", **{axis.field: 1 for axis in inner()}}  # data parallelism alone


def auto_plan(
    model: torch.nn.Module,
    optimizer: Any,
    sample: Any,
    world: World,
    seconds: float | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss_of_sample: Callable[[Any, Any], Any] | None = None,
) -> Plan:
    """Return the plan that is predicted to be the fastest of those that fit; a collective operation.

    Pipelines are considered if the model can be traced; tensor parallelism and sharding if the optimizer can update a
    part of a parameter by itself.

    Args:
        model: The user's model, on the device that it trains on.
        optimizer: The user's optimizer.
        sample: Inputs of a global batch.
        world: All ranks.
        seconds: See `calibrate`.
        loss_fn: Of output and target, as the Trainer has it: what it keeps and takes is counted, if a target can be
            made up for it (`_loss`). None where it is not known.
        loss_of_sample: Of the model and the sample, which then holds targets, too, instead of `loss_fn`.

    Raises:
        PlanError: there is no sample, it is smaller than the world, the model cannot be run on it, or nothing fits; on
            every rank.
    """
    if world.size == 1:
        return Plan()
    if sample is None:
        rule = '"auto" runs the model on a sample, to see how long it takes'
        raise PlanError("no plan was found:", [PlanFinding("sample", rule, "pass Trainer(..., sample=inputs)")])
    if loss_of_sample is not None:
        sample, loss_fn = _told_apart(loss_of_sample, model, sample, world)
    inputs: Any = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    inputs = dict(sample) if isinstance(sample, Mapping) else inputs
    batch = samples_in(inputs)
    if batch < world.size and not _shares_samples(model, inputs, world.size):
        rule = f"the sample has {batch} of the global batch's samples, and there are {world.size} workers"
        raise PlanError(
            "no plan was found:", [PlanFinding("sample", rule, "pass the inputs of a whole batch, without targets")]
        )
    begin = time.perf_counter()
    _check_sample(model, inputs, world)
    measured = _measured(model, optimizer, inputs, world, seconds, loss_fn)
    for_hooks: dict[str, Any] = {}
    for one in world.from_all(_for_hooks(model)):  # some log on one rank alone
        for_hooks |= one
    fixed: dict[str, Any] = {}
    if world.rank == 0:
        fixed = {} if _can_split(model, inputs) else {"pipeline_parallel_degree": 1}
        if not _can_divide(optimizer):
            fixed |= {"shard": "none", **{axis.field: 1 for axis in AXES if axis.elementwise}}
        fixed |= for_hooks
    plan = _carried_out(measured, model, optimizer, inputs, world, fixed)
    _say(world, f"the plan is {plan.resolve(world.size).describe()}, found in {time.perf_counter() - begin:.0f} s")
    return plan


def including_loss(
    measured: Calibration, model: torch.nn.Module, optimizer: Any, inputs: Any, world: World, loss_fn: Any
) -> Calibration:
    """Return a calibration with the loss in its workload; as it is, and said, where the loss cannot be run.

    One rank does it, for itself: what it returns is not told to others.

    Args:
        measured: By `calibrate`, without a loss.
        model: The user's, on the device that it trains on; it stays as it is.
        optimizer: The user's.
        inputs: Positional inputs of a global batch, or a dict of keywords.
        world: The ranks that were measured.
        loss_fn: Of output and target. Targets are made up for it.
    """
    part = _part(inputs, world)
    try:
        loss, why = loss_by_made_up_targets(loss_fn, model, part)
        if loss is not None:
            workload = with_loss(measured.workload, model, part, loss, maker_of(optimizer))
            return dataclasses.replace(measured, workload=workload)
    except Exception as error:  # of a user's model and loss, while other ranks wait
        why = f"{type(error).__name__}: {error}"
    _say(world, f"an automatic plan: the loss is not measured ({why}); its memory and time come on top")
    return measured


def _told_apart(
    loss: Callable[[Any, Any], Any], model: torch.nn.Module, sample: Any, world: World
) -> tuple[Any, LossOfSample | None]:
    """Return what a loss of model and sample gives the model, and that loss; None, and said, where it cannot be run."""
    found = LossOfSample(loss, model, sample)
    inputs, why = sample, ""
    try:
        inputs = found.inputs()
    except Exception as error:  # whatever a user's loss raises
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if said := world.first(why):
        _say(world, f"the loss of the model and the sample is not measured ({said}); its memory and time come on top")
        return sample, None
    return inputs, found


def _check_sample(model: torch.nn.Module, inputs: Any, world: World) -> None:
    """Run the model on a rank's part of the sample, and have all ranks say what is wrong if one cannot."""
    failure: Exception | None = None
    try:
        with unchanged(model), torch.no_grad():
            model.train()
            called(model, _part(inputs, world))
    except Exception as error:  # whatever a user's forward raises
        failure = error
    if said := world.first("" if failure is None else f"{type(failure).__name__}: {failure}"):
        rule = f"the model cannot be run on it: {said}"
        remedy = (
            "pass what the model's forward takes, without targets: a tuple is model(*sample), a mapping model(**sample)"
        )
        raise PlanError("no plan was found:", [PlanFinding("sample", rule, remedy)]) from failure


def _part(inputs: Any, world: World) -> Any:
    """Return a rank's part of a global batch."""
    each = max(1, samples_in(inputs) // world.size)
    return mapped(inputs, lambda one: one[:each] if one.dim() else one)


def _measured(
    model: torch.nn.Module, optimizer: Any, inputs: Any, world: World, seconds: float | None, loss_fn: Any
) -> Calibration:
    """Return the calibration that is kept of this model on these ranks, or measure and keep one.

    One with the loss is kept besides: the same plan is found again, and other losses need no other measurement of all.
    """
    if wrong := world.first(unknown_word()):
        raise PlanError(wrong)
    key = key_of(model, optimizer, inputs, world)
    own = key if loss_fn is None else key_with_loss(key, loss_fn)
    known, whole = world.from_root(_kept(own, key) if world.rank == 0 else (None, False))
    others = world.first(busy()) if known is None or not whole else None
    if known is not None:
        _say(world, f"an automatic plan: what was measured before is taken ({VARIABLE}=again measures anew)")
    else:
        lasts = f"about {seconds:.0f} s" if seconds else "one to two minutes"
        _say(world, f"an automatic plan: measuring the model and {world.size} ranks, for {lasts}")
        if others:
            _say(world, f"others use this machine ({others}): times may come out too long, and are not kept")
        known = calibrate(model, optimizer, inputs, world, partial(_say, world), seconds)
        if world.rank == 0 and not others:
            keep(key, known)
    if world.rank == 0 and own != key and not whole:
        known = including_loss(known, model, optimizer, inputs, world, loss_fn)
        if not others:
            keep(own, known)
    return known


def _kept(own: str, plain: str) -> tuple[Calibration | None, bool]:
    """Return the calibration that is kept, and whether it has the loss."""
    found = taken(own)
    return (found, True) if found is not None else (taken(plain), own == plain)


def _say(world: World, line: str) -> None:
    """Tell the user what takes so long."""
    if world.rank == 0:
        print(f"hocket: {line}", file=sys.stderr, flush=True)


def _carried_out(
    measured: Calibration, model: torch.nn.Module, optimizer: Any, inputs: Any, world: World, fixed: dict[str, Any]
) -> Plan:
    """Return the best plan that the model can be trained by; a collective operation.

    What the search knows of a model does not tell all that a Trainer refuses: a copy takes a step by a plan that no
    run has tried, if there is memory for one. Where none of the best can be carried out, data parallelism is left.
    `fixed` and what was measured count on rank 0.

    Raises:
        PlanError: no plan fits; on every rank.
    """
    batch, preferred = samples_in(inputs), None
    for given in (fixed, fixed | _ALONE):
        found = _ranked(measured, world.size, batch, given) if world.rank == 0 else ([], "")
        ranked, why = world.from_root(found)
        if preferred is None and not ranked:
            raise PlanError(why)
        for plan in map(Plan.from_json, ranked):
            preferred = preferred or plan
            untried = measured.runs and is_untried(plan, measured, world.size, batch)
            if not world.from_root(bool(untried) if world.rank == 0 else False):
                return plan
            reason = world.first(why_refused(plan, model, optimizer, inputs))
            if not reason:
                return plan
            told = " ".join(reason.removeprefix("PlanError: ").split())
            _say(world, f"{plan.resolve(world.size).describe()} is predicted to be faster, and is refused: {told}")
    assert preferred is not None
    return preferred  # whose refusal says what to do


def _ranked(measured: Calibration, workers: int, batch: int, fixed: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the best plans as JSON, the one that is preferred first, or why there is none."""
    try:
        found = search(
            measured.workload, measured.network, workers=workers, batch=batch, constants=measured.constants, fixed=fixed
        )
    except PlanError as error:
        return [], str(error)
    places = sorted(range(len(found.ranked)), key=lambda one: one != found.choice)
    return [with_reasons(dataclasses.replace(found, choice=one)).to_json() for one in places], ""


def _for_hooks(model: torch.nn.Module) -> dict[str, Any]:
    """Return what plans must have that call the program's hooks on gradients as one device does."""
    hooked = [one for one in model.parameters() if has_own_hooks(one)]
    return (_ALONE if hooked else {}) | ({"accumulate": 1} if any(map(is_nonlinear, hooked)) else {})


def _can_divide(optimizer: Any) -> bool:
    try:
        check_elementwise(optimizer)
    except ValueError:
        return False
    return True


def _shares_samples(model: torch.nn.Module, inputs: Any, ranks: int) -> bool:
    """Return whether several ranks can share a sample, so that there may be fewer samples than ranks."""
    for dry_run in DRY_RUNS.values():
        try:
            with trial(model, inputs) as step, dry_run(model, ranks, lambda kind, nbytes: None):
                step()
        except Exception:  # whatever a user's forward raises
            continue
        return True
    return False


def _can_split(model: torch.nn.Module, inputs: Any) -> bool:
    """Return whether a pipeline can be made of the model: some part of it can be traced."""
    few = mapped(inputs, lambda one: one[:2] if one.dim() else one)
    try:
        return len(trace(model, few).steps) > 1
    except SplitError:
        return False
