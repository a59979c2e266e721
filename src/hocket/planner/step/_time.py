"""The time of a plan's step in closed form: computation, what is exchanged, what waits, and for what.

For small worlds `step_graph` makes the same step as tasks for the simulator; a test holds both together.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from hocket.cluster import Cluster
from hocket.schedule.pipeline import NAMED_ORDERS
from hocket.workload import Workload

from .._findings import PlanError, PlanFinding
from ..axes import AXES, product, replicas
from ..network import LOCAL, Constants, Cost, Network, StageMessages, network_of, slowest_of, waiting
from ..plan import Plan, plan_homes, undivided
from ._ends import ends
from ._gathers import follow_gathers, least_fetched
from ._likeness import longer
from ._memory import Memory, memory_of
from ._pipeline import Hop, crowding, follow, stage_works
from ._prediction import Prediction, StepParts, peak_format
from ._profile import LayerTimes, Profile, in_precision
from ._stages import layers_by_rank, stage_cuts, ties_across

# Pipelines whose ranks share processors are followed from event to event up to so many actions times ranks, some 50 ms.
_FOLLOWED = 4096
_MESSAGE = 1e6  # bytes, of which the link between two stages that takes longest is the slowest


def predict(
    plan: Plan,
    workload: Workload,
    cluster: Cluster | Network,
    *,
    workers: int,
    batch: int,
    constants: Constants | None = None,
    profile: Profile | None = None,
    memory_limit: int | None = None,
    memory: Memory | None = None,
) -> Prediction:
    """Time and memory of a plan.

    Args:
        plan: Any that `workers` can carry out.
        workload: What is trained.
        cluster: Where; the first `workers` ranks of it.
        workers: How many.
        batch: Samples of a global batch.
        constants: What is reached of the nominal rates; what the cluster says of itself, or is usual, if not given.
        profile: Of the workload on this cluster, if it was made already.
        memory_limit: Bytes of each worker; the cluster's own if not given.
        memory: Of the plan, if it was worked out already.

    Raises:
        PlanError: the plan breaks a rule, or cannot be timed.
    """
    found = predict_within(
        math.inf, plan, workload, cluster, workers=workers, batch=batch, constants=constants, profile=profile,
        memory_limit=memory_limit, memory=memory,
    )  # fmt: skip
    assert found is not None
    return found


def refuse_relaxed(plan: Plan) -> None:
    """Raise PlanError for a plan whose workers do not agree at every step: its steps are worth less than others'."""
    if plan.synchronisation != "every_step":
        rule = (
            "plans are compared by the time of a step, and workers that do not agree at every step learn less from one"
        )
        remedy = "leave it out here; measure the time to a target instead"
        raise PlanError("no prediction for this:", [PlanFinding("synchronisation", rule, remedy)])


def predict_within(
    most_s: float,
    plan: Plan,
    workload: Workload,
    cluster: Cluster | Network,
    *,
    workers: int,
    batch: int,
    constants: Constants | None = None,
    profile: Profile | None = None,
    memory_limit: int | None = None,
    memory: Memory | None = None,
) -> Prediction | None:
    """Return what `predict` does; None as soon as it is sure that a step takes longer than `most_s` seconds."""
    network = network_of(cluster)
    constants = constants or Constants.of(network.reached)
    if workers > network.world:
        rule = f"{network.name} has places for {network.world} workers, and {workers} are wanted"
        raise PlanError("there are not so many:", [PlanFinding("workers", rule, "take a larger cluster, or fewer")])
    refuse_relaxed(plan)
    network = network.first(workers)
    plan = plan.resolve(workers)
    found = plan.findings(workers, batch=batch) or undivided(plan, workload)
    if found:
        raise PlanError(f"the plan cannot be carried out by {workers} workers with batches of {batch}:", found)
    profile = (profile or Profile(in_precision(plan, workload), network, constants)).of(plan)
    workload = profile.workload
    parts_of = plan.micro_batches * plan.accumulate
    micro = math.ceil(batch / (plan.data_parallel_degree * parts_of))
    times = profile.times(plan, micro)
    cuts = cuts_of(plan, profile, times.total, micro)
    if found := ties_across(plan, workload, cuts):
        raise PlanError(f"the plan cannot be carried out by {workers} workers with batches of {batch}:", found)
    as_long = longer(plan, constants, workers)
    timed = _step(plan, profile, times, cuts, micro, workers, most_s / as_long)
    if timed is None:
        return None
    parts, cost, spared, recurrent = timed
    parts = parts.scaled(as_long)
    limit = network.memory_nbytes if memory_limit is None else memory_limit
    memory = memory or memory_of(plan, workload, batch=batch, cuts=cuts, sharers=network.sharers)
    flops = workload.step_flops / workload.batch
    formats: dict[str, float] = {}
    for name, part in workload.number_formats.items():
        runs = network.peak(name)[1]
        formats[runs] = formats.get(runs, 0.0) + part
    peak = network.peak(peak_format(formats))[0]
    return Prediction(
        plan, workload.name, network.name, workers, batch, parts, memory, limit, tuple(cuts), cost, flops,
        peak, constants, workload.measured, spared * as_long, tuple(sorted(formats.items(), key=lambda row: -row[1])),
        workload.update_passes > 0 and not workload.measured, recurrent * as_long, network.sharers > 0,
        workload.disturbed if workload.measured else 0.0,
    )  # fmt: skip


