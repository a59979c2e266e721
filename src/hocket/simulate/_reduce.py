"""Reduction inside switches: the transfers that meet in switches are one stream through a tree.

A switch passes on what its children have sent while they still send. So all transfers of one range of chunks that meet
in switches move together, at one rate, over all their links: latency is that of the longest way through them, and the
rate is the least of

- the links' fair shares, and
- for a streaming tree (SHARP's SAT) the switches' efficiency times the bandwidth of the links, about 95% of it, or
- for a low-latency tree (LLT) W outstanding operations of P bytes per round trip through the tree.

Where switches can do both, the faster one is taken. Source: the SHARP papers (COMHPC 2016, ISC 2020) as restated in the
project's facts, algorithms 2.8 and 2.9.
"""

from dataclasses import dataclass

import numpy as np

from hocket.cluster import Cluster, Reduction
from hocket.schedule import Schedule

from ._fair import Floats, Indices, Usage
from ._network import Wires, gather
from ._tasks import SimulationError


@dataclass(frozen=True, eq=False)
class Fused:
    """Streams through switches, the first tasks of a lowered schedule."""

    # int64, of every transfer, repetitions written out, its stream, or -1 where no switch takes part
    task_of_row: Indices
    delay_s: Floats  # float64 per stream
    nbytes: Floats  # float64: what crosses each of its links once; whole payloads where the tree is a low-latency one
    limit_Bps: Floats  # float64
    usage: Usage  # links, with a share of 2 where a stream crosses one twice

    def __len__(self) -> int:
        return len(self.delay_s)


def fuse(schedule: Schedule, nodes: Indices, wires: Wires, chunk_nbytes: float) -> Fused:
    """Return the streams of a schedule.

    Raises:
        SimulationError: if a switch of it cannot reduce, or transfers that meet in one are of different chunks.
    """
    capabilities = _capabilities(schedule, nodes, wires.cluster)
    columns = schedule.columns()
    step, source, destination, start, stop = (np.asarray(column, dtype=np.int64) for column in columns[:5])
    rows = np.flatnonzero((source >= schedule.world) | (destination >= schedule.world))
    task_of_row = np.full(len(source), -1, dtype=np.int64)
    source, destination, start, stop, step = (column[rows] for column in (source, destination, start, stop, step))
    _same_ranges(schedule, start, stop)
    # A place is a switch and a range of chunks; a transfer from switch to switch joins two.
    chunks = schedule.chunks
    at = [np.where(end >= schedule.world, end * chunks + start, -1) for end in (source, destination)]
    places = np.unique(np.concatenate(at))
    places = places[places >= 0]
    first = np.searchsorted(places, np.where(at[0] >= 0, at[0], at[1]))
    second = np.searchsorted(places, np.where(at[1] >= 0, at[1], at[0]))
    from scipy.sparse import coo_array  # lazy: half a second
    from scipy.sparse.csgraph import connected_components

    joined = coo_array((np.ones(len(rows)), (first, second)), shape=(len(places), len(places)))
    count, label = connected_components(joined, directed=False)
    stream = label[first].astype(np.int64)
    task_of_row[rows] = stream
    size = np.zeros(count)
    size[stream] = (stop - start) * chunk_nbytes
    messages = wires.messages(nodes[source], nodes[destination], np.zeros(len(rows)))
    # A switch posts nothing: what the settings add to a message is the sending rank's.
    way = np.where(source < schedule.world, messages.delay_s, messages.latency_s * wires.settings.latency_factor)
    reducing = np.array([0.0] * schedule.world + [able.delay_s for able in capabilities])[destination]
    way += np.where(np.asarray(columns.reduce)[rows], reducing, 0.0)
    delay = _longest(schedule.endpoints, stream, step, source, destination, way, count)
    hops = np.diff(messages.usage.offsets)
    usage = gather(np.repeat(stream, hops), messages.usage.links, messages.usage.shares, count, len(wires.capacity_Bps))
    width = np.minimum.reduceat(wires.capacity_Bps[usage.links] / usage.shares, usage.offsets[:-1])
    able = _weakest(schedule, capabilities, stream, source, destination, count)
    nbytes, limit = _mode(able, delay, size, width)
    return Fused(task_of_row, delay, nbytes, limit, usage)


