"""What every simulation is brought down to: tasks with dependencies that share links, and when they happened."""

from dataclasses import dataclass, field

from ._fair import Floats, Indices, Usage


class SimulationError(ValueError):
    """What was asked for cannot be simulated: it does not fit the cluster, or waits for itself."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """Things to be done; every one waits for some, then for a time, then moves bytes over links."""

    delay_s: Floats  # float64, the time between a task's start and its first byte: latency, or computation
    nbytes: Floats  # float64, what it moves; with 0 it ends after its delay
    usage: Usage  # the links that it moves them over; one without links moves at `limit_Bps`
    before: Indices  # int64, of every dependency the task that must end
    after: Indices  # int64, of every dependency the task that waits for it
    earliest_s: Floats | None = None  # float64, no start before this; 0 if not given
    weight: Floats | None = None  # float64, its part of a shared link in proportion to others; 1 if not given
    limit_Bps: Floats | None = None  # float64, the most that it takes; infinite if not given
    # int64, of tasks that one thing does in turn: which; -1, or nothing given, for all others. They are served in the
    # order in which they are ready.
    server: Indices | None = None
    # part of its capacity that a link loses for every flow on it beyond the first: with c, k flows share capacity / (1
    # + c (k - 1))
    congestion: float = 0.0
    # int64, of tasks whose bytes go over one connection: which; -1, or nothing given, for all others. A connection
    # moves one task's bytes at a time, in the order in which they are ready.
    channel: Indices | None = None

    def __len__(self) -> int:
        return len(self.delay_s)


@dataclass
class LoadTrace:
    """How many bytes per second crossed every link, from one time to the next.

    Attributes:
        times_s: When the rates changed.
        loads_Bps: Of each such time the loads from then on, (links,).
    """

    times_s: list[float] = field(default_factory=list)
    loads_Bps: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Outcome:
    """When everything happened, in seconds from the start.

    Attributes:
        start_s: float64 per task: when it had all it waits for.
        moving_s: float64: when its first byte moved.
        end_s: float64: when its last byte had arrived.
        link_nbytes: float64 per link: what crossed it.
    """

    start_s: Floats
    moving_s: Floats
    end_s: Floats
    link_nbytes: Floats

    @property
    def seconds(self) -> float:
        """When the last task ended; 0 without any."""
        return float(self.end_s.max()) if len(self.end_s) else 0.0
