"""Max-min fairness: what each of many flows gets of the links that they share."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Usage:
    """Which links flows use, in compressed rows.

    Attributes:
        offsets: int64, one more than there are flows.
        links: int64; flow i uses `links[offsets[i]:offsets[i + 1]]`, each once.
        shares: float64 like `links`: how much of its rate a flow takes of the link, 1 for a plain crossing.
    """

    offsets: Indices
    links: Indices
    shares: Floats

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, flows: Indices) -> "Usage":
        """Return the rows of some flows, in the order given."""
        counts = self.offsets[flows + 1] - self.offsets[flows]
        position = ragged(self.offsets[flows], counts)
        return Usage(np.concatenate([[0], np.cumsum(counts)]), self.links[position], self.shares[position])

    @classmethod
    def of(cls, owner: Indices, links: Indices, shares: Floats, flows: int) -> "Usage":
        """Return the usage of so many flows, of links in any order with the flow that uses each."""
        order = np.argsort(owner, kind="stable")
        return cls(np.searchsorted(owner[order], np.arange(flows + 1)), links[order], shares[order])


def ragged(starts: Indices, counts: Indices) -> Indices:
    """Return so many numbers from each start on, one row after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + counts, counts)


# Links that differ by rounding only are one bottleneck; the rates then differ by rounding only, too.
_SAME = 1 + 1e-12


def max_min(
    usage: Usage, capacity_Bps: Floats, *, weight: Floats | None = None, limit_Bps: Floats | None = None
) -> Floats:
    """Return the rates at which no flow can get more without a flow that has no more getting less.

    Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2) fills the link with the least share per flow
    first, and again with what is left. Here every link fills at once that is least among those its own flows cross:
    its flows are held back nowhere else, so their rates are final; that is exact, and takes few rounds.

    Args:
        usage: The links of every flow.
        capacity_Bps: float64 per link, bytes per second.
        weight: float64 per flow: what it gets in proportion to others at one bottleneck; 1 if not given.
        limit_Bps: float64 per flow: the most that it takes; infinite if not given.

    Returns:
        float64 per flow, bytes per second; infinite for a flow that crosses no link and has no limit.
    """
    flows, links = len(usage), len(capacity_Bps)
    rates = np.full(flows, np.inf) if limit_Bps is None else limit_Bps.astype(np.float64).copy()
    counts = np.diff(usage.offsets)
    live = np.flatnonzero(counts)
    if not len(live):
        return rates
    # Links are renumbered to those in use, so that the cost is that of the flows and not of the cluster.
    used, link = _number(usage.links, links)
    left = capacity_Bps[used].astype(np.float64)
    capacity = left.copy()
    owner = np.repeat(np.arange(flows), counts)
    share = usage.shares
    weights = np.ones(flows) if weight is None else weight
    demand = share * weights[owner]
    bound = rates / weights
    while len(owner):
        total = np.bincount(link, weights=demand, minlength=len(used))
        level = np.divide(left, total, out=np.full(len(used), np.inf), where=total > 0)
        np.maximum(level, 0.0, out=level)
        reached = level[link]
        first = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
        who = owner[first]
        least = np.minimum(np.minimum.reduceat(reached, first), bound[who])
        width = np.diff(np.r_[first, len(owner)])
        spread = np.repeat(least, width)
        # A link is final if none of its flows is held back elsewhere; a flow if one of its links is, or its bound.
        open_link = np.zeros(len(used), dtype=bool)
        open_link[link[spread * _SAME < reached]] = True
        done = np.logical_or.reduceat(~open_link[link], first) | (bound[who] <= least * _SAME)
        final = who[done]
        rates[final] = np.minimum(least[done] * weights[final], rates[final])
        gone = np.repeat(done, width)
        taken = np.bincount(link[gone], weights=share[gone] * rates[owner[gone]], minlength=len(used))
        left = np.maximum(left - taken, 0.0)
        keep = ~gone
        owner, link, share, demand = owner[keep], link[keep], share[keep], demand[keep]
    return _within(usage, rates, capacity, used, links)


def weighted_count(index: Indices, weights: Floats, count: int) -> Floats:
    """Sum of the weights of every index, float64 also where there is none."""
    return np.asarray(np.bincount(index, weights=weights, minlength=count), dtype=np.float64)


def _number(links: Indices, count: int) -> tuple[Indices, Indices]:
    """Return the links in use, and every entry's position among them."""
    mark = np.zeros(count, dtype=bool)
    mark[links] = True
    used = np.flatnonzero(mark)
    position = np.empty(count, dtype=np.int64)
    position[used] = np.arange(len(used))
    return used, position[links]


def _within(usage: Usage, rates: Floats, capacity: Floats, used: Indices, links: int) -> Floats:
    """Take back what rounding has given beyond a link, one part in 10^15 or so."""
    counts = np.diff(usage.offsets)
    _, link = _number(usage.links, links)
    load = np.bincount(link, weights=usage.shares * np.repeat(rates, counts), minlength=len(used))
    over = load > capacity
    if not over.any():
        return rates
    # A sum of k rates rounds k times, so that is how much has to be left.
    crowd = np.bincount(link, minlength=len(used))
    factor = np.where(over, capacity / np.where(load > 0, load, 1.0) * (1 - crowd * 2.0**-52), 1.0)[link]
    rows = np.flatnonzero(counts)
    scaled = rates.copy()
    scaled[rows] *= np.minimum.reduceat(factor, usage.offsets[rows])
    return scaled
