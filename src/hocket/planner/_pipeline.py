"""A pipeline step by step: in which order its ranks work, and how long they take where they share processors.

Closed forms do not see who computes while who waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._profile import LayerTimes

__all__ = ["StageWork", "order_of", "span", "stage_works", "waits"]

Action = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one micro-batch asks of a stage, in seconds of a rank that computes alone.

    Attributes:
        forward: Computation of the forward pass.
        backward: Computation of the backward pass, with what is done again.
        forward_exchange: What follows the forward pass without a processor: exchanges of ranks that share tensors.
        backward_exchange: The same of the backward pass.
        hop: Of a message from this stage to the next, or back.
    """

    forward: float
    backward: float
    forward_exchange: float = 0.0
    backward_exchange: float = 0.0
    hop: float = 0.0


def order_of(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> list[Action]:
    """In which order a rank of the pipeline works: ("forward" or "backward", stage, micro-batch).

    GPipe; 1F1B; and interleaved 1F1B, where micro-batches pass in rounds of about as many as there are ranks
    (Narayanan et al., SC'21, section 2.2).

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        ranks: p, of the pipeline.
        stages_per_rank: v; stage s stands on rank s mod p.
        micro_batches: m.
        rank: whose order.
    """
    p, v, m = ranks, stages_per_rank, micro_batches
    if v == 1 and (schedule == "gpipe" or m < p):
        forwards = [("forward", rank, number) for number in range(m)]
        return forwards + [("backward", stage, number) for _, stage, number in reversed(forwards)]
    if v == 1:
        size, ahead = m, min(m, p - rank - 1)
    else:
        size = m // max(1, m // p)
        ahead = min(m * v, (v - 1) * size + 2 * (p - rank - 1))

    def place(number: int) -> tuple[int, int]:
        """Which of the rank's stages, forward, and which micro-batch."""
        turn, inside = divmod(number, size * v)
        first = turn * size
        here = min(size, m - first)
        return inside // here, first + inside % here

    forward = [("forward", place(k)[0] * p + rank, place(k)[1]) for k in range(m * v)]
    backward = [("backward", (v - 1 - place(k)[0]) * p + rank, place(k)[1]) for k in range(m * v)]
    order = forward[:ahead]
    for done, each in enumerate(forward[ahead:]):
        order += [each, backward[done]]
    return order + backward[m * v - ahead :]


def span(orders: Sequence[Sequence[Action]], stages: Sequence[StageWork], at_once: float = math.inf) -> float:
    """Seconds until every rank has done all of its actions.

    Ranks that compute share the processors evenly. A message leaves when its action is done, and its rank has sent and
    the other received what came before; nothing waits for it but the action that needs it.

    Args:
        orders: of every rank, see `order_of`.
        stages: the work of each.
        at_once: how many of the ranks compute at full speed at once.

    Raises:
        ValueError: the orders wait for each other.
    """
    run = _Run(orders, stages)
    while run.start():
        busy = [rank for rank in run.ranks if rank.computes]
        rate = min(1.0, at_once / len(busy)) if busy else 1.0
        run.advance(min(run.next_event(rank, rate) for rank in run.ranks), rate)
    return run.now


def stage_works(times: LayerTimes, edges: Sequence[int], hops: Sequence[float], handling: float) -> list[StageWork]:
    """What a micro-batch asks of every stage; each is handled once a pass.

    What is not the wires' of exchanges waits for processors, as computation does.
    """
    found = []
    ways = (
        times.forward + times.tensor_forward - times.wire_forward,
        times.backward + times.again + times.tensor_backward - times.wire_backward,
        times.wire_forward,
        times.wire_backward,
    )
    for stage, (begin, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        forward, backward, wire, wire_back = (float(one[begin:end].sum()) for one in ways)
        hop = hops[stage] if stage < len(hops) else 0.0
        found.append(StageWork(forward + handling / 2, backward + handling / 2, wire, wire_back, hop))
    return found


def waits(
    schedule: str, stages: Sequence[StageWork], shape: tuple[int, int, int], own_s: float, at_once: float
) -> tuple[float, float, float]:
    """What a rank spends besides its own work: idle as the schedule has it, for messages, and for processors.

    Args:
        schedule: See `order_of`.
        stages: Their work for a micro-batch.
        shape: Ranks of the pipeline, stages of each, and micro-batches.
        own_s: The work of the rank that computes longest.
        at_once: How many ranks of one pipeline compute at full speed at once.
    """
    orders = [order_of(schedule, *shape, rank) for rank in range(shape[0])]
    plain = span(orders, [dataclasses.replace(one, hop=0.0) for one in stages])
    wired = span(orders, stages)
    return plain - own_s, wired - plain, max(0.0, span(orders, stages, at_once) - wired)


class _Rank:
    """Where a rank is in its order.

    Attributes:
        actions: that are still to be done, the next one last.
        computes: whether it is at the computation of the next one.
        left: seconds of it that are left.
        until: when the exchange after it ends; None if there is none.
    """

    __slots__ = ("actions", "computes", "left", "until")

    def __init__(self, order: Sequence[Action]) -> None:
        self.actions = list(reversed(order))
        self.computes, self.left = False, 0.0
        self.until: float | None = None


class _Run:
    """A step under way."""

    def __init__(self, orders: Sequence[Sequence[Action]], stages: Sequence[StageWork]) -> None:
        self.now = 0.0
        self.ranks = [_Rank(order) for order in orders]
        self._stages = stages
        self._arrived: dict[Action, float] = {}
        self._free_out = [0.0] * len(orders)  # when a rank has sent what it has to send
        self._free_in = [0.0] * len(orders)

    def start(self) -> bool:
        """Begin what can begin now; whether anything is left to be done."""
        for rank in self.ranks:
            if rank.until is not None and rank.until <= self.now:
                self._finish(rank)
            if rank.actions and not rank.computes and rank.until is None and self._needs(rank) <= self.now:
                way, stage, _ = rank.actions[-1]
                rank.computes, rank.left = True, getattr(self._stages[stage], way)
        return any(rank.actions for rank in self.ranks)

    def next_event(self, rank: _Rank, rate: float) -> float:
        """When something changes for a rank if nothing does for the others."""
        if rank.computes:
            return self.now + rank.left / rate
        if rank.until is not None:
            return rank.until
        return self._needs(rank) if rank.actions else math.inf

    def advance(self, then: float, rate: float) -> None:
        """Let time pass, in which those who compute do so at a rate."""
        if then == math.inf:
            raise ValueError("the ranks of the pipeline wait for each other")
        for rank in self.ranks:
            if not rank.computes:
                continue
            rank.left -= (then - self.now) * rate
            if rank.left <= 1e-12:
                way, stage, _ = rank.actions[-1]
                rank.computes, rank.until = False, then + getattr(self._stages[stage], f"{way}_exchange")
        self.now = then

    def _needs(self, rank: _Rank) -> float:
        """When what the next action needs is there."""
        way, stage, _ = action = rank.actions[-1]
        alone = stage == (0 if way == "forward" else len(self._stages) - 1)
        return 0.0 if alone else self._arrived.get(action, math.inf)

    def _finish(self, rank: _Rank) -> None:
        way, stage, number = rank.actions.pop()
        rank.until = None
        onward = stage + (1 if way == "forward" else -1)
        if 0 <= onward < len(self._stages):
            hop = self._stages[min(stage, onward)].hop
            source, target = stage % len(self.ranks), onward % len(self.ranks)
            there = max(self.now, self._free_out[source], self._free_in[target]) + hop
            self._free_out[source] = self._free_in[target] = self._arrived[way, onward, number] = there