def cuts_of(plan: Plan, profile: Profile, costs: np.ndarray, micro: float) -> list[int]:
    """Return the layers with which the later stages of a pipeline begin: the plan's own, or those that balance `costs`.

    These are seconds of each layer. `micro` is samples of a micro-batch.
    """
    workload = profile.workload
    links = profile.links(plan) if workload.measured else [LOCAL]
    slowest = max(links, key=lambda link: float(link.seconds(_MESSAGE)))
    return stage_cuts(plan, workload, costs.tolist(), micro / workload.batch, slowest)


def _step(
    plan: Plan, profile: Profile, times: LayerTimes, cuts: Sequence[int], micro: int, workers: int, most_s: float
) -> tuple[StepParts, Cost, float, float] | None:
    p, v = plan.pipeline_parallel_degree, plan.stages_per_rank
    m = plan.micro_batches * plan.accumulate
    edges = [0, *cuts, len(times.forward)]
    own = layers_by_rank(plan, edges)
    constants, crowd = profile.constants, profile.network.crowding(workers)
    handling = v * constants.stage_s if p > 1 else constants.pass_s
    alone = times.unhindered(crowd)
    # Neither messages nor sharding are in this; without interleaving, the ranks before are waited for.
    spent = np.array([float(alone.total[layers].sum()) for layers in own]) + handling
    filled = np.cumsum(spent) - spent if plan.pipeline_schedule in ("1f1b", "gpipe") else 0.0
    if (m * spent + filled).max() > most_s * (1 + 1e-9):
        return None
    hops = _hops(plan, profile, edges, micro)
    messages = _messages(hops, plan)
    tensor = [float((times.tensor_forward + times.tensor_backward)[layers].sum()) for layers in own]
    each = np.array([float(times.total[layers].sum()) for layers in own]) + messages + handling
    worst = int(each.argmax())
    layers = own[worst]
    compute = m * float((times.forward + times.backward)[layers].sum())
    recompute = m * float(times.again[layers].sum())
    fetches = plan.shard == "parameters" and replicas(plan)[0] > 1
    named, shared = NAMED_ORDERS.get(plan.pipeline_schedule), profile.network.at_once
    followed, fetched = None, 0.0
    straggle = (compute + recompute) * (
        constants.jitter * slowest_of(workers)
        + constants.host_jitter * slowest_of(math.ceil(workers / profile.network.local))
    )
    sharding = _sharding(plan, profile, times, layers, m * crowd)
    left_s = most_s * (1 + 1e-9) - straggle - sharding - constants.step_s
    if (m * spent + filled).max() > left_s:
        return None
    if p > 1:
        if fetches and least_fetched(plan, profile, times, edges, m) > left_s:
            return None
        ports = profile.ports(plan)
        stages = stage_works(alone, edges, hops, constants.stage_s, ports)
        followed = follow(plan, stages)
    if followed:
        if followed.seconds > left_s:
            return None
        silent = functools.partial(dataclasses.replace, hop=0.0, latency=0.0, links=((), ()), beside=())
        plain = follow(plan, tuple(map(silent, stages)))
        assert plain is not None
        tensor[worst] = float((alone.tensor_forward + alone.tensor_backward)[layers].sum())
        bubble = max(0.0, plain.seconds - compute - recompute - m * (tensor[worst] + handling))
        sent = max(0.0, followed.seconds - plain.seconds)
        if fetches:
            gathered = follow_gathers(plan, profile, times, edges, stages, followed, left_s)
            fetched, followed = max(0.0, gathered.seconds - followed.seconds), gathered
            if followed.seconds > left_s:
                return None
    else:
        # The pipeline fills and drains once; its other ranks' times for one micro-batch are what the worst one waits.
        bubble = float(each.sum() - each[worst]) / (1 if named is None else named.divisor(v))
        sent = m * float(messages[worst])
    crowded = 0.0
    if followed and shared and p * p * v * m <= _FOLLOWED and plan.pipeline_schedule != "zero_bubble":
        crowded = crowding(plan, stages, shared * p / workers)
    elif shared:
        # All ranks' work is more than the processors do while the worst rank works and waits; exchanges of tensors are
        # measured among all of them anyway.
        lasts = m * (float(each[worst]) - tensor[worst]) + bubble
        crowded = max(0.0, m * (float(each.sum()) - sum(tensor)) / p * crowd - lasts)
    left_s -= followed.seconds if followed else compute + recompute + m * (tensor[worst] + handling) + bubble + sent
    ending = ends(plan, profile, times, edges, worst, m, crowd, followed, left_s)
    if ending is None:
        return None
    gradients, gather, update, cost, hidden = ending
    parts = StepParts(
        compute=compute,
        recompute=recompute,
        tensor=m * tensor[worst],
        messages=sent,
        bubble=bubble,
        gather=gather + fetched,
        gradients=gradients,
        optimizer=update,
        straggle=straggle,
        crowding=crowded,
        interference=constants.interference * min(hidden, compute + recompute),
        overhead=m * handling + sharding + constants.step_s,
    )
    return parts, cost, m * float(times.spared[layers].sum()), m * float(times.recurrent[layers].sum())


