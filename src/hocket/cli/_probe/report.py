"""From the measurements of a probe to a cluster, its document, and a table for people."""

from typing import Any

from hocket.cluster import Cluster, MeasuredRank, PingFit, fit_ping, from_measurements, to_toml
from hocket.units import format_bytes, format_flops, format_rate, format_time


def to_cluster(name: str, result: dict[str, Any]) -> tuple[Cluster, dict[tuple[int, int], PingFit]]:
    """Return the cluster that explains a probe's measurements, and the line of each pair."""
    ranks = [MeasuredRank(**rank) for rank in result["ranks"]]
    pings = {
        (pair["ranks"][0], pair["ranks"][1]): fit_ping({int(size): s for size, s in pair["seconds"].items()})
        for pair in result["pairs"]
    }
    return from_measurements(name, ranks, pings), pings


def document(cluster: Cluster, pings: dict[tuple[int, int], PingFit], result: dict[str, Any]) -> str:
    """Return the TOML document, with every measurement as a comment."""
    lines = ["# Measured by `hocket cluster probe`, on " + ", ".join(dict.fromkeys(r["host"] for r in result["ranks"]))]
    lines += [f"# {line}" for line in [*table(pings, result), *unlike_hosts(cluster)]]
    return "\n".join(lines) + "\n" + to_toml(_rounded(cluster), explicit=True)


def _rounded(cluster: Cluster) -> Cluster:
    """Round to four digits: more than a measurement has."""
    values = {name: getattr(cluster, name) for name in Cluster.__dataclass_fields__}
    for name in ("capacity_Bps", "latency_s", "flops", "memory_Bps"):
        values[name] = values[name].copy()
        values[name][:] = [float(f"{value:.4g}") for value in values[name]]
    return Cluster(**values)


def unlike_hosts(cluster: Cluster) -> list[str]:
    """Return a line that tells which hosts' ports are slower than others', for the cluster of a probe; none if none."""
    hosts: dict[float, list[str]] = {}
    for tail, head, rate in zip(cluster.link_tail, cluster.link_head, cluster.capacity_Bps, strict=True):
        if cluster.kinds[head] == "switch":
            hosts.setdefault(float(rate), []).append(cluster.host_names[cluster.hosts[tail]])
    if len(hosts) < 2:
        return []
    each = (f"{format_rate(rate, 4)} for {', '.join(names)}" for rate, names in sorted(hosts.items()))
    return [f"hosts differ in how fast messages to others go: {'; '.join(each)}"]


def table(pings: dict[tuple[int, int], PingFit], result: dict[str, Any]) -> list[str]:
    """Return the lines for people: each rank, then each pair by size."""
    lines = []
    for number, rank in enumerate(result["ranks"]):
        lines.append(
            f"rank {number} on {rank['host']}: memory {format_rate(rank['memory_Bps'], 4)}, "
            f"{format_flops(rank['flops'], 4)}"
        )
    for pair in result["pairs"]:
        a, b = pair["ranks"]
        line = pings[a, b]
        times = ", ".join(f"{format_bytes(int(n))} {format_time(s, 4)}" for n, s in pair["seconds"].items())
        fitted = f"{format_time(line.latency_s, 4)}, {format_rate(line.rate_Bps, 4)}"
        lines.append(f"ranks {a} and {b}: {fitted}; one way: {times}")
    return lines
