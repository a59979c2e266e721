"""How a launch ended, as the ranks' launcher tells it."""

from dataclasses import asdict, dataclass
from typing import Any

from ._failure import RankFailure


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        outcome: "finished", "failed", "interrupted", "timed-out", "saved" (the ranks were told to end, and have written
            a checkpoint from which the same command goes on), "output-closed" (nobody read what we print), or
            "output-lost" (the disk is full on which it is written).
        exit_code: 0; 75 if "saved" (0 where HOCKET_SAVED_MARK names a file to be made instead); the first failing
            rank's status, or 128 plus the number of the signal that killed it; 128 plus the number of the signal that
            interrupted the launcher; 124 after the time-out; 141 if nobody reads; 1 if it is lost.
        nproc: Ranks on this host.
        wall_s: Seconds from the call to the end.
        restarts: How often the ranks were started again.
        failures: The ranks that failed in the last attempt, the first one first.
        run_dir: Directory of the run; None if it has none.
    """

    outcome: str
    exit_code: int
    nproc: int
    wall_s: float
    restarts: int
    failures: tuple[RankFailure, ...] = ()
    run_dir: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self)