def _sharding(plan: Plan, profile: Profile, times: LayerTimes, layers: np.ndarray, passes: float) -> float:
    """Return what sharding costs a step besides its collectives; of parameters, for each of so many passes."""
    constants = profile.constants
    together = product(plan, *(axis for axis in AXES if axis.divides != "layers"))
    if plan.shard == "parameters":
        held = profile.by_block(profile.held(plan).parameter_bytes[layers], layers) > 0
        computed_s = profile.by_block((times.forward + times.backward + times.again)[layers], layers)[held]
        most_s = max(constants.block_computed_s, 1e-12)
        apart = float(np.minimum(1.0, computed_s / most_s).sum())
        # Stages wait for each other, too, but once a pass and not for every block.
        waits_s = constants.block_s * float(held.sum()) + constants.block_wait_s * apart
        waits_s *= waiting(together * math.sqrt(plan.pipeline_parallel_degree))
        return passes * (waits_s + constants.tensor_s * float(profile.tensors[layers].sum()))
    if replicas(plan)[0] == 1 or plan.shard == "none":
        return 0.0
    again = plan.accumulate - 1 if plan.shard == "gradients" else 0
    return (constants.optimizer_shard_s + again * constants.gradient_shard_s) * waiting(together)


def _hops(plan: Plan, profile: Profile, edges: Sequence[int], micro: int) -> list[Hop]:
    """Return what a micro-batch's message takes from each stage to the next; as long back."""
    found: list[Hop] = []
    if plan.pipeline_parallel_degree == 1:
        return found
    share = profile.constants.message_share
    for edge, link, message in zip(edges[1:-1], profile.stage_links(plan), profile.messages(plan), strict=True):
        if link is None:  # both stages are on one rank
            found.append(Hop())
            continue
        nbytes = float(profile.output_bytes[edge - 1]) * micro / profile.workload.batch
        parts = profile.message_parts(plan, nbytes)
        each = nbytes / parts / share
        message = message or StageMessages((), (), link.latency_s)
        late = message.latency_s if nbytes else 0.0
        if parts > 1 and not plan.sequence_parallel:  # those who get the parts collect the whole
            late += profile.network.collective("all_gather", nbytes, parts, 1, profile.constants).seconds
        own, *beside = (
            (tuple((one, each * spent) for one, spent in there), tuple((one, each * spent) for one, spent in back))
            for there, back in ((message.there, message.back), *message.beside)
        )
        found.append(Hop(each / link.rate_Bps, late, own, each, tuple(beside)))
    return found


def _messages(hops: Sequence[Hop], plan: Plan) -> np.ndarray:
    """Of every rank of the pipeline the time of its messages for one micro-batch: one each way behind every stage."""
    spent, homes = np.zeros(plan.pipeline_parallel_degree), plan_homes(plan)
    for stage, hop in enumerate(hops):
        spent[homes[stage]] += hop.seconds
        spent[homes[stage + 1]] += hop.seconds
    return spent
