"""How a step ends: what stays exposed of gradients behind back-propagation and of parameters before use; the update."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hocket.simulate import Stream

from ._bucket_sizes import BucketSizes
from ._constants import Constants
from ._network import NOTHING, Cost
from ._plan import Plan
from ._profile import LayerTimes, Profile
from .axes import replicas

# Of the optimizer's state every byte is read and written; gradients are zeroed, accumulated, checked and read.
_GRADIENT_PASSES = 4


def ends(
    plan: Plan, profile: Profile, times: LayerTimes, own: Sequence[np.ndarray], worst: int, m: int, crowd: float
) -> tuple[float, float, float, Cost, float]:
    """Return what is exposed of gradients and parameters, the update, a whole reduction, and what is hidden of both.

    On the rank that ends last.

    That is the one that computes longest, or the one with the most gradients. What is reduced while the stages before
    it are still at their last micro-batch is hidden. `own` are the layers of each rank of the pipeline, and `worst` is
    the rank that computes longest; there are `m` micro-batches, and while all compute, computation takes `crowd` times
    as long as in `times`.
    """
    held = profile.held(plan).gradient_bytes
    heaviest = int(np.argmax([held[layers].sum() for layers in own]))
    slowed = times.slowed(crowd)
    back = slowed.backward + slowed.again + slowed.tensor_backward
    found = []
    for rank in dict.fromkeys((worst, heaviest)):
        slack = sum(float(back[layers].sum()) for layers in own[:rank]) / plan.stages_per_rank
        gradients, gather, cost, hidden = _exchange(plan, profile, slowed, own[rank], m)
        update = optimizer_s(plan, profile, own[rank]) * crowd
        found.append((max(0.0, gradients - slack), gather, update, cost, hidden))
    return max(found, key=lambda one: sum(one[:3]))


def _exchange(
    plan: Plan, profile: Profile, times: LayerTimes, layers: np.ndarray, m: int
) -> tuple[float, float, Cost, float]:
    """Exposed seconds of reducing gradients and of gathering parameters, one whole reduction, and hidden seconds."""
    copies, stride = replicas(plan)
    if copies == 1:
        return 0.0, 0.0, NOTHING, 0.0
    network, constants = profile.network, profile.constants
    held = profile.held(plan)
    gradients, parameters = held.gradient_bytes[layers], held.parameter_bytes[layers]
    kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"

    fetching = dataclasses.replace(constants, gather_share=constants.gather_share * constants.fetch_share)

    def cost(kind: str, nbytes: float, constants: Constants = constants) -> Cost:
        return network.collective(kind, nbytes, copies, stride, constants)

    whole = cost(kind, float(gradients.sum()))
    bucket = BucketSizes.choose(float(gradients.sum()), plan.bucket_bytes).most
    backward = (times.backward + times.again + times.tensor_backward)[layers]
    if constants.overlap:
        exposed = _exposed(gradients, backward, bucket, lambda nbytes: cost(kind, nbytes).seconds)
    else:
        exposed = whole.seconds
    gather, hidden = 0.0, whole.seconds - exposed
    # What is sharded cannot be added up at home, but for the gradients of a pipeline's micro-batches.
    exposed *= plan.accumulate if plan.shard == "gradients" else 1
    if plan.shard in ("optimizer", "gradients"):
        gather = cost("all_gather", float(parameters.sum())).seconds
    if plan.shard == "parameters":
        forward = (times.forward + times.tensor_forward)[layers]
        parameters, gradients, forward, backward = (
            profile.by_block(values, layers) for values in (parameters, gradients, forward, backward)
        )
        each = np.array([cost("all_gather", float(nbytes), fetching).seconds for nbytes in parameters])
        back = np.array([cost(kind, float(nbytes), fetching).seconds for nbytes in gradients])
        if constants.overlap and constants.prefetch:
            gather, exposed = _meanwhile(each, back, forward, backward, m)
        else:
            gather, exposed = m * 2 * float(each.sum()), m * float(back.sum())
        hidden = m * float(2 * each.sum() + back.sum()) - gather - exposed
    return exposed, gather, whole, max(0.0, hidden)


def _meanwhile(
    gathers: np.ndarray, reduces: np.ndarray, forward: np.ndarray, backward: np.ndarray, passes: int
) -> tuple[float, float]:
    """Return what stays exposed of fetching sharded layers and of reducing their gradients, all on one link.

    The next layer's parameters are asked for when one begins to be computed, the reduction of its gradients when it
    ends. Passes follow each other; from the second on all take as long.
    """
    rank, link = Stream(), Stream()
    ends: list[float] = []
    begun = left = 0.0  # when the last layer began, and the reduction that its end asks for
    for _ in range(min(passes, 2)):
        columns = (
            (gathers.tolist(), forward.tolist(), [0.0] * len(forward)),
            (gathers[::-1].tolist(), backward[::-1].tolist(), reduces[::-1].tolist()),
        )
        for gather, compute, reduce in itertools.chain.from_iterable(zip(*column, strict=True) for column in columns):
            there = link.add(gather, begun)
            if left:
                link.add(left, rank.free_s)
            begun, left = max(rank.free_s, there), reduce
            rank.add(compute, there)
        ends.append(rank.free_s)
    computed = float(forward.sum() + backward.sum())
    fetched = ends[0] + (passes - 1) * (ends[-1] - ends[0] if passes > 1 else 0.0) - passes * computed
    if left:
        link.add(left, rank.free_s)
    return fetched, max(0.0, link.free_s - rank.free_s)


def _exposed(gradients: np.ndarray, backward: np.ndarray, bucket: float, seconds: Callable[[float], float]) -> float:
    """How long after back-propagation the last bucket is reduced; buckets fill from the last layer on."""
    rank, link = Stream(), Stream()
    held = 0.0
    for nbytes, compute in zip(gradients[::-1].tolist(), backward[::-1].tolist(), strict=True):
        rank.add(compute)
        held += nbytes
        if held >= bucket:
            count = max(1, round(held / bucket))
            link.add(count * seconds(held / count), rank.free_s)
            held = 0.0
    if held:
        link.add(seconds(held), rank.free_s)
    return max(0.0, link.free_s - rank.free_s)


def optimizer_s(plan: Plan, profile: Profile, layers: np.ndarray) -> float:
    """Return the time of the update, which reads and writes state and reads gradients; each rank does its part."""
    sharded = replicas(plan)[0] if plan.shard != "none" else 1
    held, workload = profile.held(plan), profile.workload
    share = held.parameter_bytes[layers] / sharded
    if workload.optimizer_s:
        return workload.optimizer_s * float(share.sum()) / max(1, workload.parameter_bytes)
    if not profile.network.memory_Bps:
        return 0.0
    state = held.optimizer_bytes[layers] / sharded
    gradients = held.gradient_bytes[layers] / (sharded if plan.shard != "optimizer" else 1)
    moved = float((2 * state + _GRADIENT_PASSES * gradients + share).sum())
    return moved / (profile.network.memory_Bps * profile.constants.memory_share)
