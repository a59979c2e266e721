"""Finds the transfer that is to blame for a wrong result, by following one chunk back through a schedule."""

from collections import Counter
from typing import Final, NamedTuple

import numpy as np

from ._findings import Finding
from ._ir import Schedule

MOST_NAMES: Final = 6
MOST_COUNTS: Final = 1 << 22
"""Counts of contributions kept while one chunk is followed; with more ranks it is not said whose are missing."""


class _Move(NamedTuple):
    """One transfer of the chunk that is followed."""

    step: int
    transfer: int
    source: int
    destination: int
    reduce: bool


class _Write(NamedTuple):
    """What an endpoint held after a write, and which moves wrote it; counts are by contributing rank."""

    step: int
    moves: tuple[_Move, ...]
    counts: Counter[int]
    race: bool


def explain(schedule: Schedule, endpoint: int, chunk: int) -> Finding:
    """Say what is wrong with a chunk at a rank that does not hold what the contract says."""
    moves = _moves(schedule, chunk)
    who = schedule.describe(endpoint)
    if len(moves) * schedule.world > MOST_COUNTS:
        latest = max((move for move in moves if move.destination == endpoint), default=None)
        where = _where(schedule, latest)
        message = f"{who} does not hold the result of chunk {chunk}; {where}"
        return _finding("wrong", endpoint, chunk, latest, message)
    history = _follow(schedule, chunk, moves)
    end = history[endpoint][-1]
    if end.race:
        blamed = _origin_of_race(history, endpoint)
        message = (
            f"{who}: chunk {chunk} depends on which of the concurrent writes comes last; {_where(schedule, blamed)}"
        )
        return _finding("race", endpoint, chunk, blamed, message)
    wanted = _wanted(schedule, chunk)
    twice = sorted(rank for rank, times in end.counts.items() if times > 1)
    if twice and schedule.collective.kind != "barrier":
        blamed = _origin_of_second(history, endpoint, twice[0])
        message = f"{who} holds chunk {chunk} with {_ranks(twice)} more than once; {_where(schedule, blamed)}"
        return _finding("duplicate", endpoint, chunk, blamed, message)
    missing = sorted(wanted - set(end.counts))
    blamed = _last_write(history, endpoint)
    complete = next((e for e, writes in enumerate(history) if set(writes[-1].counts) == wanted), None)
    if complete is not None:
        holder = schedule.describe(complete)
        written = f"its last write is {_arrow(schedule, blamed)}" if blamed else "no transfer writes it"
        message = f"{who} lacks {_ranks(missing)} in chunk {chunk}, which {holder} holds whole; {written}"
    else:
        carried = _last_carrier(history, moves, missing[0])
        blamed = carried or blamed
        far = f"goes no further than {_arrow(schedule, carried)}" if carried else "is sent by nobody"
        message = f"{who} lacks {_ranks(missing)} in chunk {chunk}; that of rank {missing[0]} {far}"
    return _finding("missing", endpoint, chunk, blamed, message)


def _moves(schedule: Schedule, chunk: int) -> list[_Move]:
    """Return the transfers of one chunk in order."""
    found: list[_Move] = []
    number = 0
    for step in schedule.steps:
        for times in range(step.repeat):
            start = (step.start + np.int64(times) * step.shift) % schedule.chunks if step.repeat > 1 else step.start
            for row in np.flatnonzero((start <= chunk) & (chunk < start + (step.stop - step.start))).tolist():
                found.append(
                    _Move(number, row, int(step.source[row]), int(step.destination[row]), bool(step.reduce[row]))
                )
            number += 1
    return found


