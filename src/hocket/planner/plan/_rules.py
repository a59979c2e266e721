"""The rules that a plan must keep: what cannot be combined, and what does not fit the world or the batch."""

from collections.abc import Iterator

from hocket.workload import Workload

from .._findings import PlanFinding
from ..axes import AXES, Axis, inner, product
from ._compression import parse_compression
from ._order import order_findings
from ._plan import RULES, Plan

_GROUPS = ("shard_degree", "batch_norm_group")  # fields that say how many data-parallel workers are together


def broken_rules(plan: Plan, world_size: int | None, batch: int | None) -> list[PlanFinding]:
    """Return the rules that `plan` breaks in a world of `world_size` ranks with global batches of `batch` samples."""
    found = list(_counts(plan))
    if found:  # the rules below divide by the counts
        return found
    found += _pipeline(plan)
    for axis in AXES:
        if axis.degree(plan) > 1:
            found += [*_alone(plan, axis), *axis.rules(plan)]
    found += [*_other(plan), *_relaxed(plan)]
    if world_size is not None:
        found += _world(plan, world_size)
    if batch is not None:
        found += _batch(plan, world_size, batch)
    return found


RULES.append(broken_rules)


def _alone(plan: Plan, axis: Axis) -> Iterator[PlanFinding]:
    for other in AXES if axis.alone else ():
        if other is not axis and other.divides != "batch" and other.degree(plan) > 1:
            rule = f"{axis.alone} go with data parallelism, not with {other.name} parallelism"
            yield PlanFinding(other.field, rule, f"say {other.field} = 1, or {axis.field} = 1")


def _counts(plan: Plan) -> Iterator[PlanFinding]:
    for name in (*(axis.field for axis in inner()), "stages_per_rank", "micro_batches", "accumulate"):
        if getattr(plan, name) < 1:
            yield PlanFinding(name, f"must be 1 or more, not {getattr(plan, name)}", "1 is the plain form")
    if plan.data_parallel_degree < 1 and plan.data_parallel_degree != -1:
        rule = f"must be 1 or more, or -1 for the rest of the world, not {plan.data_parallel_degree}"
        yield PlanFinding("data_parallel_degree", rule, "leave it out to get the rest")
    for name in _GROUPS:
        if getattr(plan, name) < 0:
            rule = f"must be a number of workers, or 0 for all, not {getattr(plan, name)}"
            yield PlanFinding(name, rule, "leave it out to get all")


def _pipeline(plan: Plan) -> Iterator[PlanFinding]:
    schedule, stages = plan.pipeline_schedule, plan.stages_per_rank
    if plan.pipeline_parallel_degree == 1:
        if plan.micro_batches > 1:
            rule = f"micro-batches belong to a pipeline, and this plan has none ({plan.micro_batches} wanted)"
            yield PlanFinding("micro_batches", rule, f"say accumulate = {plan.micro_batches} instead")
        if stages > 1 or plan.split:
            rule = "stages belong to a pipeline, and this plan has none"
            yield PlanFinding("stages_per_rank" if stages > 1 else "split", rule, "set pipeline_parallel_degree, too")
        return
    if plan.accumulate > 1:
        rule = "a pipeline accumulates over its micro-batches already"
        remedy = f"say accumulate = 1 and micro_batches = {plan.accumulate * plan.micro_batches}"
        yield PlanFinding("accumulate", rule, remedy)
    if stages > 1 and schedule in ("gpipe", "1f1b"):
        rule = f"{schedule!r} has one stage on each rank, not {stages}"
        yield PlanFinding("stages_per_rank", rule, 'say pipeline_schedule = "interleaved", or stages_per_rank = 1')
    if stages == 1 and schedule == "interleaved":
        rule = "an interleaved schedule has several stages on each rank"
        yield PlanFinding("stages_per_rank", rule, 'say stages_per_rank = 2, or pipeline_schedule = "1f1b"')
    yield from order_findings(plan)
    wanted = plan.pipeline_parallel_degree * stages - 1
    if plan.split and len(plan.split) != wanted:
        rule = f"{wanted + 1} stages begin at {wanted} modules after the first, and {len(plan.split)} are named"
        yield PlanFinding("split", rule, "name that many, or none to balance the stages by measurement")


