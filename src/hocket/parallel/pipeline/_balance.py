"""Cuts a row of steps into parts of which the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balance(
    times: Sequence[float], n: int, nbytes: Sequence[int] | None = None, *, link_Bps: float = 2e9, link_s: float = 2e-5
) -> list[int]:
    """The first step of each part but the first, so that the slowest part takes the least time.

    Exact, by dynamic programming over (parts, end): at most n L^2 / 2 comparisons for L steps. Among equally good
    answers the one with the least bytes across its cuts is taken, then the one with the earliest cuts.

    Args:
        times: seconds of each step, forward and backward.
        n: parts.
        nbytes: what crosses before each step, going forward; as much comes back. Counted for the parts on both sides.
            None to count times only.
        link_Bps: bytes a second that a link between two ranks carries.
        link_s: seconds that a message takes besides.

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
    link = np.zeros(count + 1)
    link[1:count] = 2 * (crossing[1:count] / link_Bps + link_s) if nbytes is not None else 0.0
    total = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=float))])
    # best[j]: time of the slowest part, and bytes across cuts, of the best way to have steps [0, j) in p parts
    best, traffic = total + link, np.zeros(count + 1)
    best[0] = np.inf
    came_from = np.zeros((n + 1, count + 1), dtype=int)
    for part in range(2, n + 1):
        new_best, new_traffic = np.full(count + 1, np.inf), np.zeros(count + 1)
        for end in range(part, count + 1):
            begins = np.arange(part - 1, end)
            slowest = np.maximum(best[begins], total[end] - total[begins] + link[begins] + link[end])
            moved = traffic[begins] + crossing[begins]
            least = slowest.min()
            ties = np.flatnonzero(slowest <= least * (1 + 1e-12))
            choice = ties[np.argmin(moved[ties])]
            new_best[end], new_traffic[end] = slowest[choice], moved[choice]
            came_from[part, end] = begins[choice]
        best, traffic = new_best, new_traffic
    cut_at = []
    end = count
    for part in range(n, 1, -1):
        end = int(came_from[part, end])
        cut_at.append(end)
    return cut_at[::-1]


def slowest(
    begins: Sequence[int],
    times: Sequence[float],
    nbytes: Sequence[int] | None = None,
    *,
    link_Bps: float = 2e9,
    link_s: float = 2e-5,
) -> float:
    """Seconds of the slowest part of a cut, as `balance` counts them.

    Args:
        begins: the first step of each part but the first.
        times: see `balance`.
        nbytes: see `balance`.
        link_Bps: see `balance`.
        link_s: see `balance`.
    """
    bounds = [0, *begins, len(times)]

    def link(at: int) -> float:
        return 0.0 if nbytes is None or at in (0, len(times)) else 2 * (nbytes[at] / link_Bps + link_s)

    return max(sum(times[a:b]) + link(a) + link(b) for a, b in zip(bounds[:-1], bounds[1:], strict=True))
