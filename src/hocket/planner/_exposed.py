"""What of data parallelism's exchanges stays exposed: gradients behind back-propagation, parameters before use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ._constants import Constants
from ._network import NOTHING, Cost
from ._plan import Plan
from ._profile import LayerTimes, Profile

__all__ = ["BUCKET_NBYTES", "exposed_exchange"]

BUCKET_NBYTES = 25 * 2**20


def exposed_exchange(
    plan: Plan, profile: Profile, times: LayerTimes, layers: np.ndarray, m: int
) -> tuple[float, float, Cost]:
    """Exposed seconds of reducing gradients and of gathering parameters, and one whole reduction."""
    data, tensor = plan.data_parallel_degree, plan.tensor_parallel_degree
    if data == 1:
        return 0.0, 0.0, NOTHING
    network, constants = profile.network, profile.constants
    held = profile.held(plan)
    gradients, parameters = held.gradient_bytes[layers], held.parameter_bytes[layers]
    kind = "all_reduce" if plan.shard == "none" else "reduce_scatter"

    fetching = dataclasses.replace(constants, gather_share=constants.gather_share * constants.fetch_share)

    def cost(kind: str, nbytes: float, constants: Constants = constants) -> Cost:
        return network.collective(kind, nbytes, data, tensor, constants)

    whole = cost(kind, float(gradients.sum()))
    bucket = float(plan.bucket_bytes or BUCKET_NBYTES)
    backward = (times.backward + times.again + times.tensor_backward)[layers]
    if constants.overlap:
        exposed = _exposed(gradients, backward, bucket, lambda nbytes: cost(kind, nbytes).seconds)
    else:
        exposed = whole.seconds
    gather = 0.0
    # What is sharded cannot be added up at home, but for the gradients of a pipeline's micro-batches.
    exposed *= {"gradients": plan.accumulate, "parameters": m}.get(plan.shard, 1)
    if plan.shard in ("optimizer", "gradients"):
        gather = cost("all_gather", float(parameters.sum())).seconds
    if plan.shard == "parameters":
        each = np.array([cost("all_gather", float(nbytes), fetching).seconds for nbytes in parameters])
        forward = (times.forward + times.tensor_forward)[layers]
        if constants.overlap and constants.prefetch:  # the next layer's parameters come while this one is computed
            gather = m * (_prefetched(each, forward) + _prefetched(each[::-1], backward[::-1]))
        else:
            gather = m * 2 * float(each.sum())
            exposed = m * sum(cost(kind, float(nbytes), fetching).seconds for nbytes in gradients)
    return exposed, gather, whole


def _prefetched(gathers: np.ndarray, computes: np.ndarray) -> float:
    """What stays exposed of gathers, each of which begins when the one before is done and the layer before begins."""
    now = done = 0.0
    begun = 0.0
    for gather, compute in zip(gathers.tolist(), computes.tolist(), strict=True):
        done = max(done, begun) + gather
        begun = max(now, done)
        now = begun + compute
    return now - float(computes.sum())


def _exposed(gradients: np.ndarray, backward: np.ndarray, bucket: float, seconds: Callable[[float], float]) -> float:
    """How long after back-propagation the last bucket is reduced; buckets fill from the last layer on."""
    now = done = held = 0.0
    for nbytes, compute in zip(gradients[::-1].tolist(), backward[::-1].tolist(), strict=True):
        now += compute
        held += nbytes
        if held >= bucket:
            count = max(1, round(held / bucket))
            done = max(done, now) + count * seconds(held / count)
            held = 0.0
    if held:
        done = max(done, now) + seconds(held)
    return max(0.0, done - now)
