"""Messages between nodes of a cluster as tasks' columns: latency, links, weights and limits under some settings."""

from dataclasses import dataclass

import numpy as np

from hocket.cluster import Cluster, Routes

from ._fair import Floats, Indices, Usage, weighted_count
from ._settings import Settings


@dataclass(frozen=True, eq=False)
class Messages:
    """What some messages cost, in the order in which they were asked for."""

    delay_s: Floats  # float64, before the first byte
    usage: Usage  # the links; numbers are those of `Wires.capacity_Bps`
    weight: Floats  # float64
    limit_Bps: Floats  # float64
    latency_s: Floats  # float64, of the paths alone


class Wires:
    """The links of a cluster under some settings."""

    def __init__(self, cluster: Cluster, settings: Settings, seed: int) -> None:
        self.cluster, self.settings, self.seed = cluster, settings, seed
        self.capacity_Bps: Floats = cluster.capacity_Bps * settings.bandwidth_factor
        self.medium: Indices = np.arange(len(cluster.link_tail))
        if settings.half_duplex:
            self.medium = _cables(cluster)

    def messages(self, source: Indices, destination: Indices, nbytes: Floats) -> Messages:
        """Messages between nodes, by index; equal pairs are looked up once."""
        settings, cluster = self.settings, self.cluster
        key = source * len(cluster) + destination
        pairs, which = np.unique(key, return_inverse=True)
        start, end = pairs // len(cluster), pairs % len(cluster)
        there = cluster.routes(start, end, seed=self.seed)
        latency = segment_sum(cluster.latency_s[there.links], there.offsets)
        usage = Usage(there.offsets, there.links, np.ones(len(there.links)))
        if settings.cross_traffic or settings.half_duplex:
            usage = self._both_ways(there, start, end)
        weight = np.ones(len(pairs))
        if settings.weigh_by_latency:
            penalty = latency.copy()
            if settings.weight_nbytes:
                penalty += segment_sum(settings.weight_nbytes / cluster.capacity_Bps[there.links], there.offsets)
            weight = np.where(penalty > 0, 1 / np.where(penalty > 0, penalty, 1.0), 1.0)
        delay = latency * settings.latency_factor
        limit = np.full(len(pairs), np.inf)
        if settings.window_nbytes:
            limit = np.where(delay > 0, settings.window_nbytes / np.where(delay > 0, 2 * delay, 1.0), np.inf)
        extra, part = self._protocol(nbytes)
        limits = limit[which]
        if (part < 1).any():
            narrow = segment_min(self.capacity_Bps[there.links], there.offsets)
            limits = np.minimum(limits, np.where(part < 1, part * narrow[which], np.inf))
        return Messages(delay[which] + extra, usage.take(which), weight[which], limits, latency[which])

    def _both_ways(self, there: Routes, start: Indices, end: Indices) -> Usage:
        """Usage of the media: the paths, and what acknowledgements take of the paths back."""
        rows, count = len(there), len(self.cluster.link_tail)
        owner, links = np.repeat(np.arange(rows), there.hops), there.links
        share = np.ones(len(links))
        if self.settings.cross_traffic:
            back = self.cluster.routes(end, start, seed=self.seed)
            owner = np.concatenate([owner, np.repeat(np.arange(rows), back.hops)])
            share = np.concatenate([share, np.full(len(back.links), self.settings.cross_traffic)])
            links = np.concatenate([links, back.links])
        return gather(owner, self.medium[links], share, rows, count)

    def _protocol(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """Return what the settings add to every message's delay, and the part of the bandwidth that it reaches."""
        extra, part = np.full(len(nbytes), self.settings.overhead_s), np.ones(len(nbytes))
        if self.settings.protocols:
            sizes = np.array([protocol.up_to_nbytes for protocol in self.settings.protocols])
            latency = np.array([protocol.latency_s for protocol in self.settings.protocols] + [0.0])
            width = np.array([protocol.bandwidth for protocol in self.settings.protocols] + [1.0])
            taken = np.searchsorted(sizes, nbytes, side="left")
            extra, part = extra + latency[taken], width[taken]
        return extra, part


def gather(owner: Indices, links: Indices, share: Floats, rows: int, count: int) -> Usage:
    """Usage with every link once per row, shares of the same link added; in the order of rows, then of links."""
    key, where = np.unique(owner * count + links, return_inverse=True)
    offsets = np.searchsorted(key // count, np.arange(rows + 1)) if count else np.zeros(rows + 1, dtype=np.int64)
    return Usage(offsets, key % count if count else key, weighted_count(where, share, len(key)))


def segment_sum(values: Floats, offsets: Indices) -> Floats:
    """Sum of every row; 0 of an empty one."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return weighted_count(rows, values, len(offsets) - 1)


def segment_min(values: Floats, offsets: Indices) -> Floats:
    """Least of every row; infinite of an empty one."""
    result = np.full(len(offsets) - 1, np.inf)
    rows = np.flatnonzero(np.diff(offsets))
    if len(rows):
        result[rows] = np.minimum.reduceat(values, offsets[rows])
    return result


def _cables(cluster: Cluster) -> Indices:
    """Of every directed link the first of the two that make its cable: the k-th from a to b and the k-th back."""
    low, high = np.minimum(cluster.link_tail, cluster.link_head), np.maximum(cluster.link_tail, cluster.link_head)
    seen: dict[tuple[int, int, bool], int] = {}
    cable: dict[tuple[int, int, int], int] = {}
    result = np.arange(len(low))
    for link, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        forth = bool(cluster.link_tail[link] == a)
        turn = seen[a, b, forth] = seen.get((a, b, forth), -1) + 1
        result[link] = cable.setdefault((a, b, turn), link)
    return result
