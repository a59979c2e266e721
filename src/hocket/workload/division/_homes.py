"""Finds the modules whose forward must be interpreted, and which of their arguments are parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hocket.sharding import Shard, leaves

from ._record import RecordedValue, Recording


def homes(
    recording: Recording, needed: Iterable[str], states: Mapping[RecordedValue, Shard], paths: Sequence[tuple[str, ...]]
) -> dict[str, dict[int, Shard]]:
    """The innermost modules that will do.

    Args:
        recording: of the model.
        needed: names of modules that call functions which must be changed.
        states: how tensors are cut, of those that are.
        paths: of all calls that have to do with them.

    Returns:
        For each module, how its arguments are cut, by their places among all (nested ones too). Where a module comes by
        parts in another way than as an argument, the one module that has all calls inside.
    """
    found: dict[str, dict[int, Shard]] = {}
    needed = list(needed)
    for home in needed:
        if any(_within(recording, home, other) for other in needed):
            continue
        given: dict[int, Shard] = {}
        known: set[RecordedValue] = set()
        for entry in recording.entries.get(home, []):
            for place, leaf in enumerate(leaves(entry)):
                if isinstance(leaf, RecordedValue):
                    known.add(leaf)
                    if leaf in states:
                        given[place] = states[leaf]
        for call in recording.calls:
            for value in call.inputs if home in call.path else ():
                made_inside = value.producer is not None and home in value.producer.path
                if value in states and not made_inside and value not in known:
                    return {_common(paths): {}}
        found[home] = given
    return found


def _common(paths: Sequence[tuple[str, ...]]) -> str:
    """The innermost module that all paths have in common."""
    common = paths[0]
    for path in paths[1:]:
        same = [a == b for a, b in zip(common, path, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    return common[-1]


def _within(recording: Recording, inner: str, outer: str) -> bool:
    """Whether a module's forward runs inside that of another."""
    paths = [call.path for call in recording.calls if inner in call.path]
    return inner != outer and all(outer in path[: path.index(inner)] for path in paths)
