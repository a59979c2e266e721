"""The links between a run's hosts: what they carried, and what they gave while they were used."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hocket.profile import LINK, RunRecord

_LEAST_NBYTES = 1 << 20
_LEAST_BUSY_S = 0.1
_SHARE = 0.1  # of what the busiest link carried: of links that carry less, latency is most of the time
_QUICK = 0.8
_SLOW = 0.6  # of what the quickest fifth of the links give


@dataclass(frozen=True, slots=True)
class HostLink:
    """What the ranks of one host sent to those of another, as the kernel counts their TCP connections."""

    source: str  # host that sent
    destination: str  # host that received
    nbytes: int  # bytes that were acknowledged
    busy_s: float  # seconds in which some were under way, the mean over the ranks that sent
    rtt_s: float  # round trip under load, the median over these ranks
    least_rtt_s: float  # the shortest round trip
    resent: int  # segments that were sent again

    @property
    def rate_Bps(self) -> float:
        """Bytes a second while it was used."""
        return self.nbytes / max(self.busy_s, 1e-9)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link that gives less than the others."""

    # what is slow, "the link of host b", "each link of hosts b, c", "what host b sends", "the link from host a to host
    # b"
    place: str
    hosts: tuple[str, ...]  # hosts at whose end it is; of a link between two both
    rate_Bps: float  # what it gives
    others_Bps: float  # what the quickest fifth of those give that are not slow
    resent: int  # segments that were sent again on it


def links_of(run: RunRecord) -> list[HostLink]:
    """Return the links between hosts that were used, in the order of their hosts' ranks."""
    hosts: dict[str, str] = {}
    rows = [(one, found) for one in run.ranks if len(found := one.of(LINK))]
    for one, found in rows:
        for text in np.unique(found["text"]):
            hosts[one.texts[text][0]] = one.host
    used: defaultdict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for one, found in rows:
        for text in np.unique(found["text"]):
            last = found[found["text"] == text][-1]
            peer = hosts.get(one.texts[text][1])
            if peer is not None and peer != one.host:
                numbers = ("nbytes", "started_s", "published_s", "arrived_s", "seq")
                used[one.host, peer].append(tuple(float(last[name]) for name in numbers))
    links = []
    for (source, destination), sent in used.items():
        nbytes, busy_s, rtt_s, least_s, resent = zip(*sent, strict=True)
        links.append(
            HostLink(
                source, destination, int(sum(nbytes)), float(np.average(busy_s, weights=np.maximum(nbytes, 1.0))),
                float(np.median(rtt_s)), min(least_s), int(sum(resent)),
            )
        )  # fmt: skip
    return links


def slow_link(links: list[HostLink]) -> SlowLink | None:
    """Return the one that gives clearly less than the others; None where all are alike, or too few to tell."""
    most = max((one.nbytes for one in links), default=0)
    least = max(_LEAST_NBYTES, _SHARE * most)
    links = [one for one in links if one.nbytes >= least and one.busy_s >= _LEAST_BUSY_S]
    if len(links) < 3:
        return None
    quick_Bps = np.quantile([one.rate_Bps for one in links], _QUICK, method="higher")
    slow = [one for one in links if one.rate_Bps < _SLOW * quick_Bps]
    if not slow:
        return None
    others_Bps = float(np.quantile([one.rate_Bps for one in links if one not in slow], _QUICK, method="higher"))

    def whole(some: list[HostLink]) -> bool:
        return len(some) > 0 and all(one in slow for one in some)

    def found(place: str, *hosts: str, some: list[HostLink]) -> SlowLink:
        rate_Bps = sum(one.nbytes for one in some) / sum(one.busy_s for one in some)
        return SlowLink(place, hosts, rate_Bps, others_Bps, sum(one.resent for one in some))

    names = dict.fromkeys(one.source for one in slow) | dict.fromkeys(one.destination for one in slow)
    sends = {host: [one for one in links if one.source == host] for host in names}
    takes = {host: [one for one in links if one.destination == host] for host in names}
    both = {host: [*sends[host], *takes[host]] for host in names if sends[host] and takes[host]}
    for place, places, of in (
        ("the link of host {}", "each link of hosts {}", both),
        ("what host {} sends", "what hosts {} send", sends),
        ("what host {} receives", "what hosts {} receive", takes),
    ):
        every = {host: some for host, some in of.items() if len(some) > 1 and whole(some)}
        hosts: list[str] = []
        theirs: list[HostLink] = []
        # The slowest host first; others that have slow links besides: a slow host makes its neighbours' slow, too.
        for host in sorted(every, key=lambda name: float(np.mean([one.rate_Bps for one in every[name]]))):
            besides = [one for one in every[host] if one not in theirs]
            if len(besides) > 1:
                hosts.append(host)
                theirs += besides
        if hosts:
            return found((place if len(hosts) == 1 else places).format(", ".join(hosts)), *hosts, some=theirs)
    one = min(slow, key=lambda link: link.rate_Bps)
    ends = {one.source, one.destination}
    if any(_SLOW * link.rate_Bps < one.rate_Bps for link in slow if {link.source, link.destination} != ends):
        return (
            None  # as slow between other hosts: so the messages lie, such as to the farthest rank, and no place is slow
        )
    return found(f"the link from host {one.source} to host {one.destination}", one.source, one.destination, some=[one])
