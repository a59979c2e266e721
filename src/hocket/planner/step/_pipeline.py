"""A plan's pipeline, followed from action to action: what a rank of it spends besides its own work."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hocket.schedule.pipeline import NAMED_ORDERS, PipelineAction
from hocket.simulate import OrderTiming, StageWork, simulate_order

from ..network import LinkSeconds
from ..plan import order_of

if TYPE_CHECKING:
    from ..plan import Plan
    from ._profile import LayerTimes


class Hop(NamedTuple):
    """Seconds of a micro-batch's message from one stage to the next, or back."""

    busy_s: float = 0.0  # in which its port carries nothing else
    latency_s: float = 0.0  # what else it takes
    # of this message and of that back, the links that it passes and seconds on each, where routes are known
    links: tuple[tuple[LinkSeconds, ...], tuple[LinkSeconds, ...]] = ((), ())
    nbytes: float = 0.0  # of what one of those sends who have it
    beside: tuple[tuple[tuple[LinkSeconds, ...], tuple[LinkSeconds, ...]], ...] = ()  # as links, of other pipelines

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.busy_s + self.latency_s


def stage_works(
    times: "LayerTimes", edges: Sequence[int], hops: Sequence[Hop], handling: float, ports: Sequence[int]
) -> tuple[StageWork, ...]:
    """Return what a micro-batch asks of every stage; each is handled once a pass.

    What is not the wires' of exchanges waits for processors, as computation does. `ports` say through which port each
    stage sends to the next.
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
        hop = hops[stage] if stage < len(hops) else Hop()
        port = ports[stage] if stage < len(ports) else 0
        both = forward + handling / 2, backward + handling / 2
        times_s = *both, wire, wire_back, hop.busy_s, weights
        found.append(StageWork(*times_s, port, hop.latency_s, hop.links, hop.nbytes, hop.beside))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Followed:
    """A pipeline that was followed from action to action."""

    seconds: float  # from its begin to its end
    ends: tuple[float, ...]  # of every rank the end of its last action
    left: tuple[float, ...]  # of every rank when its last message has left, too
    followed: int  # how many micro-batches; what more of them take was added
    links: tuple[float, ...] = ()  # of every rank when what it sends besides is there, where its parameters are sharded
    ways_s: Mapping[tuple[bool, int, int], float] = field(default_factory=dict)  # see `OrderTiming`

    def later(self, seconds: float) -> "Followed":
        """Return the same with a longer way to the end."""
        ends, left, links = (tuple(end + seconds for end in each) for each in (self.ends, self.left, self.links))
        return Followed(self.seconds + seconds, ends, left, self.followed, links, self.ways_s)


def follow(plan: "Plan", stages: tuple[StageWork, ...]) -> Followed | None:
    """Follow a plan's pipeline where each rank has a processor; None where that takes too long to try many plans.

    Of a named order with many micro-batches the first are followed: from the third round on each takes as long as the
    one before.
    """
    p, v, m = plan.pipeline_parallel_degree, plan.stages_per_rank, plan.micro_batches
    named = NAMED_ORDERS.get(plan.pipeline_schedule)
    few = m if named is None or p * v * m <= _ACTIONS or m % p else min(m, 3 * p)
    if named is not None and p * v * few > 16 * _ACTIONS:
        return None
    found = _followed(plan.pipeline_schedule, p, v, few, stages)
    if few == m:
        return found
    return found.later((m - few) / p * (found.seconds - _followed(plan.pipeline_schedule, p, v, 2 * p, stages).seconds))


_ACTIONS = 256  # forwards of all stages, that are followed in some 2 ms


@functools.lru_cache(maxsize=1024)  # plans that differ in what they shard have the same pipeline
def _followed(schedule: str, p: int, v: int, m: int, stages: tuple[StageWork, ...]) -> Followed:
    timing = simulate_order(order_of(schedule, p, v, m), stages)
    ends = tuple(rank[-1][2] for rank in timing.spans)
    left = tuple(max(end, _left(rank, timing, stages)) for rank, end in zip(timing.spans, ends, strict=True))
    return Followed(timing.seconds, ends, left, m, (), timing.ways_s)


def _left(
    spans: Sequence[tuple[PipelineAction, float, float]],
    timing: OrderTiming,
    stages: Sequence[StageWork],
) -> float:
    """Return when the last message of a rank's backward passes has left it; 0 if it sends none."""
    for action, _, end in reversed(spans):
        before = action.stage - 1
        if action.kind in "BI" and timing.order.apart(before):
            return end + timing.ways_s[False, before, action.micro_batch] - stages[before].latency
    return 0.0


def crowding(plan: "Plan", stages: tuple[StageWork, ...], at_once: float) -> float:
    """Return what a pipeline takes longer if so many of its ranks compute at full speed at once."""
    m = plan.micro_batches * plan.accumulate
    return _crowding(plan.pipeline_schedule, plan.pipeline_parallel_degree, plan.stages_per_rank, m, stages, at_once)


@functools.lru_cache(maxsize=1024)  # as above
def _crowding(schedule: str, p: int, v: int, m: int, stages: tuple[StageWork, ...], at_once: float) -> float:
    order = order_of(schedule, p, v, m)
    return max(0.0, simulate_order(order, stages, at_once).seconds - simulate_order(order, stages).seconds)
