"""Which layers stand in which stage of a pipeline, and how many micro-batches a stage holds at a time."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.workload import Workload

from .._findings import PlanError, PlanFinding
from ..network import CUT_SLACK, LOCAL, Link, balance
from ..plan import Plan, plan_homes, plan_order

_FEW = 400  # layers, for which the exact way is fast enough


def stage_cuts(
    plan: Plan, workload: Workload, costs: Sequence[float], scale: float = 1.0, link: Link = LOCAL
) -> list[int]:
    """Return the layers with which the second and later stages begin: the plan's own, or those that balance `costs`.

    A captured model is cut as the Trainer will cut it: among cuts that are as good, where fewest bytes cross. Raises
    PlanError: there are fewer layers than stages, or the plan names what begins no layer, or not in the layers' order.
    `costs` are the seconds of each layer, or what is in proportion to them, and a micro-batch is `scale` times the
    workload's batch.
    """
    stages = plan.pipeline_parallel_degree * plan.stages_per_rank
    if stages == 1:
        return []
    if plan.split:
        return _named_cuts(plan.split, workload)
    if stages > len(workload.layers):
        rule = f"{stages} stages need as many layers, and {workload.name} has {len(workload.layers)}"
        remedy = f"use {len(workload.layers)} stages or fewer"
        raise PlanError("the plan cannot be timed:", [PlanFinding("pipeline_parallel_degree", rule, remedy)])
    if workload.measured and len(costs) <= _FEW:
        crossing = (0, *(round(layer.output_bytes * scale) for layer in workload.layers[:-1]))
        holds = tuple(layer.parameters > 0 for layer in workload.layers)
        passes = plan.micro_batches * plan.stages_per_rank
        return list(_balanced(tuple(costs), stages, crossing, holds, link, passes))
    return list(_balanced_cuts(tuple(costs), stages))


def ties_across(plan: Plan, workload: Workload, cuts: Sequence[int]) -> list[PlanFinding]:
    """Return the rule that weights break which stages share: the Trainer cannot shard such parameters themselves."""
    if plan.shard != "parameters" or plan.data_parallel_degree == 1:
        return []
    place = {layer.name: index for index, layer in enumerate(workload.layers)}
    for index, layer in enumerate(workload.layers):
        if layer.tied_to and any(place[layer.tied_to] < cut <= index for cut in cuts):
            rule = (
                f"weights that stages share cannot be sharded themselves, and {layer.name!r} has some of "
                f"{layer.tied_to!r}, which is in an earlier stage"
            )
            return [PlanFinding("shard", rule, 'say shard = "gradients", or untie them')]
    return []


def _named_cuts(split: Sequence[str], workload: Workload) -> list[int]:
    """Return the layers that a plan names: by themselves, or by a module that holds them and begins with one."""
    names = [layer.name for layer in workload.layers]
    begins = {name: index for index, name in reversed(list(enumerate(names)))}
    cuts: list[int] = []
    for name in split:
        cut = begins.get(name)
        if cut is None:
            cut = next((index for index, layer in enumerate(names) if layer.startswith(f"{name}.")), None)
        remedy = f"it has {', '.join(names)}"
        if cut is None:
            rule = f"{workload.name} has no layer {name!r}"
            if whole := next((layer for layer in names if name.startswith(f"{layer}.")), None):
                rule = (
                    f"{name!r} is inside the layer {whole!r}, and what begins inside of one is run, but not predicted"
                )
            raise PlanError("the plan cannot be timed:", [PlanFinding("split", rule, remedy)])
        if cut <= (cuts[-1] if cuts else 0):
            rule = f"{name!r} does not come after the layer before it, or begins the model"
            remedy = f"name layers in their order; {remedy}"
            raise PlanError("the plan cannot be timed:", [PlanFinding("split", rule, remedy)])
        cuts.append(cut)
    return cuts


@functools.lru_cache(maxsize=256)  # fitting constants asks for the same cuts again and again
def _balanced(
    costs: tuple[float, ...], stages: int, crossing: tuple[int, ...], holds: tuple[bool, ...], link: Link, passes: int
) -> list[int]:
    return balance(costs, stages, crossing, holds=holds, link=link, slack=CUT_SLACK, micro_batches=passes)


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """Cuts of a chain into parts so that the most costly part is the least possible; every part has a layer.

    The bound is found by bisection; then parts are filled towards the mean as far as the bound lets them, so that the
    first ones are not full and the last one empty.

    Args:
        costs: of each layer, 0 or more.
        parts: how many, at most as many as layers.

    Returns:
        Index of the first layer of the second and later parts.
    """
    count = len(costs)
    low, high = max(max(costs), sum(costs) / parts), sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        if _needed(costs, middle) <= parts:
            high = middle
        else:
            low = middle
    bound = high * (1 + 1e-9)
    cuts: list[int] = []
    start, rest = 0, sum(costs)
    for part in range(parts - 1):
        left = parts - part
        fair = rest / left
        end, held = start, 0.0
        while end < count - (left - 1):
            more = held + costs[end]
            # Stop where going on passes the bound, or is farther from the mean than stopping, if the rest then fits.
            if end > start and (
                more > bound or (more - fair > fair - held and _needed(costs[end:], bound) <= left - 1)
            ):
                break
            held, end = more, end + 1
        cuts.append(end)
        rest -= held
        start = end
    return cuts


_balanced_cuts = functools.lru_cache(maxsize=256)(balanced_cuts)


def _needed(costs: Sequence[float], bound: float) -> int:
    parts, held = 1, 0.0
    for cost in costs:
        if held + cost > bound and held:
            parts, held = parts + 1, 0.0
        held += cost
    return parts


def layers_by_rank(plan: Plan, edges: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return of every rank of a pipeline its layers; `edges` are the first layers of the stages, and the end."""
    own: list[list[NDArray[np.int64]]] = [[] for _ in range(plan.pipeline_parallel_degree)]
    for stage, home in enumerate(plan_homes(plan)):
        own[home].append(np.arange(edges[stage], edges[stage + 1]))
    return [np.concatenate(layers) for layers in own]


def in_flight(plan: Plan, rank: int) -> float:
    """Micro-batches whose activations a rank of the pipeline holds at most, in units of all of its layers.

    Those of a named order follow from its rule (see `hocket.schedule.pipeline.NAMED_ORDERS`; Narayanan et al., SC'21;
    Korthikanti et al. 2022, section 4.2.3); those of another are counted.
    """
    p, m, v = plan.pipeline_parallel_degree, plan.micro_batches, plan.stages_per_rank
    if p == 1:
        return 1.0
    named = NAMED_ORDERS.get(plan.pipeline_schedule)
    return plan_order(plan).in_flight(rank) if named is None else named.in_flight(p, v, m, rank)
