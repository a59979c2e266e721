"""The public test kit: worlds of real processes with deadlines, and checks that nothing is left behind."""

from ._leftovers import leftovers, no_leftovers
from ._memory_world import MemoryWorld, run_schedule
from ._patience import deadline, patience
from ._ranks import RankError, preload, run_ranks

__all__ = [
    "MemoryWorld", "RankError", "deadline", "leftovers", "no_leftovers", "patience", "preload", "run_ranks",
    "run_schedule",
]  # fmt: skip
