"""What one aggregator allows."""

from __future__ import annotations

from dataclasses import dataclass

from ._frames import MOST_SEGMENT_NBYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Quotas and deadlines of an aggregator.

    Attributes:
        connections: clients at once; of them a quarter may be strangers that have not proved themselves yet.
        groups: of one token, at once.
        members: of one group, at this aggregator.
        operations: under way at once in one group.
        nbytes: of all windows together, the memory that clients can make the aggregator hold.
        window_nbytes: what one member may have under way in one group.
        segment_nbytes: the longest segment.
        hello_s: seconds for a client to prove itself.
        join_s: seconds from the first member of a group to the last.
        stall_s: seconds after which a peer that takes nothing of what waits for it is dropped.
    """

    connections: int = 1024
    groups: int = 256
    members: int = 1024
    operations: int = 64
    nbytes: int = 1 << 30
    window_nbytes: int = 1 << 20
    segment_nbytes: int = MOST_SEGMENT_NBYTES
    hello_s: float = 5.0
    join_s: float = 60.0
    stall_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("connections", "groups", "members", "operations", "nbytes", "window_nbytes", "segment_nbytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        for name in ("hello_s", "join_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give seconds above 0")
        if not 16 <= self.segment_nbytes <= MOST_SEGMENT_NBYTES or self.segment_nbytes > self.window_nbytes:
            raise ValueError(
                f"segment_nbytes is {self.segment_nbytes}; give 16 to {MOST_SEGMENT_NBYTES}, and no more than "
                f"window_nbytes, {self.window_nbytes}"
            )
        if self.window_nbytes >= 1 << 32:
            raise ValueError(f"window_nbytes is {self.window_nbytes}; give less than 4 GiB")
