"""What algorithms reach on a cluster's own routes, where all groups of a shape talk at once.

Hashed paths meet, levels are tapered, devices share a root complex. The schedule's steps are taken one after the other;
in each the link with the most bytes for its rate says how long it takes. Where groups lie on hosts in different ways,
or ranks have unlike links, steps overlap: who is done first goes on, and shares links with who is behind. There the
simulator says how much longer, or shorter, a collective takes. Rates and latencies of `Network` are those of two hosts;
these are those of the links that a group really uses.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.algorithms import Algorithm, ClosedForm
from hocket.cluster import Cluster
from hocket.schedule import Collective
from hocket.simulate import LoweredCollectives, StepGraph, simulate_step

MOST_RANKS, MOST_MEASURED = 1024, 128
"""Up to so many the routes are looked at: some milliseconds for each shape of a group. Of clusters that say what is
reached up to fewer: what meets on their links is in that.
"""


_MOST_TRANSFERS = 4096
"""Of all groups of a shape together: so many are simulated, in some tenths of a second."""
_LARGE_NBYTES = 1e15  # of a vector, beside which latency is nothing

_STEEPEST = 16.0  # the largest p, at which the longer of two hides the shorter

LinkSeconds = tuple[int, float]
"""The number of a link, and seconds on it."""

Ways = tuple[tuple[LinkSeconds, ...], tuple[LinkSeconds, ...]]
"""What a message to the next stage passes, and what one back does."""


class Load(NamedTuple):
    """What a step takes of the links."""

    seconds: float  # for each byte of the vector, on the busiest link
    latency_s: float  # of the longest path


class StageFlows(NamedTuple):
    """What the flows of one step put on links, of those groups that are a stage of a pipeline."""

    links: NDArray[np.int64]
    inside: NDArray[np.float64]  # seconds on each of them for one byte of the vector, of flows that stay in a host
    between: NDArray[np.float64]  # the same of flows from host to host
    latency_s: float
    number: NDArray[np.int64]  # of flows on each of the links


class StageMessages(NamedTuple):
    """What messages from a rank of a pipeline to another, and back, do to the links."""

    there: tuple[LinkSeconds, ...]  # for each byte that a member of the stage sends
    back: tuple[LinkSeconds, ...]
    latency_s: float
    beside: tuple[Ways, ...] = ()  # the same of every other pipeline, where they are told apart


class LinkMeeting(NamedTuple):
    """What is left to messages of a pipeline and to a stage's collectives while both are under way."""

    message: float = 1.0  # part of the rate that a message has alone
    collective: float = 1.0  # the same of a collective


class StepLoads(NamedTuple):
    """The steps of a schedule, and what each of them does to the links."""

    flows: list[tuple[float, list[StageFlows]]]  # how often there is a step, and its flows by stage
    number: float  # of steps
    wire: float  # what the busiest port of each step passes, summed, in units of the vector


