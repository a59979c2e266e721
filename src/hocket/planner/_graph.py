"""A plan's step as tasks for the simulator: what `_time.py` has in closed form, on every rank and link."""

from collections.abc import Callable

import numpy as np

from hocket.algorithms import planned
from hocket.cluster import Cluster
from hocket.schedule import Collective, Schedule, Wire
from hocket.schedule.pipeline import PipelineAction
from hocket.simulate import StepGraph, Work
from hocket.workload import Workload

from ._bucket_sizes import BucketSizes
from ._constants import Constants
from ._ends import optimizer_s
from ._memory import memory_of
from ._network import network_of
from ._pipeline import plan_order
from ._plan import Plan
from ._profile import Profile
from ._stages import stage_cuts

Pick = Callable[[Collective, float], Schedule]

_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


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
    network = network_of(cluster).first(workers)
    constants = constants or Constants.of(network.reached)
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
    nbytes = [
        memory_of(plan, workload, batch=batch, cuts=cuts, rank=rank, sharers=network.sharers).total for rank in range(p)
    ]
    graph = StepGraph(workers, memory_nbytes=np.repeat(nbytes, d * t) if any(cluster.memory_nbytes) else None)
    places = np.arange(workers).reshape(p, d, t)
    order = plan_order(plan)
    arrived: dict[tuple[bool, int, int], Work] = {}
    reductions: list[Work] = []
    buckets = [_buckets(plan, profile, slice(first, end)) for first, end in zip(edges[:-1], edges[1:], strict=True)]
    # What completes a stage's gradients: its last whole backward, or the last half for its weights.
    completes = {action.stage: action for rank in order.ranks for action in rank if action.kind in ("B", "W")}
    back = times.backward + times.again
    seconds_of = {"F": times.forward, "B": back, "I": back - times.backward / 2, "W": times.backward / 2}

    def run(rank: int, action: PipelineAction) -> None:
        stage, kind, number = action
        layers, where = slice(edges[stage], edges[stage + 1]), places[rank].ravel()
        forward = kind == "F"
        after = [arrived[forward, stage, number]] if kind != "W" and (forward, stage, number) in arrived else []
        if d > 1 and action == completes[stage]:
            last = reduced(rank, stage, seconds_of[kind], after)
        else:
            last = graph.compute(
                where, float(seconds_of[kind][layers].sum()), name=f"{_NAMES[kind]} {number}", after=after
            )
        if kind == "W":
            return
        exchange = float((times.tensor_forward if forward else times.tensor_backward)[layers].sum())
        if exchange:
            last = graph.compute(where, exchange, stream="compute", name=f"tensor exchange {number}", after=[last])
        onward = stage + (1 if forward else -1)
        if 0 <= onward < order.stages and p > 1:
            each = float(profile.output_bytes[edges[max(stage, onward)] - 1]) * scale / t
            there = places[onward % p].ravel()
            sent = graph.send(where, there, each, name=f"{_NAMES[kind]} {number}", after=[last])
            arrived[forward, onward, number] = sent

    def reduced(rank: int, stage: int, seconds: np.ndarray, after: list[Work]) -> Work:
        """Return the last backward pass of a stage, whose gradients are reduced bucket by bucket."""
        where, base = places[rank].ravel(), edges[stage]
        last: Work | None = None
        for first, end, size in buckets[stage]:
            last = graph.compute(where, float(seconds[base + first : base + end].sum()), name="backward", after=after)
            for column in range(t):
                kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
                group = places[rank, :, column]
                schedule = choose(Collective(kind, d), size)
                name = f"gradients ({schedule.name})"
                reductions.append(graph.collective(schedule, size, ranks=group, name=name, after=[last]))
        assert last is not None
        return last

    for rank, action in order.played.sequence:
        run(rank, action)
    for rank in range(p):
        own = np.concatenate([np.arange(edges[stage], edges[stage + 1]) for stage in range(rank, order.stages, p)])
        seconds = optimizer_s(plan, profile, own)
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
