"""A plan's pipeline: its order, and what a rank of it spends besides its own work."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hocket.schedule import ScheduleError
from hocket.schedule.pipeline import NAMED_ORDERS, PipelineOrder, pipeline_order
from hocket.simulate import StageWork, simulate_order

from ._findings import PlanError, PlanFinding

if TYPE_CHECKING:
    from ._plan import Plan
    from ._profile import LayerTimes


def plan_order(plan: "Plan") -> PipelineOrder:
    """Return what each rank of a plan's pipeline does when; without a pipeline, the parts that one rank accumulates.

    Raises:
        PlanError: there is no such order for the plan's shape.
    """
    p, v, m = plan.pipeline_parallel_degree, plan.stages_per_rank, plan.micro_batches * plan.accumulate
    try:
        return pipeline_order(plan.pipeline_schedule if p > 1 else "1f1b", p, v, m)
    except ScheduleError as error:
        finding = PlanFinding("pipeline_schedule", str(error), f"choose one of {', '.join(NAMED_ORDERS)}")
        raise PlanError("the plan cannot be carried out:", [finding]) from None


def order_findings(plan: "Plan") -> Iterator[PlanFinding]:
    """Return what stands against the order of a plan's pipeline: another shape, or a number of micro-batches."""
    p, v, m = plan.pipeline_parallel_degree, plan.stages_per_rank, plan.micro_batches
    named = NAMED_ORDERS.get(plan.pipeline_schedule)
    if named is None:
        try:
            pipeline_order(plan.pipeline_schedule, p, v, m)
        except ScheduleError as error:
            yield PlanFinding("pipeline_schedule", str(error), f"mend it, or choose one of {', '.join(NAMED_ORDERS)}")
    elif not named.admits(p, v, m):
        rule = f"{plan.pipeline_schedule!r} on {p} ranks cannot run {m} micro-batches"
        remedy = f'take {named.nearest(p, v, m)}, or pipeline_schedule = "gpipe", which takes any number'
        yield PlanFinding("micro_batches", rule, remedy)


def stage_works(times: "LayerTimes", edges: Sequence[int], hops: Sequence[float], handling: float) -> list[StageWork]:
    """Return what a micro-batch asks of every stage; each is handled once a pass.

    What is not the wires' of exchanges waits for processors, as computation does.
    """
    found = []
    ways = (
        times.forward + times.tensor_forward - times.wire_forward,
        times.backward + times.again + times.tensor_backward - times.wire_backward,
        times.wire_forward,
        times.wire_backward,
        times.backward / 2,
    )
    for stage, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        forward, backward, wire, wire_back, weights = (float(one[begin:end].sum()) for one in ways)
        hop = hops[stage] if stage < len(hops) else 0.0
        found.append(StageWork(forward + handling / 2, backward + handling / 2, wire, wire_back, hop, weights))
    return found


def waits(
    order: PipelineOrder, stages: Sequence[StageWork], own_s: float, at_once: float
) -> tuple[float, float, float]:
    """Return what a rank spends besides its own work: idle as the order has it, for messages, and for processors.

    `own_s` is the work of the rank that computes longest; `at_once` ranks of one pipeline compute at full speed at
    once.
    """
    plain = simulate_order(order, [dataclasses.replace(one, hop=0.0) for one in stages]).seconds
    wired = simulate_order(order, stages).seconds
    return plain - own_s, wired - plain, max(0.0, simulate_order(order, stages, at_once).seconds - wired)
