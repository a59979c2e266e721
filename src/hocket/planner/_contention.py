"""What algorithms reach on a cluster's own routes, where all groups of a shape talk at once.

Hashed paths meet, levels are tapered, devices share a root complex. The schedule's steps are taken one after the other;
in each the link with the most bytes for its rate says how long it takes. Rates and latencies of `Network` are those of
two hosts; these are those of the links that a group really uses.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.algorithms import Algorithm, ClosedForm
from hocket.cluster import Cluster
from hocket.schedule import Collective

MOST_RANKS = 128
"""Up to so many the routes are looked at: some milliseconds for each shape of a group."""


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


class StepLoads(NamedTuple):
    """The steps of a schedule, and what each of them does to the links."""

    flows: list[tuple[float, list[StageFlows]]]  # how often there is a step, and its flows by stage
    number: float  # of steps
    wire: float  # what the busiest port of each step passes, summed, in units of the vector


class Contention:
    """The first ranks of a cluster, and what their groups do to its links.

    Args:
        cluster: With its routes.
        workers: How many of its ranks take part.
    """

    def __init__(self, cluster: Cluster, workers: int) -> None:
        self._cluster, self._nodes = cluster, cluster.ranks[:workers]
        self._steps = functools.lru_cache(maxsize=1024)(self._steps_of)
        self._loads = functools.lru_cache(maxsize=8192)(self._loads_of)
        self.hop = functools.lru_cache(maxsize=4096)(self._hop)

    def seconds(
        self,
        algorithm: Algorithm,
        given: tuple[tuple[str, Any], ...],
        form: ClosedForm,
        collective: Collective,
        stride: int,
        shares: tuple[float, float],
        beside: tuple[int, tuple[float, ...]] | None = None,
    ) -> tuple[float, float]:
        """Return the latency of a collective, and what it takes for each byte of the vector.

        Args:
            algorithm: Which.
            given: Its parameters.
            form: Its closed form, which says how many steps and how many bytes there are.
            collective: Of a group; all groups of the shape talk at once.
            stride: From each member to the next.
            shares: What flows inside hosts reach of their links, and those between hosts.
            beside: The stage whose groups are meant, and of every stage how much of the time its groups talk, too; all
                groups, and all of the time, if it is not given.
        """
        loads = self._loads(algorithm, given, collective, stride, shares, beside)
        _, number, wire = self._steps(algorithm, given, collective, stride)
        late = sum(times * one.latency_s for times, one in loads)
        bytewise = sum(times * one.seconds for times, one in loads)
        return late * form.steps / number, bytewise * float(form.wire) / wire

    def _loads_of(
        self,
        algorithm: Algorithm,
        given: tuple[tuple[str, Any], ...],
        collective: Collective,
        stride: int,
        shares: tuple[float, float],
        beside: tuple[int, tuple[float, ...]] | None,
    ) -> list[tuple[float, Load]]:
        steps = self._steps(algorithm, given, collective, stride).flows
        return [(times, _load(flows, shares, beside)) for times, flows in steps]

    def _steps_of(
        self, algorithm: Algorithm, given: tuple[tuple[str, Any], ...], collective: Collective, stride: int
    ) -> StepLoads:
        schedule, size = algorithm(collective, **dict(given)), collective.world
        stages = np.arange(len(self._nodes)).reshape(-1, size, stride).swapaxes(1, 2)
        vector = schedule.chunks // collective.blocks * collective.vector_blocks
        found, wire = [], 0.0
        for step in schedule.steps:
            part = (step.stop - step.start) / vector
            wire += step.repeat * max(float(np.bincount(end, part).max()) for end in (step.source, step.destination))
            source, target = (stages[:, :, end].reshape(len(stages), -1) for end in (step.source, step.destination))
            flows = self._flows(source, target, np.tile(part, stride))
            found.append((float(step.repeat), flows))
        return StepLoads(found, sum(times for times, _ in found), wire)

    def _flows(self, source: NDArray[Any], target: NDArray[Any], part: NDArray[np.float64]) -> list[StageFlows]:
        """Return what flows put on links, each row of them for itself; `part` is of the vector."""
        cluster, rows = self._cluster, len(source)
        routes = cluster.routes(self._nodes[source.ravel()], self._nodes[target.ravel()])
        flow = np.repeat(np.arange(source.size), np.diff(routes.offsets))
        late = np.bincount(flow, cluster.latency_s[routes.links], source.size).reshape(rows, -1).max(axis=1)
        count = len(cluster.capacity_Bps)
        keys, which = np.unique(flow // source.shape[1] * count + routes.links, return_inverse=True)
        hosts = cluster.hosts[self._nodes]
        crosses = (hosts[source.ravel()] != hosts[target.ravel()])[flow]
        nbytes = part[flow % source.shape[1]]
        inside, between = (
            np.bincount(which, nbytes * kind, len(keys)) / cluster.capacity_Bps[keys % count]
            for kind in (~crosses, crosses)
        )
        bounds = np.searchsorted(keys, np.arange(rows + 1) * count)
        return [
            StageFlows(keys[a:b] % count, inside[a:b], between[a:b], float(latency_s))
            for a, b, latency_s in zip(bounds[:-1], bounds[1:], late, strict=True)
        ]

    def _hop(self, first: int, stride: int, shares: tuple[float, float]) -> Load:
        """Return what a stage of a pipeline, so many ranks from the first on, does that sends to the next at once."""
        source = first + np.arange(stride)[None]
        return _load(self._flows(source, (source + stride) % len(self._nodes), np.ones(stride)), shares, None)


def _load(flows: list[StageFlows], shares: tuple[float, float], beside: tuple[int, tuple[float, ...]] | None) -> Load:
    links = np.concatenate([one.links for one in flows])
    weights = np.repeat(beside[1] if beside else np.ones(len(flows)), [len(one.links) for one in flows])
    each = np.concatenate([one.inside / shares[0] + one.between / shares[1] for one in flows])
    links, which = np.unique(links, return_inverse=True)
    seconds = np.bincount(which, weights * each, len(links))
    if beside:
        seconds = seconds[np.searchsorted(links, flows[beside[0]].links)]
    latency_s = flows[beside[0]].latency_s if beside else max(one.latency_s for one in flows)
    return Load(float(seconds.max(initial=0.0)), latency_s)
