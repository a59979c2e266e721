"""A cluster from what was measured on the ranks of a job: their hosts, and messages between pairs of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._cluster import Cluster
from ._errors import ClusterError
from ._graph_builder import GraphBuilder

Floats = NDArray[np.float64]
_UNLIKE = 1.5  # times as fast as others is a host that is not one of them: measurements of like ones vary, too


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """What one rank found out about itself.

    Attributes:
        host: Name of its host.
        memory_Bps: How fast it reads or writes its memory.
        memory_nbytes: How much there is for it.
        flops: Floating-point operations per second of a matrix product.
    """

    host: str
    memory_Bps: float
    memory_nbytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class PingFit:
    """Messages one way between two ranks: they take `latency_s` plus their bytes by `rate_Bps`."""

    latency_s: float
    rate_Bps: float


def fit_ping(seconds: Mapping[int, float]) -> PingFit:
    """Return the line through measured times.

    The latency is the time of the smallest message. The rate is the slope by least squares through that point, with
    weights that make relative errors count alike, so that neither end of the sizes rules.

    Args:
        seconds: One-way time by bytes; two sizes or more.

    Raises:
        ClusterError: if there are fewer sizes, or larger messages took no longer.
    """
    sizes = np.array(sorted(seconds), dtype=np.float64)
    times = np.array([seconds[int(size)] for size in sizes])
    if len(sizes) < 2:
        raise ClusterError(f"one-way times of {len(sizes)} sizes make no line; measure two or more")
    extra, bytes_more, weight = times[1:] - times[0], sizes[1:] - sizes[0], 1 / times[1:] ** 2
    slope = float((weight * extra * bytes_more).sum() / (weight * bytes_more**2).sum())
    if slope <= 0:
        raise ClusterError(f"messages of {int(sizes[-1])} bytes took no longer than of {int(sizes[0])}; measure again")
    return PingFit(float(times[0]), 1 / slope)


def from_measurements(name: str, ranks: Sequence[MeasuredRank], pings: Mapping[tuple[int, int], PingFit]) -> Cluster:
    """Return the cluster that explains the measurements: ranks around their host's memory, hosts around one switch.

    Ways between ranks are medians over the pairs of a host, and over the pairs of different hosts; the port of a host
    gets what the way between hosts takes beyond that within one. A host all of whose messages are 1.5
    times slower or faster than those of others has a port of its own. Which switches and cables there are cannot be
    seen from two ranks at a time; where hosts share something beyond one switch, describe it by hand.

    Args:
        name: Name of the cluster.
        ranks: Ranks in order.
        pings: Measured lines by (rank, rank); not every pair needs to be there.

    Raises:
        ClusterError: if there are no ranks, or no pair of two hosts where there are several.
    """
    if not ranks:
        raise ClusterError("a cluster of no ranks cannot be described; measure on one or more")
    inside = [ping for (a, b), ping in pings.items() if ranks[a].host == ranks[b].host]
    across = [ping for (a, b), ping in pings.items() if ranks[a].host != ranks[b].host]
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    if len(hosts) > 1 and not across:
        raise ClusterError(f"no message between the {len(hosts)} hosts was measured; measure a pair of two hosts")
    # Without a pair within a host a rank's memory is as far as it can be told.
    near = _median(inside) if inside else PingFit(0.0, float(np.median([rank.memory_Bps for rank in ranks])))
    layout = GraphBuilder()
    centres = {host: layout.node(host, "memory", host=host) for host in hosts}
    counts = dict.fromkeys(hosts, 0)
    for rank in ranks:
        node = layout.node(
            f"{rank.host}.rank{counts[rank.host]}",
            "device",
            host=rank.host,
            rates={"flops": rank.flops},
            memory_Bps=rank.memory_Bps,
            memory_nbytes=rank.memory_nbytes,
        )
        counts[rank.host] += 1
        layout.link(node, centres[rank.host], near.rate_Bps, near.latency_s / 2)
        layout.ranks.append(node)
    if len(hosts) > 1:
        ports = _ports([rank.host for rank in ranks], pings)
        switch = layout.node("switch0", "switch")
        for host, centre in centres.items():
            layout.link(centre, switch, ports[host].rate_Bps, max(ports[host].latency_s - near.latency_s, 0.0) / 2)
    return layout.freeze(name, "shortest")


def _ports(hosts: Sequence[str], pings: Mapping[tuple[int, int], PingFit]) -> dict[str, PingFit]:
    """Return of each host a message between it and one like it; `hosts` are those of the ranks.

    A message is as fast as the slower of its two ports, so the fastest way of a host tells its own.
    """
    ways: dict[tuple[str, str], list[PingFit]] = {}
    for (a, b), ping in pings.items():
        if hosts[a] != hosts[b]:
            first, second = sorted((hosts[a], hosts[b]))
            ways.setdefault((first, second), []).append(ping)
    of_pair = {pair: _median(found) for pair, found in ways.items()}
    every = [ping for found in ways.values() for ping in found]
    own: dict[str, PingFit] = {}
    for pair, ping in of_pair.items():
        for host in pair:
            own[host] = max(own.get(host, ping), ping, key=lambda one: one.rate_Bps)
    usual = float(np.median([ping.rate_Bps for ping in own.values()]))
    alike = {host for host, ping in own.items() if usual / _UNLIKE <= ping.rate_Bps <= usual * _UNLIKE}
    among = _median([ping for pair, found in ways.items() for ping in found if alike.issuperset(pair)] or every)
    ports = {host: among if host in alike else own.get(host, among) for host in hosts}
    for host in ports.keys() - alike:  # the other half of its ways' latency is of those that are alike
        late = [
            2 * ping.latency_s - among.latency_s for pair, ping in of_pair.items() if host in pair and alike & {*pair}
        ]
        if late:
            ports[host] = PingFit(max(0.0, float(np.median(late))), ports[host].rate_Bps)
    return ports


def _median(pings: Sequence[PingFit]) -> PingFit:
    return PingFit(
        float(np.median([ping.latency_s for ping in pings])), float(np.median([ping.rate_Bps for ping in pings]))
    )
