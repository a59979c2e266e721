"""One group at several aggregators: long messages are divided among them, short ones go to each in turn."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hocket.aggregator import AggregationClient, AggregationGroup, AggregationWork, Kind, wait_for_all

Array = np.ndarray[Any, Any]

SHARD_NBYTES: Final = 64 << 10
"""A message is divided if every aggregator gets so much; below, the time of a message is not that of its bytes."""
_GRAIN: Final = 16  # no element of any type is cut
_DIVISIBLE: Final = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST})


class ShardedWork:
    """An operation under way at one aggregator or at all."""

    def __init__(self, works: Sequence[AggregationWork]) -> None:
        self._works = works

    @property
    def may_be_over(self) -> bool:
        """Whether this rank has done all that the others need for the end of it."""
        return all(work.may_be_over for work in self._works)

    def wait(self) -> None:
        """Block until it is over. Raises AggregationError: an aggregator has failed."""
        if len(self._works) == 1:
            self._works[0].wait()
        else:
            wait_for_all(self._works)


class Shards:
    """A member's place in one incarnation of a group.

    All ranks have the connections to the aggregators in the same order.
    """

    def __init__(self, clients: Sequence[AggregationClient], groups: Sequence[AggregationGroup]) -> None:
        self.clients = clients
        self._groups = groups
        self._turn = 0

    @property
    def generation(self) -> int:
        """A number that only this incarnation has; 0 once it has failed."""
        found = 1
        for group in self._groups:
            if group.failure is not None:
                return 0
            found = (found * 1_000_003 + group.generation) % (1 << 62)
        return found or 1

    def look(self) -> None:
        """Take in what has come. Raises AggregatorLostError: one of the aggregators is gone."""
        for client in self.clients:
            client.look()

    def post(self, kind: Kind, send: Array | None, receive: Array | None, **settings: Any) -> ShardedWork:
        """Begin an operation; see `AggregationGroup.post`."""
        groups = self._groups
        self._turn += 1
        nbytes = max(0 if one is None else one.nbytes for one in (send, receive))
        if len(groups) == 1 or kind not in _DIVISIBLE or nbytes < SHARD_NBYTES * len(groups):
            return ShardedWork([groups[self._turn % len(groups)].post(kind, send, receive, **settings)])
        bounds = [i * nbytes // len(groups) // _GRAIN * _GRAIN for i in range(len(groups))] + [nbytes]
        works = []
        for group, begin, end in zip(groups, bounds, bounds[1:], strict=False):
            sent = None if send is None else send[begin:end]
            wanted = None if receive is None else receive[begin:end]
            works.append(group.post(kind, sent, wanted, **settings))
        return ShardedWork(works)

    def close(self) -> None:
        """Leave."""
        for client in self.clients:
            client.close()
