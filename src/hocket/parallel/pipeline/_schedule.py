"""Who computes what in which order: the actions of a pipeline's schedule, as plain values."""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

from . import torch_adapter

SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        stage: which stage, from 0.
        kind: F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B; I and W are the two halves of B.
        micro: which micro-batch, from 0.
    """

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@functools.lru_cache(maxsize=256)
def actions(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions of one training step, in order.

    Args:
        schedule: one of `SCHEDULES`.
        ranks: in the pipeline.
        per_rank: stages of each rank; stage s is on rank s % ranks.
        micro_batches: of the step.

    Raises:
        ValueError: there is no such schedule, or it does not admit so many micro-batches.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"pipeline_schedule = {schedule!r} is not known; choose one of {', '.join(SCHEDULES)}")
    if min(ranks, per_rank, micro_batches) < 1:
        raise ValueError(f"a pipeline of {ranks} ranks x {per_rank} stages x {micro_batches} micro-batches is empty")
    return tuple(
        tuple(Action(*action) for action in rank)
        for rank in torch_adapter.ordered(schedule, ranks, per_rank, micro_batches)
    )


def admitted(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> bool:
    """Whether the schedule can run a step of so many micro-batches."""
    if micro_batches < 1:
        return False
    if schedule == "gpipe" or (schedule == "1f1b" and per_rank == 1):
        return True
    return micro_batches % max(1, micro_batches // ranks) == 0


def for_batch(schedule: str, ranks: int, per_rank: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Like `actions`; GPipe's where a short batch has fewer micro-batches than the schedule admits: same gradients."""
    chosen = schedule if admitted(schedule, ranks, per_rank, micro_batches) else "gpipe"
    return actions(chosen, ranks, per_rank, micro_batches)


def forwards(ranks: int, per_rank: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions of an evaluation: forwards and their messages."""
    return tuple(
        tuple(a for a in rank if a.kind in ("F", "SEND_F", "RECV_F"))
        for rank in actions("gpipe", ranks, per_rank, micro_batches)
    )
