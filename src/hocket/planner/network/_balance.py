"""Cuts a row of steps into parts of which the slowest is as fast as can be."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CUT_SLACK = 0.03
"""Times are measured no more precisely than this; within it a cut that fewer bytes cross is better."""
_SLACKS = (0.25, 1.0)  # that are tried where messages take long
_LITTLE = 0.05  # of a step


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
    micro_batches: int = 0,
) -> list[int]:
    """Return the first step of each part but the first, so that the slowest part takes the least time.

    A part takes as long as it computes and hands over what crosses its cuts, or as the link carries that if it takes
    longer: messages go while the next micro-batch is computed. Exact, by dynamic programming over (parts, end): some
    n L^2 comparisons for L steps, twice: for the least time of the slowest part, then among the cuts that reach it
    for those that the fewest bytes cross, and among these for the one whose parts compute the most alike. With
    `micro_batches`, the least time is missed by more if the whole step is the shorter for it.

    Args:
        times: seconds of each step, forward and backward.
        n: parts.
        nbytes: what crosses before each step, going forward; as much comes back. Counted for the parts on both sides.
            None to count times only.
        holds: which steps hold weights; every part then gets one that does, if there are enough of them.
        link: between two ranks; it carries forward and backward messages of a rank one after the other.
        slack: by how much of it the least time may be missed for fewer bytes across cuts.
        micro_batches: of a step. The first of them waits for every message on its way, the others for the slowest part
            only; so where messages take long and micro-batches are few, a slower part with smaller messages around it
            is better. 0 for so many that only the slowest part counts.

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
    handled, wire = np.zeros(count + 1), np.zeros(count + 1)
    if nbytes is not None:
        handled[1:count] = 2 * LOCAL.seconds(crossing[1:count])
        wire[1:count] = link.seconds(crossing[1:count])
    total = np.concatenate([[0.0], np.cumsum(np.asarray(times, dtype=float))])
    weights = np.concatenate([[0], np.cumsum(np.asarray(holds if holds is not None else [True] * count, dtype=int))])

    # Rows are the begins of a part, 0 to count - 1, and columns its ends, 1 to count.
    computes = np.maximum(total[None, 1:] - total[:-1, None], 0.0)
    cost = np.maximum(computes + handled[:-1, None] + handled[None, 1:], wire[:-1, None] + wire[None, 1:])
    cost[(np.arange(count)[:, None] > np.arange(count)) | (weights[:-1, None] == weights[None, 1:])] = np.inf

    def slow(so_far: Array, _: Array) -> tuple[Array, Array]:
        return np.maximum(so_far, cost), np.zeros_like(cost)

    least, _ = _best(count, n, slow)
    if not np.isfinite(least):  # fewer steps with weights than parts, or none between some of them
        return balance(times, n, nbytes, link=link, slack=slack, micro_batches=micro_batches)

    def lightest(slack: float) -> list[int]:
        limit = least * (1 + slack) + 1e-12 * total[-1]

        def light(so_far: Array, longest: Array) -> tuple[Array, Array]:
            moved = np.where(cost <= limit, so_far + crossing[:-1, None], np.inf)
            return moved, np.maximum(longest, computes)

        return _best(count, n, light)[1]

    def step(begins: Sequence[int]) -> tuple[float, float]:
        """Return what a step takes besides the first micro-batch's computation, and what of it messages are."""
        sent = 2 * float(wire[list(begins)].sum())
        return (micro_batches - 1) * slowest(begins, times, nbytes, link=link) + sent, sent

    first = lightest(slack)
    if not micro_batches or step(first)[1] <= _LITTLE * step(first)[0]:
        return first
    return min([first, *map(lightest, _SLACKS)], key=step)


def _best(count: int, n: int, join: Callable[[Array, Array], tuple[Array, Array]]) -> tuple[float, list[int]]:
    """Return the least first value of a cut of `count` steps into `n`, and the cuts of those with the least second.

    `join` gives both values of all up to an end, for each begin of the last part (rows) and each end (columns), of both
    values up to each begin, as columns.
    """
    first, second = np.full(count + 1, np.inf), np.zeros(count + 1)
    first[0] = 0.0
    came_from = np.zeros((n + 1, count + 1), dtype=int)
    columns = np.arange(count)
    for part in range(1, n + 1):
        values, others = join(first[:-1, None], second[:-1, None])
        others = np.where(values == values.min(axis=0), others, np.inf)
        choice = others.argmin(axis=0)
        first[1:], second[1:] = values[choice, columns], others[choice, columns]
        first[0], came_from[part, 1:] = np.inf, choice
    cuts = []
    end = count
    for part in range(n, 1, -1):
        end = int(came_from[part, end])
        cuts.append(end)
    return float(first[count]), cuts[::-1]


def slowest(
    begins: Sequence[int],  # the first step of each part but the first
    times: Sequence[float],  # see `balance`
    nbytes: Sequence[int] | None = None,  # see `balance`
    *,
    link: Link = LOCAL,  # see `balance`
) -> float:
    """Seconds of the slowest part of a cut, as `balance` counts them."""
    bounds = [0, *begins, len(times)]

    def sent(at: int, by: Link) -> float:
        return 0.0 if nbytes is None or at in (0, len(times)) else float(by.seconds(nbytes[at]))

    return max(
        max(sum(times[a:b]) + 2 * (sent(a, LOCAL) + sent(b, LOCAL)), sent(a, link) + sent(b, link))
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    )
