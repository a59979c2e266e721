"""The counters of an aggregator."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What an aggregator has done so far.

    Attributes:
        connections: Clients that have proved themselves.
        refused: Connections ended for what they said, or for who they were not.
        groups: Groups that have come together.
        groups_failed: Groups that ended by a failure.
        operations: Operations served, by kind.
        received_nbytes: Bytes from children and the parent.
        sent_nbytes: Bytes to children and the parent.
        busy_s: Seconds of work, of `wall_s` since the start.
        wall_s: Seconds since the start.
    """

    connections: int = 0
    refused: int = 0
    groups: int = 0
    groups_failed: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    received_nbytes: int = 0
    sent_nbytes: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0
