"""A pipeline's order followed from event to event: how long it takes where ranks share processors and ports.

Nothing but the ranks of one pipeline takes part, so this loop is small enough to time the plans of a search one by one;
with links and collectives an order is a `StepGraph` (`order_graph`).
"""

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hocket.schedule.pipeline import COMPUTES, PipelineAction, PipelineOrder
from hocket.timeline import Span, Timeline

from ._graph import StepGraph, Work
from ._messages import MessagesUnderWay, Path
from ._tasks import SimulationError

_DONE_S = 1e-12  # what is left of a computation when it is over; a message that takes no longer passes nothing


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one micro-batch asks of a stage, in seconds of a rank that computes alone.

    Attributes:
        forward: Computation of the forward pass.
        backward: Computation of the backward pass, with what is done again.
        forward_exchange: What follows the forward pass without a processor: exchanges of ranks that share tensors.
        backward_exchange: The same of the backward pass.
        hop: Of a message from this stage to the next, or back, while it keeps its port busy.
        weights: The part of the backward pass that is for the weights; half of it if not given.
        port: Through which these messages go; those of another port of the same rank go beside them.
        latency: Of a message besides; others pass its port meanwhile.
        links: What a message from this stage to the next passes, and what one back does: numbers of links, and the
            seconds that it takes on each alone. All messages of the order share them. The port if not given.
        nbytes: Of a message, by which links are shared evenly; needed where some are faster than others.
        beside: `links` of every other pipeline that does the same on other ranks, and whose messages pass these links,
            too: the slowest of all is what is told. Where ranks share processors they are left out.
    """

    forward: float
    backward: float
    forward_exchange: float = 0.0
    backward_exchange: float = 0.0
    hop: float = 0.0
    weights: float | None = None
    port: int = 0
    latency: float = 0.0
    links: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]] = ((), ())
    nbytes: float = 0.0
    beside: tuple[tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]], ...] = ()

    def seconds(self, kind: str) -> tuple[float, float]:
        """Return computation of an action, and the exchange that follows it."""
        weights = self.backward / 2 if self.weights is None else self.weights
        return {
            "F": (self.forward, self.forward_exchange),
            "B": (self.backward, self.backward_exchange),
            "I": (self.backward - weights, self.backward_exchange),
            "W": (weights, 0.0),
        }[kind]


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When everything of an order happened.

    Attributes:
        order: What was followed.
        spans: Of every rank (action, begin, end) of what it computed, exchanges included, in seconds.
        computed_s: Of every rank the seconds in which it computed or waited for a processor.
        ways_s: Of every message how long it was on its way, by whether it went forward, stage and micro-batch at its
            end.
    """

    order: PipelineOrder
    spans: tuple[tuple[tuple[PipelineAction, float, float], ...], ...]
    computed_s: tuple[float, ...]
    ways_s: Mapping[tuple[bool, int, int], float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time in which they do not compute, 0 to 1."""
        return 1 - sum(self.computed_s) / len(self.computed_s) / self.seconds if self.seconds else 0.0

    def timeline(self) -> Timeline:
        """Return a span for each action."""
        spans = tuple(
            Span(rank, "compute", str(action), begin, end, kind="compute")
            for rank, row in enumerate(self.spans)
            for action, begin, end in row
        )
        return Timeline(f"the order {self.order.name}", spans, (), ())


def simulate_order(order: PipelineOrder, stages: Sequence[StageWork], at_once: float = math.inf) -> OrderTiming:
    """Follow an order until every rank has done all of its actions.

    Ranks that compute share the processors evenly. A message leaves when its action is done, and what was sent before
    it between the same ranks is there; with others it shares what it passes. Nothing waits for it but the action that
    needs it.

    Args:
        order: What each rank does. Where messages are written, only their being needed counts.
        stages: The work of each stage.
        at_once: How many of the ranks compute at full speed at once.

    Raises:
        SimulationError: ranks wait for each other, or the works are not those of the order's stages.
    """
    if len(stages) != order.stages:
        raise SimulationError(f"{order.name} has {order.stages} stages, and the work of {len(stages)} is given")
    if at_once >= order.world:
        return _unhindered(order, stages)
    run = _OrderRun(order, stages)
    while run.start():
        busy = sum(rank.computes for rank in run.ranks)
        rate = min(1.0, at_once / busy) if busy else 1.0
        run.advance(min(run.next_message_s, *(run.next_event(rank, rate) for rank in run.ranks)), rate)
    spans, computed = (tuple(rank.spans) for rank in run.ranks), (rank.computed for rank in run.ranks)
    return OrderTiming(order, tuple(spans), tuple(computed), run.ways_s)


_Way = tuple[float, Path, Hashable, float]  # latency, path, channel and bytes of a message


def _ways(order: PipelineOrder, stages: Sequence[StageWork], pipeline: int = 0) -> tuple[list[_Way], ...]:
    """Return what the messages from every stage to the next are sent with, and those back; of one of the pipelines."""
    found: tuple[list[_Way], ...] = ([], [])
    for stage, work in enumerate(stages):
        here, onward = (order.home(one) + pipeline * order.world for one in (stage, stage + 1))
        links = (work.links, *work.beside)[pipeline if work.beside else 0]
        for back, ends in enumerate(((here, onward), (onward, here))):
            ports = ((("out", ends[0], work.port), work.hop), (("in", ends[1], work.port), work.hop))
            path = links[back] or ports
            found[back].append((work.latency, [one for one in path if one[1] > _DONE_S], ends, work.nbytes))
    return found


def _unhindered(order: PipelineOrder, stages: Sequence[StageWork]) -> OrderTiming:
    """Follow an order where no rank waits for a processor: from the end of one action to that of the next."""
    pipelines, messages = 1 + max(len(stage.beside) for stage in stages), MessagesUnderWay()
    ways = [_ways(order, stages, pipeline) for pipeline in range(pipelines)]
    rows = order.handovers * pipelines
    computes, exchanges = zip(*(stage.seconds(kind) for kind in COMPUTES for stage in stages), strict=True)
    each, world = 2 * order.stages * order.micro_batches + 1, order.world  # what of a pipeline arrives, and nothing
    arrived = ([math.inf] * (each - 1) + [0.0]) * pipelines
    at, free_s, idle = [0] * len(rows), [0.0] * len(rows), [True] * len(rows)
    begins: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    targets, sent = [0] * len(arrived), {}  # of every message, and when it was sent
    under_way: list[tuple[float, int]] = []  # when a rank's action is done

    def begin(number: int) -> None:
        if at[number] == len(rows[number]):
            return
        slot, needs = rows[number][at[number]][:2]
        if (there := arrived[number // world * each + needs % each]) < math.inf:
            idle[number], begun = False, max(there, free_s[number])
            begins[number].append(begun)
            heapq.heappush(under_way, (begun + computes[slot] + exchanges[slot], number))

    for number in range(len(rows)):
        begin(number)
    while under_way or messages.next_s < math.inf:
        if not under_way or messages.next_s <= under_way[0][0]:
            now, came = messages.next_s, messages.advance()
            if came is not None:
                arrived[came] = now
                if idle[targets[came]]:
                    begin(targets[came])
            continue
        now, number = heapq.heappop(under_way)
        slot, _, makes, target, boundary = rows[number][at[number]]
        pipeline = number // world
        target += pipeline * world
        makes += pipeline * each if makes >= 0 else 0
        ends[number].append(now)
        at[number] += 1
        free_s[number], idle[number], there = now, True, now
        if makes >= 0:
            sent[makes] = now
        if boundary >= 0:
            latency, path, channel, nbytes = ways[pipeline][slot >= order.stages][boundary]
            there += latency
            if path:
                targets[makes] = target
                messages.send(makes, now, latency, path, channel, nbytes)
                makes = -1
        if makes >= 0:
            arrived[makes] = there
        begin(number)
        if makes >= 0 and idle[target]:
            begin(target)
    if any(place < len(row) for place, row in zip(at, rows, strict=True)):
        raise SimulationError("the ranks of the pipeline wait for each other")
    lasts = [row[-1] if row else 0.0 for row in ends]
    first = lasts.index(max(lasts)) // world * world
    spans = zip(order.computing, begins[first : first + world], ends[first : first + world], strict=True)
    computed = (sum(computes[one.slot] for one in row) for row in order.handovers)
    back_from, m, begin_of = order.stages * order.micro_batches, order.micro_batches, first // world * each
    ways_s = {
        (one < back_from, one // m % order.stages, one % m): arrived[makes] - at_s
        for makes, at_s in sent.items()
        if 0 <= (one := makes - begin_of) < each
    }
    return OrderTiming(order, tuple(tuple(zip(*one, strict=True)) for one in spans), tuple(computed), ways_s)


@dataclass(eq=False, slots=True)
class _OrderRank:
    """Where a rank is in its order."""

    actions: list[PipelineAction]  # what is still to be done, the next one last
    computes: bool = False  # whether it is at the computation of the next one
    left: float = 0.0  # seconds of it that are left
    until: float | None = None  # when the exchange after it ends; None if there is none
    begun: float = 0.0  # when the next one began
    computed: float = 0.0  # seconds of computation so far
    spans: list[tuple[PipelineAction, float, float]] = field(default_factory=list)  # what is done


class _OrderRun:
    """A step under way."""

    def __init__(self, order: PipelineOrder, stages: Sequence[StageWork]) -> None:
        self.now = 0.0
        self.ranks = [_OrderRank(list(reversed(row))) for row in order.computing]
        self._seconds = {kind: [stage.seconds(kind) for stage in stages] for kind in COMPUTES}
        self._ways, self._messages = _ways(order, stages), MessagesUnderWay()
        self._last, self._apart = len(stages) - 1, order.apart
        self._arrived: dict[tuple[str, int, int], float] = {}
        self._sent: list[tuple[tuple[str, int, int], float]] = []  # what each message that was sent brings, and when
        self.ways_s: dict[tuple[bool, int, int], float] = {}  # as `OrderTiming` has it

    def start(self) -> bool:
        """Begin what can begin now; whether anything is left to be done."""
        while self._messages.next_s <= self.now:
            came = self._messages.advance()
            if came is not None:
                self._arrive(*self._sent[came], self.now)
        for rank in self.ranks:
            if rank.until is not None and rank.until <= self.now:
                self._finish(rank)
            if rank.actions and not rank.computes and rank.until is None and self._needs(rank) <= self.now:
                stage, kind, _ = rank.actions[-1]
                rank.computes, rank.left, rank.begun = True, self._seconds[kind][stage][0], self.now
        return any(rank.actions for rank in self.ranks)

    @property
    def next_message_s(self) -> float:
        """When something happens to a message."""
        return self._messages.next_s

    def next_event(self, rank: _OrderRank, rate: float) -> float:
        """When something changes for a rank if nothing does for the others."""
        if rank.computes:
            return self.now + rank.left / rate
        if rank.until is not None:
            return rank.until
        return self._needs(rank) if rank.actions else math.inf

    def advance(self, then: float, rate: float) -> None:
        """Let time pass, in which those who compute do so at a rate."""
        if then == math.inf:
            raise SimulationError("the ranks of the pipeline wait for each other")
        for rank in self.ranks:
            if not rank.computes:
                continue
            rank.left -= (then - self.now) * rate
            if rank.left <= _DONE_S:
                stage, kind, _ = rank.actions[-1]
                rank.computes, rank.until = False, then + self._seconds[kind][stage][1]
                rank.computed += then - rank.begun
        self.now = then

    def _needs(self, rank: _OrderRank) -> float:
        """When what the next action needs is there."""
        stage, kind, number = rank.actions[-1]
        if kind == "W" or stage == (0 if kind == "F" else self._last):
            return 0.0
        return self._arrived.get(("F" if kind == "F" else "B", stage, number), math.inf)

    def _finish(self, rank: _OrderRank) -> None:
        """Send what an action has made."""
        action = rank.actions.pop()
        stage, kind, number = action
        rank.until = None
        rank.spans.append((action, rank.begun, self.now))
        onward = stage + (1 if kind == "F" else -1)
        if kind == "W" or not 0 <= onward <= self._last:
            return
        makes, there = ("F" if kind == "F" else "B", onward, number), self.now
        if self._apart(min(stage, onward)):
            latency, path, channel, nbytes = self._ways[kind != "F"][min(stage, onward)]
            there += latency
            if path:
                self._messages.send(len(self._sent), self.now, latency, path, channel, nbytes)
                self._sent.append((makes, self.now))
                return
        self._arrive(makes, self.now, there)

    def _arrive(self, makes: tuple[str, int, int], sent: float, there: float) -> None:
        kind, stage, number = makes
        self._arrived[makes], self.ways_s[kind == "F", stage, number] = there, there - sent


def order_graph(order: PipelineOrder, stages: Sequence[StageWork], nbytes: float) -> StepGraph:
    """Return an order as a step of its ranks, whose messages cross a cluster's links.

    Args:
        order: What each rank does.
        stages: The work of each stage; `hop` is left out, and exchanges count as computation.
        nbytes: Of a message between two stages, each way.

    Raises:
        SimulationError: ranks wait for each other.
    """
    if order.explicit:
        order = order.computes()
    if order.played.stuck:
        raise SimulationError("the ranks of the pipeline wait for each other")
    graph = StepGraph(order.world)
    arrived: dict[tuple[str, int, int], Work] = {}
    for rank, (stage, kind, number) in order.played.sequence:
        way = "F" if kind == "F" else "B"
        came = [arrived[key] for key in [(way, stage, number)] if kind != "W" and key in arrived]
        name = f"{stage}{kind}{number}" if order.stages_per_rank > 1 else f"{kind}{number}"
        work = graph.compute(rank, sum(stages[stage].seconds(kind)), name=name, after=came)
        onward = stage + (1 if way == "F" else -1)
        if kind != "W" and order.apart(min(stage, onward)):
            sent = graph.send(rank, order.home(onward), nbytes, name=name, after=[work])
            arrived[way, onward, number] = sent
    return graph
