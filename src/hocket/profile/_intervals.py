"""Lengths of unions and intersections of time intervals that arrive in chunks."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as disjoint intervals in order; empty ones vanish."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return what two unions (disjoint, in order) have in common."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """Return what is left of one interval outside of some others."""
    left, at = [], whole[0]
    for begin, end in union(holes):
        if end <= at:
            continue
        if begin >= whole[1]:
            break
        if begin > at:
            left.append((at, begin))
        at = max(at, end)
    if at < whole[1]:
        left.append((at, whole[1]))
    return left