class Contention:
    """The first ranks of a cluster, and what their groups do to its links."""

    def __init__(self, cluster: Cluster, workers: int) -> None:
        self._cluster, self._nodes = cluster, cluster.ranks[:workers]
        self._local = min(cluster.ranks_per_host(), workers)
        self._unlike = not _alike(cluster)
        self._steps = functools.lru_cache(maxsize=1024)(self._steps_of)
        self.astray = functools.lru_cache(maxsize=1024)(self._astray)
        self.hops = functools.lru_cache(maxsize=1024)(self._hops)
        self.messages = functools.lru_cache(maxsize=1024)(self._messages)
        self.meeting = functools.lru_cache(maxsize=4096)(self._meeting)

    @functools.cached_property
    def faster_inside(self) -> float:
        """How many times faster two ranks of the first host are joined than two others, in rate or latency."""
        ranks = self._nodes[: self._local]
        source, target = (each.ravel() for each in np.meshgrid(ranks, ranks))
        routes = self._cluster.routes(source[source != target], target[source != target])
        if not len(routes.links):
            return 1.0
        rates = np.minimum.reduceat(self._cluster.capacity_Bps[routes.links], routes.offsets[:-1])
        late = np.add.reduceat(self._cluster.latency_s[routes.links], routes.offsets[:-1])
        return float(max(rates.max() / rates.min(), late.max() / late.min() if late.min() else 1.0))

    def rates(
        self,
        algorithm: Algorithm,
        given: tuple[tuple[str, Any], ...],
        collective: Collective,
        stride: int,
        shares: tuple[float, float],
        form: ClosedForm,
        beside: tuple[int, tuple[float, ...]] | None = None,
    ) -> tuple[float, float]:
        """Return the latency of a collective, and what it takes for each byte of the vector.

        All groups of the shape talk at once, each from member to member over `stride` ranks; flows inside hosts and
        between them reach `shares` of their links, and `form` says how many steps and bytes there are. `beside` is the
        stage whose groups are meant, and of every stage how much of the time its groups talk, too; all groups, and all
        of the time, if it is not given.
        """
        steps, number, wire = self._steps(algorithm, given, collective, stride)
        loads = [(times, _load(flows, shares, beside)) for times, flows in steps]
        late = sum(times * one.latency_s for times, one in loads)
        bytewise = sum(times * one.seconds for times, one in loads)
        return late * form.steps / number, bytewise * float(form.wire) / wire

    def uneven(self, size: int, stride: int) -> bool:
        """Return whether groups of this shape lie on hosts or switches in different ways, or have unlike links."""
        block, local = size * stride, self._local
        if len(self._nodes) <= local or not local % block:  # inside hosts
            return self._unlike or (self.faster_inside > 1 and not self._cluster.reached)
        return self._unlike or any(
            block % near and near % block or (stride < near and near % stride and near % block)
            for near in (local, *self._near)
        )

    @functools.cached_property
    def _near(self) -> list[int]:
        """How many ranks, one after the other, are at one switch, under the switches above it, and so on."""
        ranks = self._nodes[self._local :]
        hops = np.diff(self._cluster.routes(np.full_like(ranks, self._nodes[0]), ranks).offsets)
        farther = np.flatnonzero(np.diff(hops)) + 1
        return (self._local + farther).tolist() if (np.diff(hops) >= 0).all() else []

    def _astray(
        self,
        algorithm: Algorithm,
        given: tuple[tuple[str, Any], ...],
        collective: Collective,
        stride: int,
        form: ClosedForm,
        beside: tuple[int, tuple[float, ...]] | None = None,
    ) -> tuple[float, float, float]:
        """Return how many times as long as `rates` says latency and bytes take where nobody waits for a step's end.

        Ranks whose links have little latency catch up while others' bytes take long, so that both together take less
        than their sum. The third number is p of (latency^p + bytes^p)^(1/p), by what they take where they are equal.
        Who talks `beside` for a part of the time has that part of the bytes.
        """
        schedule, size, world = algorithm(collective, **dict(given)), collective.world, len(self._nodes)
        if not self._unlike and not self._local % (size * stride):
            world = self._local  # one host tells it of all
        if schedule.transfer_count * (world // size) > _MOST_TRANSFERS:
            return 1.0, 1.0, 1.0
        groups = np.arange(world).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
        late, each = self.rates(algorithm, given, collective, stride, (1.0, 1.0), form, beside)
        own, parts = beside if beside and world == len(self._nodes) else (None, (1.0,) * len(groups))
        known: LoweredCollectives = {}

        def played(nbytes: float) -> float:
            graph, ends = StepGraph(world), list[int]()
            for number, ranks in enumerate(groups):
                if part := parts[number // stride]:
                    work = graph.collective(schedule, part * nbytes, ranks=ranks)
                    ends += work.nodes.tolist() if own in (None, number // stride) else []
            return float(simulate_step(graph, self._cluster, known=known).end_s[ends].max())

        latency_s, large_s = played(0.0), played(_LARGE_NBYTES)
        factors = latency_s / late if late else 1.0, large_s / (_LARGE_NBYTES * each) if each else 1.0
        if not latency_s or not large_s:
            return *factors, 1.0
        doubled = math.log2(max(1.0, played(_LARGE_NBYTES * latency_s / large_s) / latency_s))
        return *factors, 1 / min(1.0, max(doubled, 1 / _STEEPEST))

    def _steps_of(
        self, algorithm: Algorithm, given: tuple[tuple[str, Any], ...], collective: Collective, stride: int
    ) -> StepLoads:
        schedule, size = algorithm(collective, **dict(given)), collective.world
        stages = np.arange(len(self._nodes)).reshape(-1, size, stride).swapaxes(1, 2)
        wire, parts, ends, steps = 0.0, [], [], schedule.steps
        for step in steps:
            part = (step.stop - step.start) / schedule.vector_chunks
            wire += step.repeat * max(float(np.bincount(end, part).max()) for end in (step.source, step.destination))
            parts.append(np.tile(part, len(stages) * stride))
            ends.append([stages[:, :, end].ravel() for end in (step.source, step.destination)])
        rows = np.arange(len(steps) * len(stages)).repeat(
            np.repeat([len(one) // len(stages) for one in parts], len(stages))
        )
        source, target = np.concatenate(ends, axis=1)
        flows = self._flows(source, target, np.concatenate(parts), rows)
        each = [flows[at : at + len(stages)] for at in range(0, len(flows), len(stages))]
        times = [float(step.repeat) for step in steps]
        return StepLoads(list(zip(times, each, strict=True)), sum(times), wire)

    def _flows(
        self, source: NDArray[Any], target: NDArray[Any], part: NDArray[np.float64], row: NDArray[Any]
    ) -> list[StageFlows]:
        """Return what flows put on links, each row of them for itself; `part` is of the vector, and rows rise."""
        cluster, rows = self._cluster, int(row[-1]) + 1
        routes = cluster.routes(self._nodes[source], self._nodes[target])
        flow = np.repeat(np.arange(source.size), np.diff(routes.offsets))
        late = np.bincount(flow, cluster.latency_s[routes.links], source.size)
        late = np.maximum.reduceat(late, np.searchsorted(row, np.arange(rows)))
        count = len(cluster.capacity_Bps)
        keys, which = np.unique(row[flow] * count + routes.links, return_inverse=True)
        hosts = cluster.hosts[self._nodes]
        crosses = (hosts[source] != hosts[target])[flow]
        nbytes = part[flow]
        inside, between = (
            np.bincount(which, nbytes * kind, len(keys)) / cluster.capacity_Bps[keys % count]
            for kind in (~crosses, crosses)
        )
        number = np.bincount(which, minlength=len(keys))
        bounds = np.searchsorted(keys, np.arange(rows + 1) * count)
        return [
            StageFlows(keys[a:b] % count, inside[a:b], between[a:b], float(latency_s), number[a:b])
            for a, b, latency_s in zip(bounds[:-1], bounds[1:], late, strict=True)
        ]

    def _hops(self, stride: int, pairs: tuple[tuple[int, int], ...], shares: tuple[float, float]) -> list[Load]:
        """Return what each of these groups of ranks does that sends to the other one at once."""
        source, target = _members(stride, pairs)
        flows = self._flows(source, target, np.ones(len(source)), np.arange(len(source)) // stride)
        return [_load([one], shares, None) for one in flows]

    def _meeting(
        self,
        algorithm: Algorithm,
        given: tuple[tuple[str, Any], ...],
        collective: Collective,
        stride: int,
        here: int,
        there: int,
        ranks: int,
        at: int,
        shares: tuple[float, float],
    ) -> LinkMeeting:
        """Return what is left of a message and of a collective that meet.

        A rank of the pipeline stands for so many `ranks`, all of which send from `here` to `there`, while all groups of
        `at` do the collective, each from member to member over `stride` ranks. Flows share links evenly (max-min fair):
        who wants less of a link than its part leaves the rest to the other.
        """
        source, target = (np.arange(ranks) + stage * ranks for stage in (here, there))
        (sent,) = self._flows(source, target, np.ones(ranks), np.zeros(ranks, dtype=np.int64))
        wanted = sent.inside / shares[0] + sent.between / shares[1]
        wanted = wanted / wanted.max(initial=1e-300)
        groups = ranks // (stride * collective.world)
        took_s = longer_s = messages = 0.0
        for times, flows in self._steps(algorithm, given, collective, stride).flows:
            own = flows[at * groups : (at + 1) * groups]
            links, which = np.unique(np.concatenate([one.links for one in own]), return_inverse=True)
            each = np.concatenate([one.inside / shares[0] + one.between / shares[1] for one in own])
            spent = np.bincount(which, each)
            number = np.bincount(which, np.concatenate([one.number for one in own]))
            step_s = times * spent.max(initial=0.0)
            if not step_s:
                continue
            _, mine, others = np.intersect1d(links, sent.links, assume_unique=True, return_indices=True)
            left = _shared(wanted[others], sent.number[others], times * spent[mine] / step_s, number[mine])
            took_s += step_s
            longer_s += step_s / left.collective
            messages += step_s / left.collective * left.message
        return LinkMeeting(float(messages / longer_s), float(took_s / longer_s)) if took_s else LinkMeeting()

    def _messages(
        self,
        stride: int,
        pairs: tuple[tuple[int, int], ...],
        together: int,
        apart: bool,
        shares: tuple[float, float],
    ) -> list[StageMessages]:
        """Return what the messages of a pipeline do to the links, between each of these pairs of its ranks and back.

        A stage has `stride` ranks, of which `together` beside each other wait for each other's messages. Those that
        wait for each other are a pipeline, and pipelines do not: where some pass busier links than others, they do not
        stay in step, and `apart` asks for what each of them does. Else all send at once, and the one counts whose links
        are the busiest.
        """
        pipelines, count = stride // together, len(pairs)
        ranks, onward = _members(stride, pairs)
        source, target = np.concatenate([ranks, onward]), np.concatenate([onward, ranks])
        flows = self._flows(source, target, np.ones(len(source)), np.arange(len(source)) // together)
        links, which = np.unique(np.concatenate([one.links for one in flows]), return_inverse=True)
        told = np.zeros((len(links), len(flows)))
        column = np.repeat(np.arange(len(flows)), [len(one.links) for one in flows])
        told[which, column] = np.concatenate([one.inside / shares[0] + one.between / shares[1] for one in flows])
        spent: NDArray[np.float64] = told.reshape(len(links), -1, pipelines)  # of every link, message and pipeline
        together_s = spent.sum(axis=2)
        most_s: NDArray[np.float64] = np.where(spent > 0, together_s[:, :, None], 0.0).max(axis=0)
        longest = most_s.reshape(2, -1, pipelines)
        slowest = int(longest.sum(axis=(0, 1)).argmax())
        apart = apart and not np.allclose(longest, longest[:, :, :1], atol=0)
        own: NDArray[np.float64] = spent if apart else together_s[(spent[:, :, slowest] > 0).any(axis=1)][:, :, None]
        kept: list[NDArray[np.float64]] = []
        for row in sorted(np.unique(own.reshape(len(own), -1), axis=0), key=lambda row: -float(row.sum())):
            # A link on which every message spends no longer than on another one holds nobody back.
            if not any((row <= more * (1 + 1e-9)).all() for more in kept):
                kept.append(row)
        rows = np.array(kept).reshape(len(kept), *own.shape[1:])
        # Nor are the ways of the latest pipeline the latest of all at every hop.
        late = np.array([one.latency_s for one in flows]).reshape(2, -1, pipelines).mean(axis=0)
        latest = int(late.sum(axis=0).argmax())

        def path(message: int, pipeline: int) -> tuple[LinkSeconds, ...]:
            return tuple((link, float(each)) for link, each in enumerate(rows[:, message, pipeline].tolist()) if each)

        found = []
        for pair in range(count):
            ways = [(path(pair, one), path(pair + count, one)) for one in range(own.shape[2])]
            found.append(StageMessages(*ways[0], float(late[pair, latest]), tuple(ways[1:])))
        return found


def _shared(
    messages: NDArray[np.float64], flows: NDArray[Any], collectives: NDArray[np.float64], others: NDArray[Any]
) -> LinkMeeting:
    """Return what two kinds of flows have of their rates that want such parts of some links, each so many flows."""
    part = flows / (flows + others)
    left = np.maximum(1 - collectives, part) / np.maximum(messages, 1e-12)
    right = np.maximum(1 - messages, 1 - part) / np.maximum(collectives, 1e-12)
    return LinkMeeting(float(left.min(initial=1.0)), float(right.min(initial=1.0)))


def _members(stride: int, pairs: tuple[tuple[int, int], ...]) -> NDArray[np.int64]:
    """Return the ranks of the first groups of these pairs, and those of the second ones."""
    first = np.array(pairs).T[:, :, None] * stride + np.arange(stride)
    return first.reshape(2, -1)


def marks(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return a number for each row, the same for equal rows; sums of them tell multisets of rows apart."""
    rows = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:  # one after the other: to sort whole rows takes ten times as long
        values, seen = np.unique(column, return_inverse=True)
        rows = np.unique(rows * len(values) + seen, return_inverse=True)[1]
    return np.random.default_rng(0).integers(2**62, size=len(rows))[rows]


def _alike(cluster: Cluster) -> bool:
    """Return whether links have the same rates from every rank on, however far one looks (colour refinement)."""
    colours, count = np.isin(np.arange(len(cluster.hosts)), cluster.ranks).astype(np.int64), 0
    while count < (count := int(colours.max()) + 1):
        met = np.zeros_like(colours)
        np.add.at(met, cluster.link_tail, marks(cluster.capacity_Bps, colours[cluster.link_head]))
        colours = np.unique(np.stack([colours, met], axis=1), axis=0, return_inverse=True)[1].ravel()
    return len(set(colours[cluster.ranks].tolist())) == 1


def _load(flows: list[StageFlows], shares: tuple[float, float], beside: tuple[int, tuple[float, ...]] | None) -> Load:
    links, which = np.unique(np.concatenate([one.links for one in flows]), return_inverse=True)
    stage = np.repeat(np.arange(len(flows)), [len(one.links) for one in flows])
    each = np.concatenate([one.inside / shares[0] + one.between / shares[1] for one in flows])
    if not beside:
        return Load(float(np.bincount(which, each).max(initial=0.0)), max(one.latency_s for one in flows))
    spent = np.bincount(stage * len(links) + which, each, len(flows) * len(links)).reshape(len(flows), len(links))
    own = flows[beside[0]]
    # Who talks for less of the time does while the others do; at each level of these parts another link may be busiest.
    levels, parts = np.unique(beside[1]), np.array(beside[1])
    talk = (parts >= levels[:, None]).astype(float)
    busiest = (talk @ spent[:, np.searchsorted(links, own.links)]).max(axis=1, initial=0.0)
    return Load(float(np.diff(levels, prepend=0.0) @ busiest), own.latency_s)
