"""Pipeline parallelism: ranks hold the layers one after the other, and micro-batches pass through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hocket.schedule.pipeline import order_name
from hocket.workload import Workload

from .._findings import PlanFinding
from ._axis import Axis

if TYPE_CHECKING:
    from ..network import Network
    from ..plan import Plan
    from ..step import StepParts


def _describe(plan: Plan) -> str:
    stages = f", {plan.stages_per_rank} stages each" if plan.stages_per_rank > 1 else ""
    schedule = f"{order_name(plan.pipeline_schedule)}{stages}, {plan.micro_batches} micro-batches"
    return f"{plan.pipeline_parallel_degree} pipeline ({schedule})"


def _refused(plan: Plan, workload: Workload) -> Iterator[PlanFinding]:
    wanted, layers = plan.pipeline_parallel_degree, len(workload.layers)
    if wanted > max(layers, len(workload.finer)):
        rule = f"{wanted} stages need as many layers, and {workload.name} has {layers}"
        yield PlanFinding("pipeline_parallel_degree", rule, f"use {layers} or fewer")


def _considered(workload: Workload, network: Network, degree: int) -> bool:
    return degree <= len(workload.layers)


def _reason(plan: Plan, parts: StepParts) -> str:
    return f"divides the layers with little traffic; {parts.bubble / parts.total:.0%} of the step is spent waiting"


PIPELINE = Axis(
    name="pipeline",
    field="pipeline_parallel_degree",
    divides="layers",
    does="layers are computed one after the other by several ranks; needs `sample=`",
    costs="a message for each micro-batch and cut; ranks idle for (N-1)/(N+K-1) of a step with K micro-batches",
    settings={
        "schedule": "pipeline_schedule",
        "stages_per_rank": "stages_per_rank",
        "micro_batches": "micro_batches",
        "split": "split",
    },
    sampled=True,
    describe=_describe,
    refused=_refused,
    considered=_considered,
    reason=_reason,
)
