"""What several hosts are to have alike, and how fast they reach each other: the verdicts, from what the hosts said."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from hocket.units import format_rate

from ._doctor import Diagnosis

_MIB, _GIB = 1 << 20, 1 << 30
_SLOW = 0.35  # of what the others reach; what is measured for a quarter of a second varies
_UNLIKE = 0.7  # of the others' memory or cores
_CLOCK_S = 5.0
_ALL_PAIRS = 8  # hosts; of more, each is measured with some neighbours

PORTS = (  # rendezvous, Gloo, NCCL and what is measured here all listen where the kernel says
    'if it passes some ports, have all hosts use these: sysctl -w net.ipv4.ip_local_port_range="20000 20100"'
)

Links = Mapping[tuple[str, str], Mapping[str, Any]]


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs (who sends, to whom) that are measured at one time: no host is in two of a round."""
    apart = range(1, count) if count <= _ALL_PAIRS else [1 << n for n in range(count.bit_length()) if 1 << n < count]
    waiting = [(i, (i + step) % count) for step in apart for i in range(count)]
    while waiting:
        busy: set[int] = set()
        chosen = []
        for pair in waiting:
            if not busy & set(pair):
                busy |= set(pair)
                chosen.append(pair)
        waiting = [pair for pair in waiting if pair not in chosen]
        yield chosen


def compare(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[Diagnosis]:
    """Yield what differs between hosts and what one lacks.

    Args:
        hosts: What each has said of itself, by name; the first is what others are compared with.
    """
    (first, model), *others = hosts.items()
    for name, facts in others:
        for what, version in model["versions"].items():
            other = facts["versions"][what]
            if other != version:
                here, there = version or "missing", other or "missing"
                yield Diagnosis(
                    "versions", "error", f"{what} is {here} on {first} and {there} on {name}", "make them alike"
                )
    for name, facts in hosts.items():
        has = facts["resources"]
        for variable, interface in facts["interfaces"].items():
            yield Diagnosis(
                "interface", "error", f"{name} has no interface {interface}, which {variable} names; it has "
                f"{', '.join(facts['has_interfaces'])}", f"unset {variable}, or name one of these",
            )  # fmt: skip
        if has["dev_shm_free"] < 64 * _MIB:
            found = f"on {name} /dev/shm has {has['dev_shm_free'] // _MIB} MiB free of {has['dev_shm'] // _MIB} MiB"
            yield Diagnosis("/dev/shm", "warning", found, "workers of data loaders need it: delete what is in there")
        if has["open_files"] < 1024:
            found = f"{name} allows {has['open_files']} open files to a process"
            yield Diagnosis("open files", "warning", found, "raise it: ulimit -n 65536")
        ahead_s = facts["ahead_s"] - model["ahead_s"]
        if abs(ahead_s) > _CLOCK_S:
            found = f"the clock of {name} differs from that of {first} by {abs(ahead_s):.0f} s"
            yield Diagnosis("clock", "warning", found, "start an NTP client: times in logs will not fit together")
    yield from _unlike(hosts, "memory", "memory", lambda value: f"{value / _GIB:.1f} GiB of memory")
    yield from _unlike(hosts, "cores", "cores", lambda value: f"{value} cores")
    yield from _unlike(hosts, "GPUs", "gpus", lambda value: f"{value} GPUs")


def _unlike(hosts: Mapping[str, Mapping[str, Any]], title: str, key: str, said: Any) -> Iterator[Diagnosis]:
    values = {name: facts["resources"][key] for name, facts in hosts.items()}
    values = {name: len(value) if isinstance(value, list) else value for name, value in values.items()}
    most = max(values.values())
    for name, value in values.items():
        if value < _UNLIKE * most:
            found = f"{name} has {said(value)}, and {max(values, key=lambda one: values[one])} has {said(most)}"
            yield Diagnosis(title, "warning", found, "the job can use no more than the least of its hosts has")


def judge(hosts: Sequence[str], links: Links) -> Iterator[Diagnosis]:
    """Yield what the measured links tell: who is not reached, and whose link is slow beside the others'."""
    for (sender, receiver), found in links.items():
        if found["problem"]:
            address, port = found["to"]
            place = ", ".join([*([receiver] if receiver != address else []), address, f"port {port}"])
            yield Diagnosis(
                "connection", "error", f"{sender} cannot connect to {place}: {found['problem']}",
                "let a firewall between them pass all TCP ports of these hosts, or name them by addresses that reach; "
                + PORTS,
            )  # fmt: skip
    rates = {pair: found["rate_Bps"] for pair, found in links.items() if not found["problem"]}
    slow = set()
    for host in hosts:
        own = [rate for pair, rate in rates.items() if host in pair]
        others = [rate for pair, rate in rates.items() if host not in pair]
        # Each direction by itself: a cable, or what limits a rate, may be slow one way.
        for way, end in (("sends", 0), ("receives", 1)):
            one = [rate for pair, rate in rates.items() if pair[end] == host]
            if one and others and max(one) < _SLOW * median(others) and host not in slow:
                slow.add(host)
                what = way if max(own) >= _SLOW * median(others) else "sends and receives"
                reached = f"{format_rate(median(one), 3)}, others reach {format_rate(median(others), 3)}"
                text = f"{host} {what} at {reached} among themselves"
                yield Diagnosis(
                    "link", "warning", text, "look at its cable, its port of the switch, and what else uses it"
                )
    rest = {pair: rate for pair, rate in rates.items() if not slow & set(pair)}
    for (sender, receiver), rate in rest.items():
        if rate < _SLOW * median(rest.values()):
            reached = f"{format_rate(rate, 3)}, {format_rate(median(rest.values()), 3)}"
            text = f"from {sender} to {receiver} {reached} between others"
            yield Diagnosis("link", "warning", text, "look at what connects these two")
    if rest:
        latencies = [found["latency_s"] for found in links.values() if not found["problem"]]
        text = (
            f"{format_rate(min(rest.values()), 3)} to {format_rate(max(rest.values()), 3)} between hosts, latency "
            f"{min(latencies) * 1e6:.0f} to {max(latencies) * 1e6:.0f} us"
        )
        yield Diagnosis("network", "ok", text)
