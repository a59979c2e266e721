"""Which gradients share a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hocket.planner import BucketSizes


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
