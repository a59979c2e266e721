"""Cuts a row of steps into parts of which the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CUT_SLACK", "Link", "balance", "slowest"]

Array = npt.NDArray[np.float64]
CUT_SLACK = 0.03
"""Times are measured no more precisely than this; within it a cut that fewer bytes cross is better."""


class Link(NamedTuple):
    """What joins two ranks of a pipeline.

    Attributes:
        rate_Bps: Bytes a second that it carries one way.
        latency_s: Seconds that a message takes besides.
    """

    rate_Bps: float = 2e9
    latency_s: float = 2e-5

    def seconds(self, nbytes: Any) -> Any:
        """Of a message of so many bytes, or of each of an array of them."""
        return nbytes / self.rate_Bps + self.latency_s


LOCAL = Link()  # two processes of one machine, roughly


def balance(
    times: Sequence[float],
    n: int,
    nbytes: Sequence[int] | None = None,
    *,
    holds: Sequence[bool] | None = None,
    link: Link = LOCAL,
    slack: float = 0.0,
) -> list[int]:
    """The first step of each part but the first, so that the slowest part takes the least time.

    Exact, by dynamic programming over (parts, end): some n L^2 / 2 comparisons for L steps, twice: for the least time
    of the slowest part, then among the cuts that reach it for those that the fewest bytes cross.

    Args:
        times: seconds of each step, forward and backward.
        n: parts.
        nbytes: what crosses before each step, going forward; as much comes back. Counted for the parts on both sides.
            None to count times only.
        holds: which steps hold weights; every part then gets one that does, if there are enough of them.
        link: between two ranks.
        slack: by how much of it the least time may be missed for fewer bytes across cuts.

    Returns:
        n - 1 rising numbers of steps.

    Raises:
        ValueError: there are fewer steps than parts, or a time is negative.
    """
    count = len(times)
    if n < 1 or count < n:
        raise ValueError(f"cannot cut {count} steps into {n} parts with at least one step each")
    if min(times) < 0:
        raise ValueError(f"a time is negative: {min(times)}")
    crossing = np.zeros(count + 1)
    if nbytes is not None:
        crossing[1:count] = np.asarray(nbytes[1:], dtype=float)
    sent = np.zeros(count + 1)
    if nbytes is not None:
        sent[1:count] = 2 * link.seconds(crossing[1:count])
    total = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=float))])
    weights = np.concatenate([[0], np.cumsum(np.asarray(holds if holds is not None else [True] * count, dtype=int))])

    def cost(begins: npt.NDArray[np.int64], end: int) -> Array:
        spent: Array = np.maximum(total[end] - total[begins], 0.0) + sent[begins] + sent[end]
        spent[weights[begins] == weights[end]] = np.inf
        return spent

    least, _ = _best(count, n, cost, lambda so_far, spent, _: np.maximum(so_far, spent))
    if not np.isfinite(least):  # fewer steps with weights than parts, or none between some of them
        return balance(times, n, nbytes, link=link, slack=slack)
    limit = least * (1 + slack) + 1e-12 * total[-1]
    _, begins = _best(
        count,
        n,
        cost,
        lambda so_far, spent, begins: np.where(spent <= limit, so_far + crossing[begins], np.inf),
    )
    return begins


def _best(count: int, n: int, cost: Callable[..., Array], join: Callable[..., Array]) -> tuple[float, list[int]]:
    """The least value of a way to cut `count` steps into `n` parts, and its cuts.

    Args:
        count: steps.
        n: parts.
        cost: of parts from several begins to one end.
        join: value of all up to an end, of the value up to each begin, the costs, and the begins.
    """
    so_far: Any = np.full(count + 1, np.inf)
    so_far[0] = 0.0
    came_from = np.zeros((n + 1, count + 1), dtype=int)
    for part in range(1, n + 1):
        now = np.full(count + 1, np.inf)
        for end in range(part, count + 1):
            begins = np.arange(part - 1, end)
            values = join(so_far[begins], cost(begins, end), begins)
            choice = int(np.argmin(values))
            now[end], came_from[part, end] = values[choice], begins[choice]
        so_far = now
    cuts = []
    end = count
    for part in range(n, 1, -1):
        end = int(came_from[part, end])
        cuts.append(end)
    return float(so_far[count]), cuts[::-1]


def slowest(
    begins: Sequence[int],
    times: Sequence[float],
    nbytes: Sequence[int] | None = None,
    *,
    link: Link = LOCAL,
) -> float:
    """Seconds of the slowest part of a cut, as `balance` counts them.

    Args:
        begins: the first step of each part but the first.
        times: see `balance`.
        nbytes: see `balance`.
        link: see `balance`.
    """
    bounds = [0, *begins, len(times)]

    def sent(at: int) -> float:
        return 0.0 if nbytes is None or at in (0, len(times)) else 2 * float(link.seconds(nbytes[at]))

    return max(sum(times[a:b]) + sent(a) + sent(b) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