def _capabilities(schedule: Schedule, nodes: Indices, cluster: Cluster) -> list[Reduction]:
    found = []
    for name, node in zip(schedule.switches, nodes[schedule.world :].tolist(), strict=True):
        if node not in cluster.reductions:
            raise SimulationError(
                f"{schedule.name} reduces in {name}, which cannot in {cluster.name}; give the switch a `reduction`"
            )
        found.append(cluster.reductions[node])
    return found


def _same_ranges(schedule: Schedule, start: Indices, stop: Indices) -> None:
    """Refuse ranges that overlap without being equal: their streams would have to be cut."""
    ranges = np.unique(np.stack([start, stop], axis=1), axis=0)
    if len(ranges) and (ranges[1:, 0] < ranges[:-1, 1]).any():
        row = int(np.flatnonzero(ranges[1:, 0] < ranges[:-1, 1])[0])
        a, b = ranges[row], ranges[row + 1]
        raise SimulationError(
            f"{schedule.name}: chunks {a[0]}:{a[1]} and {b[0]}:{b[1]} overlap in switches; use equal or disjoint ranges"
        )


def _longest(
    ends: int, stream: Indices, step: Indices, source: Indices, destination: Indices, way_s: Floats, count: int
) -> Floats:
    """Return the latency of the longest way through every stream, step by step."""
    key = np.unique(np.concatenate([stream * ends + source, stream * ends + destination]))
    tail, head = np.searchsorted(key, stream * ends + source), np.searchsorted(key, stream * ends + destination)
    at = np.zeros(len(key))
    order = np.argsort(step, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(step[order])) + 1):
        np.maximum.at(at, head[rows], at[tail[rows]] + way_s[rows])
    longest = np.zeros(count)
    np.maximum.at(longest, key // ends, at)
    return longest


def _weakest(
    schedule: Schedule,
    capabilities: list[Reduction],
    stream: Indices,
    source: Indices,
    destination: Indices,
    count: int,
) -> list[tuple[float, float, float]]:
    """Of every stream what its weakest switch allows: (W x P, P, efficiency), 0 for a mode that one lacks."""
    window = np.array([able.outstanding * able.payload * able.low_latency for able in capabilities], dtype=float)
    payload = np.array([able.payload for able in capabilities], dtype=float)
    streaming = np.array([able.efficiency * able.streaming for able in capabilities])
    result = np.full((count, 3), np.inf)
    for end in (source, destination):
        rows = np.flatnonzero(end >= schedule.world)
        switch = end[rows] - schedule.world
        for column, value in enumerate((window, payload, streaming)):
            np.minimum.at(result[:, column], stream[rows], value[switch])
    return [(float(row[0]), float(row[1]), float(row[2])) for row in result]


def _mode(able: list[tuple[float, float, float]], delay: Floats, size: Floats, width: Floats) -> tuple[Floats, Floats]:
    """Bytes and rate limit of every stream in its faster mode."""
    nbytes, limit = size.copy(), np.zeros(len(size))
    for index, (window, payload, efficiency) in enumerate(able):
        modes = []
        if efficiency:
            modes.append((size[index] / (efficiency * width[index]), size[index], efficiency * width[index]))
        if window:
            whole = np.ceil(size[index] / payload) * payload
            rate = min(window / delay[index] if delay[index] else np.inf, width[index])
            modes.append((whole / rate, whole, rate))
        if not modes:
            raise SimulationError("a switch neither streams nor has low-latency trees; set one in its `reduction`")
        _, nbytes[index], limit[index] = min(modes)
    return nbytes, limit
