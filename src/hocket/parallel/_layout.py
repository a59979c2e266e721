"""Which gradients share a bucket, and how large buckets are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MAX_BUCKET_NBYTES = 64 * 2**20
MIN_BUCKET_NBYTES = 4 * 2**20
BUCKETS_WANTED = 8
"""Communication of the last bucket cannot hide behind back-propagation, so one bucket hides nothing; with eight of one
size at least seven eighths can. More of them cost more latency than they hide."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """How many bytes of gradients a bucket may hold; a larger gradient gets a bucket of its own.

    Attributes:
        most: of any bucket.
        first: of the first bucket, which back-propagation fills first.
    """

    most: int
    first: int

    @classmethod
    def choose(cls, total_nbytes: int, most: int | None, first: int | None) -> BucketSizes:
        """The sizes that the user asked for, and good ones for a model of `total_nbytes` where nothing was said.

        Raises:
            ValueError: a size is not positive.
        """
        for name, value in (("bucket_bytes", most), ("first_bucket_bytes", first)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be a positive number of bytes, not {value}")
        if most is None:
            most = min(MAX_BUCKET_NBYTES, max(MIN_BUCKET_NBYTES, -(-total_nbytes // BUCKETS_WANTED)))
        return cls(most, most if first is None else min(first, most))


def plan(order: Sequence[int], nbytes: Sequence[int], kinds: Sequence[Hashable], sizes: BucketSizes) -> list[list[int]]:
    """Divides parameters among buckets, in the order in which their gradients become ready.

    Args:
        order: numbers of the parameters, the first ready first.
        nbytes: of each parameter's gradient, by number.
        kinds: what cannot share a bucket with others (element type and device), by number.
        sizes: of the buckets.

    Returns:
        For each bucket its parameters; buckets in the order in which they become full.
    """
    position = {number: i for i, number in enumerate(order)}
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for number in order:
        members, filled = open_buckets.get(kinds[number], ([], 0))
        room = sizes.most if buckets else sizes.first
        if members and filled + nbytes[number] > room:
            buckets.append(members)
            members, filled = [], 0
        members.append(number)
        open_buckets[kinds[number]] = (members, filled + nbytes[number])
    buckets.extend(members for members, _ in open_buckets.values())
    buckets.sort(key=lambda members: position[members[-1]])
    return buckets
