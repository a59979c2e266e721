"""Operations on lists of steps that the algorithms share."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hocket.schedule import Collective, Step


def power_below(number: int) -> int:
    """Return the largest power of two that is not above `number`."""
    return 1 << (number.bit_length() - 1)


def rounds(world: int) -> int:
    """ceil(log2 world), exactly."""
    return (world - 1).bit_length()


_MOST = 1 << 26  # transfers that all differ: some 4 GB while a schedule is made of them


def check_count(transfers: int) -> None:
    """Raise MemoryError before so many transfers are written down, where there are about the square of the ranks."""
    if transfers > _MOST:
        raise MemoryError(f"a schedule of {transfers:,} transfers is more than memory holds")


def mirrored(steps: Sequence[Step], *, reduce: bool) -> list[Step]:
    """Return the steps backwards in time with every transfer turned around.

    A broadcast becomes a reduce, an all_gather a reduce_scatter, a scatter a gather (with `reduce=False`): the tree
    along which a block spreads is the tree along which it is collected. Repeated steps must not wrap around.
    """
    return [
        Step.of(
            step.destination,
            step.source,
            step.start + (step.repeat - 1) * step.shift,
            step.stop + (step.repeat - 1) * step.shift,
            reduce=reduce,
            repeat=step.repeat,
            shift=-step.shift,
        )
        for step in reversed(steps)
    ]


def joined(steps: Iterable[Step]) -> Step:
    parts = list(steps)
    columns = [np.concatenate([part.columns[i] for part in parts]) for i in range(5)]
    return Step.of(*columns[:4], reduce=columns[4])


def side_by_side(*lanes: Sequence[Step]) -> list[Step]:
    """Return step k of every lane as one step, as long as there are lanes that go on; no step of them may repeat."""
    assert all(step.repeat == 1 for lane in lanes for step in lane)
    return [joined(step for step in level if step is not None) for level in zip_longest(*lanes)]


def placed(
    steps: Sequence[Step], ranks: ArrayLike, chunk: ArrayLike = 0, *, scale: int = 1, chunks: int = 0
) -> list[Step]:
    """Return the steps of a small group, done by several groups at once, on some of the chunks.

    Args:
        steps: Steps of ranks 0 to k-1.
        ranks: `(groups, k)`; who plays each of them.
        chunk: `(groups,)`; the chunk of the large schedule at which chunk 0 of each group is.
        scale: How many chunks of the large schedule one of the small schedule is.
        chunks: Chunks of the small schedule; needed if steps repeat, since they wrap around there.
    """
    player = np.atleast_2d(np.asarray(ranks))
    offset = np.broadcast_to(np.asarray(chunk), player.shape[:1])[:, None]
    return [
        Step.of(
            player[:, step.source].ravel(),
            player[:, step.destination].ravel(),
            (offset + step.start * scale).ravel(),
            (offset + step.stop * scale).ravel(),
            reduce=np.tile(step.reduce, len(player)),
        )
        for stored in steps
        for step in (stored.turn(times, chunks) for times in range(stored.repeat))
    ]


def relabelled(steps: Sequence[Step], place: NDArray[np.int64]) -> list[Step]:
    """Return the steps with chunk c in the place of `place[c]`; ranges become single chunks. No step may repeat."""
    assert all(step.repeat == 1 for step in steps)
    renamed = []
    for step in steps:
        length = step.stop - step.start
        row = np.repeat(np.arange(len(step)), length)
        within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
        chunk = place[step.start[row] + within]
        renamed.append(Step.of(step.source[row], step.destination[row], chunk, reduce=step.reduce[row]))
    return renamed


def wrapped(
    source: ArrayLike, destination: ArrayLike, start: ArrayLike, length: ArrayLike, chunks: int, *, reduce: bool
) -> Step:
    """Return a step of ranges that go on at chunk 0 after the last; such a range is two transfers."""
    columns = np.broadcast_arrays(np.atleast_1d(source), destination, np.asarray(start) % chunks, length)
    first, last, begin, size = (np.asarray(column, np.int64) for column in columns)
    over = begin + size - chunks
    rest = over > 0
    return Step.of(
        np.concatenate([first, first[rest]]),
        np.concatenate([last, last[rest]]),
        np.concatenate([begin, np.zeros(int(rest.sum()), np.int64)]),
        np.concatenate([np.minimum(begin + size, chunks), over[rest]]),
        reduce=reduce,
    )


def piece_limit(collective: Collective, *, pieces: int) -> str | None:
    """Return why a vector cannot be cut into so many pieces that follow each other; None if it can."""
    if pieces < 1:
        return f"pieces={pieces}; give 1 or more"
    if pieces > 1 and collective.kind in ("gather", "scatter"):
        return f"pieces={pieces}: {collective.kind} has a part a rank and is not cut further"
    return None


def pipelined(stages: Sequence[Step], pieces: int) -> list[Step]:
    """Cut every chunk in `pieces` and send them one behind the other through the stages.

    In step t, stage s moves piece t - s. While all stages are busy the steps differ by the piece only, and are stored
    once. Transfers of the stages must be of one chunk each.
    """
    assert all(stage.repeat == 1 and (stage.stop == stage.start + 1).all() for stage in stages)
    if pieces == 1:
        return list(stages)
    depth = len(stages)
    steps: list[Step] = []
    number = 0
    while number < depth + pieces - 1:
        busy = range(max(0, number - pieces + 1), min(depth, number + 1))
        step = joined(
            Step.of(
                stages[s].source, stages[s].destination, stages[s].start * pieces + number - s, reduce=stages[s].reduce
            )
            for s in busy
        )
        turns = pieces - depth + 1 if len(busy) == depth else 1
        steps.append(Step.of(*step.columns[:4], reduce=step.reduce, repeat=turns, shift=1) if turns > 1 else step)
        number += turns
    return steps
