"""The public test kit: worlds of real processes with deadlines, and checks that nothing is left behind."""

from ._leftovers import leftovers as leftovers
from ._leftovers import no_leftovers as no_leftovers
from ._memory_world import MemoryWorld as MemoryWorld
from ._memory_world import run_schedule as run_schedule
from ._patience import deadline as deadline
from ._patience import patience as patience
from ._ranks import RankError as RankError
from ._ranks import preload as preload
from ._ranks import run_ranks as run_ranks

__all__ = [
    "MemoryWorld",
    "RankError",
    "deadline",
    "leftovers",
    "no_leftovers",
    "patience",
    "preload",
    "run_ranks",
    "run_schedule",
]
