"""The order of a plan's pipeline, and what stands against it."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.schedule import ScheduleError
from hocket.schedule.pipeline import NAMED_ORDERS, PipelineOrder, pipeline_order, stage_homes

from .._findings import PlanError, PlanFinding

if TYPE_CHECKING:
    from ._plan import Plan


@functools.lru_cache(maxsize=64)
def order_of(schedule: str, p: int, v: int, m: int) -> PipelineOrder:
    """Return the order of that name, or of that text, for p ranks with v stages each and m micro-batches."""
    return pipeline_order(schedule, p, v, m)


def plan_order(plan: "Plan") -> PipelineOrder:
    """Return what each rank of a plan's pipeline does when; without a pipeline, the parts that one rank accumulates.

    Raises:
        PlanError: there is no such order for the plan's shape.
    """
    p, v, m = plan.pipeline_parallel_degree, plan.stages_per_rank, plan.micro_batches * plan.accumulate
    try:
        return order_of(plan.pipeline_schedule if p > 1 else "1f1b", p, v, m)
    except ScheduleError as error:
        finding = PlanFinding("pipeline_schedule", str(error), f"choose one of {', '.join(NAMED_ORDERS)}")
        raise PlanError("the plan cannot be carried out:", [finding]) from None


def plan_homes(plan: "Plan") -> tuple[int, ...]:
    """Return of every stage of a plan that keeps its rules the rank of the pipeline that holds it."""
    p = plan.pipeline_parallel_degree
    return stage_homes(plan.pipeline_schedule if p > 1 else "1f1b", p, plan.stages_per_rank)


def order_findings(plan: "Plan") -> Iterator[PlanFinding]:
    """Return what stands against the order of a plan's pipeline: another shape, or a number of micro-batches."""
    p, v, m = plan.pipeline_parallel_degree, plan.stages_per_rank, plan.micro_batches
    named = NAMED_ORDERS.get(plan.pipeline_schedule)
    if named is None:
        try:
            pipeline_order(plan.pipeline_schedule, p, v, m)
        except ScheduleError as error:
            yield PlanFinding("pipeline_schedule", str(error), f"mend it, or choose one of {', '.join(NAMED_ORDERS)}")
    elif named.stages not in (None, v):
        rule = f"{plan.pipeline_schedule!r} has {named.stages} stages on each rank, not {v}"
        yield PlanFinding("stages_per_rank", rule, f"say stages_per_rank = {named.stages}")
    elif not named.admits(p, v, m):
        rule = f"{plan.pipeline_schedule!r} on {p} ranks cannot run {m} micro-batches"
        remedy = f'take {named.nearest(p, v, m)}, or pipeline_schedule = "gpipe", which takes any number'
        yield PlanFinding("micro_batches", rule, remedy)
