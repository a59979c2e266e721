"""A plain interpreter of schedules on one array per endpoint: what the IR says, and nothing clever."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hocket.schedule import Collective, Schedule, Step

OPERATORS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "xor": np.bitwise_xor}


def run(schedule: Schedule, data: NDArray, operator: str) -> NDArray:
    """Executes a schedule.

    Args:
        schedule: what to do.
        data: `(world, chunks, elements)`, what every rank contributes; what the contract does not give it is ignored.
        operator: one of `OPERATORS`.

    Returns:
        `(world, chunks, elements)`, what every rank holds at the end.

    Raises:
        AssertionError: a transfer reads what is not there, or two transfers of a step write to one place in a way
            that depends on their order.
    """
    extra = (schedule.endpoints - schedule.world, *data.shape[1:])
    held = np.concatenate([data, np.zeros(extra, data.dtype)])
    block = np.arange(schedule.chunks) * schedule.collective.blocks // schedule.chunks
    there = np.zeros(held.shape[:2], bool)
    there[: schedule.world] = schedule.collective.before(np.arange(schedule.world)[:, None], block[None, :])
    for number, step in enumerate(schedule.each_step()):
        source, destination, chunk, reduce = _single(step)
        assert there[source, chunk].all(), f"{schedule.name}, step {number}: sends what it does not hold"
        sent = held[source, chunk]  # a copy: all read before any writes
        place = destination.astype(np.int64) * schedule.chunks + chunk
        written, first, times = np.unique(place, return_index=True, return_counts=True)
        shared = np.isin(place, written[times > 1])
        assert reduce[shared].all(), f"{schedule.name}, step {number}: copies meet at one place"
        lands = ~reduce  # copies, and the first of those that are reduced onto nothing
        lands[first] |= ~there[destination[first], chunk[first]]
        held[destination[lands], chunk[lands]] = sent[lands]
        OPERATORS[operator].at(held, (destination[~lands], chunk[~lands]), sent[~lands])
        there[destination, chunk] = True
    return held[: schedule.world]


def expected(collective: Collective, chunks: int, data: NDArray, operator: str) -> tuple[NDArray, NDArray]:
    """What must be where: `(chunks, elements)`, equal at all ranks, and `(world, chunks)`, who must hold it."""
    block = np.arange(chunks) * collective.blocks // chunks
    rank = np.arange(collective.world)[:, None]
    if collective.reduces:
        value = OPERATORS[operator].reduce(data, axis=0)
    else:
        holder = collective.before(rank, block[None, :]).argmax(axis=0)
        value = data[holder, np.arange(chunks)]
    return value, np.asarray(collective.after(rank, block[None, :]))


def _single(step: Step) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """source, destination, chunk, reduce of every chunk that a step moves."""
    length = step.stop - step.start
    row = np.repeat(np.arange(len(step)), length)
    within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
    return step.source[row], step.destination[row], step.start[row] + within, step.reduce[row]