def _other(plan: Plan) -> Iterator[PlanFinding]:
    if plan.sequence_parallel and plan.tensor_parallel_degree == 1:
        rule = "the sequence is divided among the workers that share tensors, and there are none"
        yield PlanFinding("sequence_parallel", rule, "set tensor_parallel_degree, or leave sequence_parallel out")
    if plan.batch_norm_group and not plan.sync_batch_norm:
        rule = "is the size of the groups in which batch norm is synchronised, and it is not"
        yield PlanFinding("batch_norm_group", rule, "say sync_batch_norm = true, or leave it out")
    if plan.shard_degree and plan.shard != "parameters":
        rule = f"says among how many parameters are sharded, and shard = {plan.shard!r} shards none"
        yield PlanFinding("shard_degree", rule, 'say shard = "parameters", or leave it out')
    if plan.shard_degree == 1:
        rule = "parameters that are sharded among 1 worker are whole on each"
        yield PlanFinding("shard_degree", rule, 'say shard = "none", or a shard_degree of 2 or more')
    if plan.priority:
        yield from _priority(plan)
    if plan.compression != "none":
        yield from _compression(plan)


def _compression(plan: Plan) -> Iterator[PlanFinding]:
    try:
        parse_compression(plan.compression)
    except ValueError as error:
        yield PlanFinding("compression", str(error), 'say compression = "none" to send gradients as they are')
    if plan.shard == "parameters":
        rule = "gradients of sharded parameters are reduced by torch's FSDP2, which sends them as they are"
        yield PlanFinding("compression", rule, 'say shard = "gradients" or less, or compression = "none"')


def _relaxed(plan: Plan) -> Iterator[PlanFinding]:
    if plan.synchronisation == "every_step":
        return
    name = f"synchronisation = {plan.synchronisation!r}"
    plain = {
        "shard": "none",
        **{axis.field: 1 for axis in inner()},
        "embeddings": "replicated",
        "sync_batch_norm": False,
        "compression": "none",
        "priority": False,
    }
    for field, value in plain.items():
        if getattr(plan, field) != value:
            rule = f"cannot be combined with {name}: each worker holds the whole model and trains it by itself"
            yield PlanFinding(field, rule, f'leave {field} out, or say synchronisation = "every_step"')


def _priority(plan: Plan) -> Iterator[PlanFinding]:
    """Parameters are updated one after the other, on every rank, as the average of each gradient arrives."""
    for axis in inner():
        if axis.degree(plan) > 1:
            rule = "gradients are sent by priority among ranks that hold the whole model"
            yield PlanFinding(axis.field, rule, "say priority = false, or leave the model whole")
    for name, plain in (("shard", "none"), ("embeddings", "replicated"), ("compression", "none")):
        if getattr(plan, name) != plain:
            rule = (
                f"gradients are sent by priority as they are, each to all ranks, and this says {getattr(plan, name)!r}"
            )
            yield PlanFinding(name, rule, f'say priority = false, or {name} = "{plain}"')
    if plan.clip_norm is not None:
        rule = "the norm of all gradients is known when all have arrived, and priority does not wait for that"
        yield PlanFinding("clip_norm", rule, "say priority = false, or leave clip_norm out")


def _world(plan: Plan, world_size: int) -> Iterator[PlanFinding]:
    used = [axis for axis in inner() if axis.degree(plan) > 1]
    each, data = product(plan, *used), plan.data_parallel_degree
    words = " x ".join(f"{axis.degree(plan)} {axis.name}" for axis in used)
    if world_size % each:
        rule = f"{words} does not divide {world_size} workers"
        near = each * max(1, world_size // each)
        yield PlanFinding(used[0].field, rule, f"use {near} workers, or degrees whose product divides them")
        return
    rest = world_size // each
    if data not in (-1, rest):
        rule = f"{data} data{words and ' x '}{words} is {data * each} workers, and there are {world_size}"
        yield PlanFinding("data_parallel_degree", rule, f"say {rest}, or -1 for the rest of the world")
    for name in _GROUPS:
        if (size := getattr(plan, name)) and rest % size:
            rule = f"groups of {size} do not divide {rest} data-parallel workers"
            yield PlanFinding(name, rule, f"choose a divisor of {rest}, or 0 for all")


def _batch(plan: Plan, world_size: int | None, batch: int) -> Iterator[PlanFinding]:
    data = plan.data_parallel_degree
    if data == -1:
        data = 1 if world_size is None else world_size // product(plan, *inner())
    for name in ("micro_batches", "accumulate"):
        parts = getattr(plan, name)
        if parts > 1 and batch < parts * max(1, data):
            rule = f"a batch of {batch} samples cannot be cut into {parts} parts on each of {data} workers"
            yield PlanFinding(name, rule, f"use batches of {parts * data} samples or more, or fewer parts")


def undivided(plan: Plan, workload: Workload) -> list[PlanFinding]:
    """Return what the plan divides that the workload's layers do not say how to divide."""
    return [found for one in AXES if one.degree(plan) > 1 for found in one.refused(plan, workload)]
