"""What the wires and devices of a cluster reach: the first host stands for all that are like it, of others the least.

Ranks work in step, so that a device counts for what the slowest does, and has the memory of the smallest.
"""

from typing import Any

import numpy as np

from hocket.cluster import FORMAT_RATES, Cluster

from ._contention import marks

FIGURES = ("flops", "memory_Bps", "memory_nbytes", *FORMAT_RATES)  # of a device


def wires_of(cluster: Cluster, workers: int | None = None) -> dict[str, Any]:
    """Return the fields of a `Network` for a cluster, of which the first ranks and their hosts count; all if None."""
    local = cluster.ranks_per_host()
    first = int(cluster.ranks[0])
    devices, apart = _least_device(cluster, workers)
    hosts = -(-(workers or cluster.world) // local)
    ports_Bps = _ports(cluster)[: max(2, hosts)]
    second = int(ports_Bps.argmin()) or 1
    kinds = _kinds_of_hosts(cluster, hosts)
    differs = {"devices": apart, "ports": hosts > 1 and ports_Bps.min() < ports_Bps.max(), "links": len(kinds) > 1}
    unlike = " ".join(what for what, does in differs.items() if does)
    inside_Bps, inside_s, between_s, rank_Bps, host_Bps = float("inf"), 0.0, 0.0, float("inf"), float("inf")
    mesh = 0
    ranks = cluster.ranks[: len(ports_Bps) * local].reshape(-1, local)
    for ring in ranks[kinds] if local > 1 else ():
        routes = cluster.routes(ring, np.roll(ring, -1))
        ring_Bps = min(float(cluster.capacity_Bps[routes[i]].min()) for i in range(local))
        inside_s = max(inside_s, *(float(cluster.latency_s[routes[i]].sum()) for i in range(local)))
        peers = cluster.routes(np.repeat(ring[:1], local - 1), ring[1:])
        if local > 2 and all(len(peers[i]) == 1 for i in range(local - 1)):
            mesh = local - 1
            ring_Bps = sum(float(cluster.capacity_Bps[peers[i]].min()) for i in range(local - 1))
        inside_Bps = min(inside_Bps, ring_Bps)
    if len(ranks) > 1:
        host_Bps = float(ports_Bps.min())
        for here, there in ((0, second), *((host, 0) for host in kinds if host)):
            far = [cluster.routes(ranks[here, i : i + 1], ranks[there, i : i + 1])[0] for i in range(local)]
            rates = [float(cluster.capacity_Bps[one].min()) for one in far]
            rank_Bps, between_s = min(rank_Bps, *rates), max(between_s, float(cluster.latency_s[far[0]].sum()))
            if local > 1:  # no more leaves a host than its ranks bring to its ports
                host_Bps = min(host_Bps, sum(rates))
    streaming = [one.efficiency for one in cluster.reductions.values() if one.streaming]
    outside = [n for n in cluster.reductions if cluster.hosts[n] < 0]
    return {
        "name": cluster.name,
        "world": cluster.world,
        "local": local,
        "inside_Bps": inside_Bps,
        "inside_s": inside_s,
        "host_Bps": host_Bps,
        "rank_Bps": rank_Bps,
        "between_s": between_s,
        "reduces": max(streaming, default=0.0) if outside else 0.0,
        "mesh": mesh,
        "reached": cluster.reached,
        "sharers": local if _computes_in_host_memory(cluster, first) else 0,
        "routed": cluster,
        "unlike": unlike,
        **devices,
        "memory_nbytes": int(devices["memory_nbytes"]),
    }


def _least_device(cluster: Cluster, workers: int | None) -> tuple[dict[str, float], bool]:
    """Return of every figure of a device the least that one of the first ranks has, and whether these differ.

    Where some do not say a figure, nobody knows it; a format without a rate of its own is at `flops`.
    """
    figures = {name: np.asarray(getattr(cluster, name))[cluster.ranks[:workers]] for name in FIGURES}
    apart = any(bool((one != one[0]).any()) for one in figures.values())
    if apart:
        for name in ("float16_flops", "float32_flops"):
            if figures[name].any():
                figures[name] = np.where(figures[name] > 0, figures[name], figures["flops"])
    return {name: float(one.min()) for name, one in figures.items()}, apart


def _ports(cluster: Cluster) -> np.ndarray:
    """Return of every host, in the order of its ranks, what all its ports carry together to what is outside."""
    tails, heads = cluster.hosts[cluster.link_tail], cluster.hosts[cluster.link_head]
    leaving = (tails >= 0) & (tails != heads)
    carried = np.bincount(tails[leaving], weights=cluster.capacity_Bps[leaving], minlength=int(cluster.hosts.max()) + 1)
    return carried[cluster.hosts[cluster.ranks[:: cluster.ranks_per_host()]]]


def _kinds_of_hosts(cluster: Cluster, hosts: int) -> list[int]:
    """Return of the first hosts one of each kind of links inside, the first before all, in the order of their ranks."""
    owner = cluster.hosts[cluster.link_tail]
    inner = np.flatnonzero((owner >= 0) & (owner == cluster.hosts[cluster.link_head]))
    links = np.zeros(int(cluster.hosts.max()) + 1, dtype=np.int64)
    np.add.at(links, owner[inner], marks(cluster.capacity_Bps[inner], cluster.latency_s[inner]))
    first = np.unique(links[cluster.hosts[cluster.ranks[:: cluster.ranks_per_host()][:hosts]]], return_index=True)[1]
    return sorted(first.tolist())


def _computes_in_host_memory(cluster: Cluster, node: int) -> bool:
    near = {cluster.kinds[head] for head in cluster.link_head[cluster.link_tail == node].tolist()}
    return cluster.kinds[node] == "host" or "memory" in near
