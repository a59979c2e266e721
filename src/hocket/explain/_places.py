"""Where in the program ranks compute longer: places where they are read more often than time elsewhere explains.

A stack is read four times a second at most, so a short run has few. A place is named only if it is surely more than
chance; otherwise none is, for a wrong one sends people the wrong way.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hocket.profile import GARBAGE, PHASE, SAMPLE, WAIT, short_place

from ._parts import Array, Parts

_LEAST = 2.0  # readings more than expected
_SURE = 2.5  # times what chance makes of as many readings
_HALF = 0.5  # of what they compute longer is there at least
_MOST = 0.67  # of a rank's work, and of the readings


def place_of_late(parts: Parts, rank: int, others: Sequence[int], since: int, share: float) -> str:
    """Return where a rank that is late computes longer than others, from a step on; "" where that is not sure.

    Args:
        parts: The steps.
        rank: Its place among the run's ranks.
        others: Places of those that are not late.
        since: The first of the steps.
        share: What it computes longer, as a share of the time.
    """
    mine, read = _computing(parts, rank, np.arange(parts.steps) >= since)
    theirs = [_computing(parts, one, np.arange(parts.steps) >= since) for one in others]
    sums: Counter[str] = Counter()
    for counts, _ in theirs:
        sums.update(counts)
    more, computed = share * read, sum(mine.values())
    if mine and more >= _MOST * computed and max(mine.values()) >= _MOST * computed:
        return short_place(mine.most_common(1)[0][0])  # most of the work is what is longer: a few readings tell
    scale = read / max(1, sum(every for _, every in theirs))
    return _surely_more(mine, {place: scale * count for place, count in sums.items()}, more, scale)


def place_of_slow(parts: Parts, ranks: Sequence[int], slow: Array, usual_share: float) -> str:
    """Return where ranks compute longer in slow steps than in all others; "" where that is not sure.

    Args:
        parts: The steps.
        ranks: Their places among the run's ranks.
        slow: Numbers of the slow steps.
        usual_share: What the usual step is of a slow one.
    """
    here, there = Counter[str](), Counter[str]()
    read_here = read_there = 0
    is_slow = np.isin(np.arange(parts.steps), slow)
    for rank in ranks:
        for counts, chosen in ((here, is_slow), (there, ~is_slow)):
            found, every = _computing(parts, rank, chosen)
            counts.update(found)
            if counts is here:
                read_here += every
            else:
                read_there += every
    scale = usual_share * read_here / max(1, read_there)
    return _surely_more(here, {place: scale * n for place, n in there.items()}, (1.0 - usual_share) * read_here, scale)


def places_of_all(parts: Parts) -> Counter[str]:
    """Return how often ranks were read at each line of their programs while they computed."""
    sums: Counter[str] = Counter()
    for rank in range(len(parts.run.ranks)):
        for place, count in _computing(parts, rank, np.ones(parts.steps, bool))[0].items():
            sums[short_place(place)] += count
    return sums


def place_of_most(parts: Parts) -> str:
    """Return where ranks are more often than anywhere else while they compute; "" where that is not sure."""
    sums = places_of_all(parts)
    (place, most), (_, second), *_ = [*sums.most_common(2), ("", 0), ("", 0)]
    return place if most - second >= max(_LEAST, (most + second) ** 0.5) else ""


def _surely_more(mine: Counter[str], usual: dict[str, float], more: float, scale: float) -> str:
    if not mine:
        return ""
    place = max(mine, key=lambda one: mine[one] - usual.get(one, 0.0))
    expected = usual.get(place, 0.0)
    chance = (mine[place] + scale * expected) ** 0.5
    found = mine[place] - expected
    return short_place(place) if found >= max(_LEAST, _SURE * chance - 1.0, _HALF * more) else ""


def _computing(parts: Parts, rank: int, chosen: Array) -> tuple[Counter[str], int]:
    """Return how often a rank was read at each place while it computed in some of the steps, and how often at all."""
    one, bounds = parts.run.ranks[rank], parts.bounds_s[rank]
    rows = one.of(SAMPLE)
    rows = rows[(rows["posted_s"] > bounds[0]) & (rows["posted_s"] < bounds[-1]) & (rows["text"] > 0)]
    rows = rows[chosen[np.searchsorted(bounds, rows["posted_s"]) - 1]]
    else_s = np.concatenate([one.of(kind) for kind in (WAIT, PHASE, GARBAGE)])
    order = np.argsort(else_s["started_s"], kind="stable")
    begun, over = else_s["started_s"][order], np.maximum.accumulate(else_s["finished_s"][order])
    last = np.searchsorted(begun, rows["posted_s"]) - 1
    computes = (last < 0) | (rows["posted_s"] > over[last]) if len(begun) else np.ones(len(rows), bool)
    return Counter(one.texts[text] for text in rows["text"][computes].tolist()), len(rows)
