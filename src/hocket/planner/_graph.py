"""A plan's step as tasks for the simulator: what `_time.py` has in closed form, on every rank and link."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hocket.algorithms import planned
from hocket.cluster import Cluster
from hocket.schedule import Collective, Schedule, Wire
from hocket.simulate import StepGraph, Work
from hocket.workload import Workload

from ._bucket_sizes import BucketSizes
from ._constants import Constants
from ._ends import optimizer_s
from ._findings import PlanError, PlanFinding
from ._memory import memory_of
from ._network import network_of
from ._pipeline import order_of
from ._plan import Plan
from ._profile import Profile
from ._stages import stage_cuts

__all__ = ["pipeline_order", "step_graph"]

Pick = Callable[[Collective, float], Schedule]


def pipeline_order(plan: Plan, rank: int) -> list[tuple[str, int]]:
    """In which order a rank of the pipeline works: ("forward" or "backward", micro-batch).

    Raises:
        PlanError: the schedule has several stages a rank, or splits the backward pass.
    """
    p, m = plan.pipeline_parallel_degree, plan.micro_batches * plan.accumulate
    if p > 1 and plan.pipeline_schedule not in ("gpipe", "1f1b"):
        rule = f"{plan.pipeline_schedule!r} is timed in closed form only"
        raise PlanError("the plan cannot be simulated:", [PlanFinding("pipeline_schedule", rule, 'take "1f1b"')])
    if p == 1:
        return [(way, batch) for batch in range(m) for way in ("forward", "backward")]
    return [(way, batch) for way, _, batch in order_of(plan.pipeline_schedule, p, 1, m, rank)]


def step_graph(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int,
    batch: int,
    constants: Constants | None = None,
    pick: Pick | None = None,
) -> StepGraph:
    """One training step of a plan, for `hocket.simulate.simulate_step`.

    Exchanges between workers that share tensors are one collective for all layers of a pass; gradients are reduced in
    buckets while the last backward pass goes on.

    Args:
        plan: Any that `workers` can carry out.
        workload: What is trained.
        cluster: Where.
        workers: How many.
        batch: Samples of a global batch.
        constants: What devices reach; links have the cluster's own rates here.
        pick: The schedule of a collective of so many bytes; the default closed forms' choice if not given.

    Raises:
        PlanError: the plan breaks a rule, or cannot be simulated.
    """
    network, constants = network_of(cluster), constants or Constants()
    plan = plan.resolve(workers)
    profile = Profile(workload, network, constants).of(plan)
    workload = profile.workload
    p, d, t = plan.pipeline_parallel_degree, plan.data_parallel_degree, plan.tensor_parallel_degree
    m = plan.micro_batches * plan.accumulate
    micro = -(-batch // (d * m))
    scale = micro / workload.batch
    times = profile.times(plan, micro)
    cuts = stage_cuts(plan, workload, times.total.tolist(), scale, profile.link(plan))
    edges = [0, *cuts, len(workload.layers)]
    choose = pick or _default_pick(Wire(network.between_s or network.inside_s, 1 / min(network.host_Bps, 1e18)))
    # memory_of reads the plan on one worker of each stage
    nbytes = [memory_of(plan, workload, batch=batch, cuts=cuts, rank=rank).total for rank in range(p)]
    graph = StepGraph(workers, memory_nbytes=np.repeat(nbytes, d * t) if any(cluster.memory_nbytes) else None)
    places = np.arange(workers).reshape(p, d, t)
    arrived: dict[tuple[str, int, int], Work] = {}
    queues = [pipeline_order(plan, rank) for rank in range(p)]
    reductions: list[Work] = []
    buckets = [_buckets(plan, profile, slice(edges[rank], edges[rank + 1])) for rank in range(p)]

    def run(rank: int, way: str, number: int) -> None:
        layers = slice(edges[rank], edges[rank + 1])
        where = places[rank].ravel()
        after = [arrived[key] for key in ((way, rank, number),) if key in arrived]
        exchange = float((times.tensor_forward if way == "forward" else times.tensor_backward)[layers].sum())
        if way == "forward":
            last = graph.compute(where, float(times.forward[layers].sum()), name=f"forward {number}", after=after)
        elif number < m - 1 or d == 1:
            seconds = float((times.backward + times.again)[layers].sum())
            last = graph.compute(where, seconds, name=f"backward {number}", after=after)
        else:
            last = _reduced(rank, after)
        if exchange:
            last = graph.compute(where, exchange, stream="compute", name=f"tensor exchange {number}", after=[last])
        onward = rank + (1 if way == "forward" else -1)
        if 0 <= onward < p:
            cut = edges[max(rank, onward)] - 1
            each = float(profile.output_bytes[cut]) * scale / t
            sent = graph.send(where, places[onward].ravel(), each, name=f"{way} {number}", after=[last])
            arrived[way, onward, number] = sent

    def _reduced(rank: int, after: list[Work]) -> Work:
        """The last backward pass, whose gradients are reduced bucket by bucket."""
        where, base = places[rank].ravel(), edges[rank]
        last: Work | None = None
        for first, end, size in buckets[rank]:
            seconds = float((times.backward + times.again)[base + first : base + end].sum())
            last = graph.compute(where, seconds, name="backward", after=after)
            for column in range(t):
                kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
                group = places[rank, :, column]
                schedule = choose(Collective(kind, d), size)
                name = f"gradients ({schedule.name})"
                reductions.append(graph.collective(schedule, size, ranks=group, name=name, after=[last]))
        assert last is not None
        return last

    while any(queues):
        before = sum(map(len, queues))
        for rank in range(p):
            while queues[rank]:
                way, number = queues[rank][0]
                source = rank - 1 if way == "forward" else rank + 1
                if 0 <= source < p and (way, rank, number) not in arrived:
                    break
                queues[rank].pop(0)
                run(rank, way, number)
        assert sum(map(len, queues)) < before, "the pipeline's order has a cycle"
    for rank in range(p):
        seconds = optimizer_s(plan, profile, np.arange(edges[rank], edges[rank + 1]))
        graph.compute(places[rank].ravel(), seconds, name="optimizer", after=reductions)
    return graph


def _buckets(plan: Plan, profile: Profile, layers: slice) -> list[tuple[int, int, float]]:
    """Layers of each bucket, from the last one on: first, end, bytes; every layer is in one."""
    sizes = profile.held(plan).gradient_bytes[layers]
    limit = BucketSizes.choose(float(sizes.sum()), plan.bucket_bytes).most
    found, held, end = [], 0.0, len(sizes)
    for index in range(len(sizes) - 1, -1, -1):
        held += float(sizes[index])
        if held >= limit or index == 0:
            found.append((index, end, held))
            held, end = 0.0, index
    return found


def _default_pick(wire: Wire) -> Pick:
    made: dict[tuple[Collective, int], Schedule] = {}

    def pick(collective: Collective, nbytes: float) -> Schedule:
        power = int(nbytes).bit_length()
        key = (collective, power)
        if key not in made:
            costs = [one.cost(collective, int(nbytes), wire, **given) for one, given in planned(collective)]
            best, given = planned(collective)[costs.index(min(costs))]
            made[key] = best(collective, **given)
        return made[key]

    return pick
