"""How a step ends: what stays exposed of gradients behind back-propagation and of parameters before use; the update."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hocket.simulate import Stream

from ..axes import copy_group, replicas, shard_group
from ..network import NOTHING, Constants, Cost
from ..plan import BucketSizes, Plan
from ._pipeline import Followed
from ._profile import LayerTimes, Profile
from ._stages import layers_by_rank


def ends(
    plan: Plan,
    profile: Profile,
    times: LayerTimes,
    edges: Sequence[int],
    worst: int,
    m: int,
    crowd: float,
    followed: Followed | None,
    most_s: float,
) -> tuple[float, float, float, Cost, float] | None:
    """Return what is exposed of gradients and parameters, the update, a whole reduction, and what is hidden of both.

    On the rank of the pipeline that ends last: `worst` computes longest, but another may have more gradients, or end
    its passes later. A rank of a pipeline reduces its gradients when its passes are over and its last message has left,
    as the Trainer does it; what is reduced before the pipeline ends is hidden. `edges` are the first layers of the
    stages, there are `m` micro-batches, and while all compute, computation takes `crowd` times as long as in `times`.
    """
    p, v = plan.pipeline_parallel_degree, plan.stages_per_rank
    slowed = times.slowed(crowd)
    if p == 1:
        return _of_rank(plan, profile, slowed, np.arange(edges[-1]), m, crowd)
    held = profile.held(plan)
    back = slowed.backward + slowed.again + slowed.tensor_backward
    own_of = layers_by_rank(plan, edges)
    heaviest = int(np.argmax([held.gradient_bytes[layers].sum() for layers in own_of]))
    begins = [(left - followed.seconds) * crowd for left in followed.left] if followed else None
    found = []
    for rank in range(p) if p <= _ALL_RANKS else dict.fromkeys((worst, heaviest, 0, p - 1)):
        own = own_of[rank]
        if plan.shard == "parameters" and replicas(plan)[0] > 1:
            if not followed:
                found.append(_of_rank(plan, profile, slowed, own, m, crowd))
                continue
            over = (max(followed.links[rank], followed.ends[rank]) - followed.seconds) * crowd
            found.append((over, 0.0, profile.update_s(plan, own) * crowd, *_whole(plan, profile, times, own, m)))
            continue
        # Where none is followed, the ranks before still have a micro-batch to do.
        end = begins[rank] if begins else -sum(float(back[layers].sum()) for layers in own_of[:rank]) / v
        reducing, gathering, cost = _reduced(plan, profile, own_of, rank, begins)
        over, update = end + reducing, profile.update_s(plan, own) * crowd
        if over + update > most_s:  # without gathers, which may take simulations
            return None
        found.append((over, gathering(), update, cost, 0.0))
        if sum(found[-1][:3]) > most_s:
            return None
    over, gather, update, cost, hidden = max(found, key=lambda one: sum(one[:3]))
    # A rank that is done before the others updates its parameters meanwhile, and gathers what others have updated.
    early = max(0.0, -over)
    return max(0.0, over), max(0.0, gather - max(0.0, early - update)), max(0.0, update - early), cost, hidden


_ALL_RANKS = 8  # of a pipeline; of more the few are looked at that may end last


def _reduced(
    plan: Plan, profile: Profile, own_of: Sequence[np.ndarray], rank: int, begins: Sequence[float] | None
) -> tuple[float, Callable[[], float], Cost]:
    """Return what a rank of a pipeline takes to reduce its gradients and to gather parameters, and one whole reduction.

    Its buckets are reduced one after the other when its last pass is over and its last message has left: the Trainer
    adds up the gradients of all micro-batches before it reduces any, those of stages that are done long since, too.
    `begins` say when each rank does; all at once, if that is not known.
    """
    copies, stride = replicas(plan)
    if copies == 1:
        return 0.0, float, NOTHING
    constants, held, own = profile.constants, profile.held(plan), own_of[rank]
    kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"
    cost = functools.partial(profile.network.collective, size=copies, stride=stride, constants=constants)
    alone = np.eye(len(own_of))

    def seconds(kind: str, nbytes: float, of: np.ndarray) -> float:
        sizes = [float(of[layers].sum()) for layers in own_of]
        beside = talking(sizes, rank)
        if begins and profile.network.routes(copies, stride):
            each = [cost(kind, size, beside=(one, tuple(alone[one]))).seconds for one, size in enumerate(sizes)]
            # Links serve all evenly: what would begin while another is under way alone ends as much later.
            over = np.minimum(np.add(begins, each), begins[rank] + each[rank]) - np.maximum(begins, begins[rank])
            beside = rank, tuple(np.round(np.maximum(over, 0) / max(each[rank], 1e-12), 2).tolist())
        return cost(kind, nbytes, beside=beside).seconds

    nbytes = float(held.gradient_bytes[own].sum())
    whole = cost(kind, nbytes)
    count = bucket_count(nbytes, plan, constants)

    def gather() -> float:
        if plan.shard not in ("optimizer", "gradients"):
            return 0.0
        return seconds("all_gather", float(held.trained_bytes[own].sum()), held.trained_bytes)

    return count * seconds(kind, nbytes / count, held.gradient_bytes), gather, whole


def bucket_count(nbytes: float, plan: Plan, constants: Constants) -> int:
    """Return in how many buckets a rank of a pipeline reduces so many bytes of gradients."""
    if not constants.overlap:
        return 1
    return max(1, round(nbytes / BucketSizes.choose(nbytes, plan.bucket_bytes).most))


def talking(nbytes: Sequence[float], rank: int) -> tuple[int, tuple[float, ...]]:
    """Return of every rank of a pipeline how much of the time it talks in which one of them does.

    A link serves all who use it evenly, until the one with less is done.
    """
    return rank, tuple(round(min(1.0, one / nbytes[rank]), 2) if nbytes[rank] else 0.0 for one in nbytes)


@functools.lru_cache(maxsize=64)  # of one search they are the same
def fetched(constants: Constants) -> Constants:
    """Return what gathers and reduce-scatters of sharded parameters reach."""
    return dataclasses.replace(constants, gather_share=constants.gather_share * constants.fetch_share)


def block_times(
    plan: Plan,
    profile: Profile,
    times: LayerTimes,
    layers: np.ndarray,
    beside: tuple[int, tuple[float, ...]] | None = None,
) -> tuple[np.ndarray, ...]:
    """Return seconds of every block: to gather its parameters ahead and back, to reduce its gradients, of both passes.

    Where nothing is passed back, since all up to there is frozen, FSDP2 gathers nothing again.
    """
    (size, stride), copies = shard_group(plan), copy_group(plan)[0]
    held, constants = profile.held(plan), fetched(profile.constants)
    if beside is not None:  # a stage has as many of these groups after one another as there are copies
        beside = beside[0] * copies, tuple(one for one in beside[1] for _ in range(copies))
    parameters, gradients, forward, backward = (
        profile.by_block(values[layers], layers)
        for values in (
            held.parameter_bytes - times.narrowed,
            held.gradient_bytes,
            times.forward + times.tensor_forward,
            times.backward + times.again + times.tensor_backward,
        )
    )

    def seconds(kind: str, sizes: np.ndarray) -> np.ndarray:
        known = {
            nbytes: profile.network.collective(kind, nbytes, size, stride, constants, beside=beside).seconds
            for nbytes in set(sizes.tolist())
        }
        return np.array([known[nbytes] for nbytes in sizes.tolist()])

    gather = seconds("all_gather", parameters)
    return gather, np.where(backward > 0, gather, 0.0), seconds("reduce_scatter", gradients), forward, backward


def copies_times(
    plan: Plan, profile: Profile, layers: np.ndarray, beside: tuple[int, tuple[float, ...]] | None = None
) -> np.ndarray:
    """Return seconds in which ranks that hold the same shard of every block average its gradients, once a step."""
    gradients = profile.by_block(profile.held(plan).gradient_bytes[layers], layers)
    size, stride = copy_group(plan)
    if size == 1:
        return np.zeros(len(gradients))
    cost = functools.partial(profile.network.collective, "all_reduce", size=size, stride=stride, beside=beside)
    each = [cost(nbytes / shard_group(plan)[0], constants=profile.constants).seconds for nbytes in gradients.tolist()]
    return np.array(each)


def inside(profile: Profile, group: tuple[int, int]) -> bool:
    """Return whether the members of such a group, its size and stride, are all on one host."""
    return profile.network.members(*group)[1] == 1


def _of_rank(
    plan: Plan, profile: Profile, times: LayerTimes, own: np.ndarray, m: int, crowd: float
) -> tuple[float, float, float, Cost, float]:
    """Return what `ends` does of a rank that computes without waiting for others."""
    gradients, gather, cost, hidden = _exchange(plan, profile, times, own, m)
    return gradients, gather, profile.update_s(plan, own) * crowd, cost, hidden


def _whole(plan: Plan, profile: Profile, times: LayerTimes, own: np.ndarray, m: int) -> tuple[Cost, float]:
    """Return one reduction of all gradients of a rank, and what of its gathers and reductions is under way a step."""
    held, (size, stride) = profile.held(plan), shard_group(plan)
    cost = functools.partial(profile.network.collective, size=size, stride=stride, constants=profile.constants)
    whole = cost("reduce_scatter", float(held.gradient_bytes[own].sum()))
    parameters = (held.parameter_bytes - times.narrowed)[own]
    backward = (times.backward + times.again + times.tensor_backward)[own]
    gathered = (
        float(parameters.sum()),
        float(profile.by_block(parameters, own)[profile.by_block(backward, own) > 0].sum()),
    )
    fetched_s = m * (whole.seconds + sum(cost("all_gather", nbytes).seconds for nbytes in gathered))
    return whole, fetched_s + float(copies_times(plan, profile, own).sum())


def _exchange(
    plan: Plan, profile: Profile, times: LayerTimes, layers: np.ndarray, m: int
) -> tuple[float, float, Cost, float]:
    """Exposed seconds of reducing gradients and of gathering parameters, one whole reduction, and hidden seconds."""
    copies, stride = replicas(plan)
    if copies == 1:
        return 0.0, 0.0, NOTHING, 0.0
    constants, held = profile.constants, profile.held(plan)
    gradients, updated = held.gradient_bytes[layers], held.trained_bytes[layers]
    kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"

    def cost(kind: str, nbytes: float) -> Cost:
        return profile.network.collective(kind, nbytes, copies, stride, constants)

    if plan.shard == "parameters":
        whole = _whole(plan, profile, times, layers, m)[0]
        ahead, again, back, forward, backward = block_times(plan, profile, times, layers)
        fetched_s = m * float((ahead + again).sum())
        last = copies_times(plan, profile, layers)
        if constants.overlap and constants.prefetch:
            apart = inside(profile, shard_group(plan))
            gather, exposed = _meanwhile(ahead, again, back, forward, backward, m, last, apart=apart)
        else:
            gather, exposed = fetched_s, m * float(back.sum()) + float(last.sum())
        spent = fetched_s + m * float(back.sum()) + float(last.sum())
        return exposed, gather, whole, max(0.0, spent - gather - exposed)
    whole = cost(kind, float(gradients.sum()))
    exposed = whole.seconds
    if constants.overlap:  # buckets fill from the last layer on, while back-propagation goes on
        rank, link = Stream(), Stream()
        backward = (times.backward + times.again + times.tensor_backward)[layers]
        most = BucketSizes.choose(float(gradients.sum()), plan.bucket_bytes).most
        for first, end, count, nbytes in buckets(gradients, most):
            for seconds in backward[first:end][::-1].tolist():
                rank.add(seconds)
            if nbytes:
                link.add(count * cost(kind, nbytes / count).seconds, rank.free_s)
        exposed = max(0.0, link.free_s - float(backward.sum()))
    hidden = max(0.0, whole.seconds - exposed)
    # What is sharded cannot be added up at home, but for the gradients of a pipeline's micro-batches.
    exposed *= plan.accumulate if plan.shard == "gradients" else 1
    gather = cost("all_gather", float(updated.sum())).seconds if plan.shard != "none" else 0.0
    return exposed, gather, whole, hidden


def _meanwhile(
    gathers: np.ndarray,
    again: np.ndarray,
    reduces: np.ndarray,
    forward: np.ndarray,
    backward: np.ndarray,
    passes: int,
    last: np.ndarray,
    *,
    apart: bool,
) -> tuple[float, float]:
    """Return what stays exposed of fetching sharded layers and of reducing their gradients, all on one link.

    The next layer's parameters are asked for when one begins to be computed, the reduction of its gradients when it
    ends. Passes follow each other; from the second on all take as long. Behind each reduction of the last pass ranks
    that hold the same average it, which takes `last`, on a link of their own if that is `apart`.
    """
    rank, link = Stream(), Stream()
    between = Stream() if apart else link
    ends: list[float] = []
    begun = left = 0.0  # when the last layer began, and the reduction that its end asks for
    more = 0.0  # what follows that reduction among copies
    for number in range(min(passes, 2)):
        averaged = last if number == min(passes, 2) - 1 else np.zeros(len(last))
        none = [0.0] * len(forward)
        columns = (
            (gathers.tolist(), forward.tolist(), none, none),
            (again[::-1].tolist(), backward[::-1].tolist(), reduces[::-1].tolist(), averaged[::-1].tolist()),
        )
        for gather, compute, reduce, average in itertools.chain.from_iterable(
            zip(*column, strict=True) for column in columns
        ):
            there = link.add(gather, begun)
            if left:
                between.add(more, link.add(left, rank.free_s))
            begun, left, more = max(rank.free_s, there), reduce, average
            rank.add(compute, there)
        ends.append(rank.free_s)
    computed = float(forward.sum() + backward.sum())
    fetched = ends[0] + (passes - 1) * (ends[-1] - ends[0] if passes > 1 else 0.0) - passes * computed
    if left:
        between.add(more, link.add(left, rank.free_s))
    return max(0.0, fetched), max(0.0, link.free_s - rank.free_s, between.free_s - rank.free_s)


def buckets(sizes: np.ndarray, limit: float) -> list[tuple[int, int, int, float]]:
    """Layers of each bucket, from the last one on: first, end, collectives, bytes; every layer is in one."""
    found, held, end = [], 0.0, len(sizes)
    for index in range(len(sizes) - 1, -1, -1):
        held += float(sizes[index])
        if held >= limit or index == 0:
            found.append((index, end, max(1, round(held / limit)), held))
            held, end = 0.0, index
    return found
