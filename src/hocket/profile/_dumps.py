"""What other tools' dumps say of one rank: its operations, and the groups that it is in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DumpedOperation:
    group: tuple[str, tuple[int, ...]]  # its name, and its ranks as numbers of the world
    kind: str
    seq: int
    nbytes: int
    dtype: str
    begun_s: float
    ended_s: float | None  # None: it had not ended
    place: tuple[str, ...] = ()  # where it was called, the innermost frame first


@dataclass(frozen=True, slots=True)
class DumpedRank:
    rank: int
    host: str
    pid: int
    operations: list[DumpedOperation]
    groups: list[tuple[str, tuple[int, ...]]]