def _wanted(schedule: Schedule, chunk: int) -> set[int]:
    block = np.array(chunk // (schedule.chunks // schedule.collective.blocks))
    ranks = np.arange(schedule.world)
    return set(ranks[schedule.collective.before(ranks, block)].tolist())


def _follow(schedule: Schedule, chunk: int, moves: list[_Move]) -> list[list[_Write]]:
    """Return what every endpoint held of the chunk: at the beginning and after each step that wrote it."""
    first = _wanted(schedule, chunk)
    history = [
        [_Write(-1, (), Counter([endpoint] if endpoint in first else []), False)]
        for endpoint in range(schedule.endpoints)
    ]
    position = 0
    while position < len(moves):
        step = moves[position].step
        arrivals: dict[int, list[_Move]] = {}
        while position < len(moves) and moves[position].step == step:
            arrivals.setdefault(moves[position].destination, []).append(moves[position])
            position += 1
        written = {endpoint: _write(step, history, into, endpoint) for endpoint, into in arrivals.items()}
        for endpoint, write in written.items():
            history[endpoint].append(write)
    return history


def _write(step: int, history: list[list[_Write]], into: list[_Move], endpoint: int) -> _Write:
    """Return what an endpoint holds after all transfers of one step into it."""
    copies = [move for move in into if not move.reduce]
    read = {move.source: history[move.source][-1] for move in into}
    values = [read[move.source].counts for move in copies]
    conflict = bool(copies) and (len(copies) < len(into) or any(value != values[0] for value in values))
    counts = Counter(values[-1]) if copies else Counter(history[endpoint][-1].counts)
    for move in into:
        if move.reduce:
            counts.update(read[move.source].counts)
    spoilt = conflict or any(write.race for write in read.values()) or (not copies and history[endpoint][-1].race)
    return _Write(step, tuple(into), counts, spoilt)


def _before(history: list[list[_Write]], endpoint: int, step: int) -> _Write:
    """Return what an endpoint held when a step began."""
    return next(write for write in reversed(history[endpoint]) if write.step < step)


def _origin_of_second(history: list[list[_Write]], endpoint: int, rank: int) -> _Move | None:
    """Return the transfer by which a rank's contribution first came a second time into what ended at `endpoint`."""
    write = history[endpoint][-1]
    while True:
        heavy = next((m for m in write.moves if _before(history, m.source, write.step).counts[rank] > 1), None)
        if heavy is not None:
            write = _before(history, heavy.source, write.step)
            continue
        adding = [m for m in write.moves if m.reduce and _before(history, m.source, write.step).counts[rank]]
        into = write.moves[0].destination if write.moves else endpoint
        before = _before(history, into, write.step)
        if write.moves and before.counts[rank] > 1:
            write = before
            continue
        return adding[-1] if adding else None


def _origin_of_race(history: list[list[_Write]], endpoint: int) -> _Move | None:
    """Return the last of the transfers whose order matters."""
    write = history[endpoint][-1]
    while True:
        spoilt = next((m for m in write.moves if _before(history, m.source, write.step).race), None)
        if spoilt is not None:
            write = _before(history, spoilt.source, write.step)
            continue
        into = write.moves[0].destination
        if all(m.reduce for m in write.moves) and _before(history, into, write.step).race:
            write = _before(history, into, write.step)
            continue
        return write.moves[-1]


def _last_write(history: list[list[_Write]], endpoint: int) -> _Move | None:
    """Return the transfer that wrote what is incomplete, followed back through copies."""
    write = history[endpoint][-1]
    blamed: _Move | None = None
    while write.moves:
        blamed = write.moves[-1]
        if blamed.reduce:
            break
        write = _before(history, blamed.source, write.step)
    return blamed


def _last_carrier(history: list[list[_Write]], moves: list[_Move], rank: int) -> _Move | None:
    """Return the last transfer that carries a rank's contribution."""
    carrying = (move for move in reversed(moves) if _before(history, move.source, move.step).counts[rank])
    return next(carrying, None)


def _finding(kind: str, endpoint: int, chunk: int, blamed: _Move | None, message: str) -> Finding:
    step, transfer = (blamed.step, blamed.transfer) if blamed is not None else (None, None)
    return Finding(kind, True, endpoint, chunk, step, transfer, message)


def _where(schedule: Schedule, move: _Move | None) -> str:
    return "no transfer brings it" if move is None else f"see {_arrow(schedule, move)}"


def _arrow(schedule: Schedule, move: _Move) -> str:
    arrow = f"{schedule.endpoint(move.source)} -> {schedule.endpoint(move.destination)}"
    return f"step {move.step}, transfer {move.transfer} ({arrow} {'reduce' if move.reduce else 'copy'})"


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:MOST_NAMES]))
    more = f" and {len(ranks) - MOST_NAMES} more" if len(ranks) > MOST_NAMES else ""
    return f"the contribution of rank{'s' if len(ranks) > 1 else ''} {named}{more}"
