"""A second, naive reading of what a schedule means: sets and lists, every order of concurrent writes tried."""

from collections import Counter
from itertools import permutations

import numpy as np

from hocket.schedule import Collective, Schedule, Step


def keeps_contract(schedule: Schedule) -> bool:
    """Whether every order of the writes of each step leads to what the contract says, chunk by chunk."""
    return all(_chunk_is_right(schedule, chunk) for chunk in range(schedule.chunks))


def _chunk_is_right(schedule: Schedule, chunk: int) -> bool:
    collective = schedule.collective
    block = np.array(chunk // (schedule.chunks // collective.blocks))
    ranks = np.arange(schedule.world)
    owners = frozenset(ranks[collective.before(ranks, block)].tolist())
    needed = ranks[collective.after(ranks, block)].tolist()
    begin = tuple(frozenset([(e, 1)]) if e in owners else frozenset() for e in range(schedule.endpoints))
    worlds = {begin}  # a race makes several of one
    columns = schedule.columns()
    for number in range(schedule.step_count):
        rows = [
            (int(columns.source[i]), int(columns.destination[i]), bool(columns.reduce[i]))
            for i in np.flatnonzero((columns.step == number) & (columns.start <= chunk) & (chunk < columns.stop))
        ]
        worlds = {after for world in worlds for after in _outcomes(world, rows)}
    goal = dict.fromkeys(owners, 1)
    if collective.kind == "barrier":
        return all(set(dict(world[rank])) == owners for world in worlds for rank in needed)
    return all(dict(world[rank]) == goal for world in worlds for rank in needed)


def _outcomes(world, rows):
    """Every state that a step can lead to."""
    states = {world}
    for destination in {row[1] for row in rows}:
        into = [(world[source], reduce) for source, to, reduce in rows if to == destination]
        results = set()
        orders = {tuple(into)} if all(reduce for _, reduce in into) else set(permutations(into))  # sums commute
        for order in orders:
            value = world[destination]
            for read, reduce in order:
                value = frozenset((Counter(dict(value)) + Counter(dict(read))).items()) if reduce else read
            results.add(value)
        states = {state[:destination] + (value,) + state[destination + 1 :] for state in states for value in results}
    return states


def ring(world: int) -> Schedule:
    """The ring all_reduce, written here once more so that these tests need no other package."""
    r = np.arange(world)
    return Schedule(
        "ring",
        Collective("all_reduce", world),
        world,
        (
            Step.of(r, (r + 1) % world, r, reduce=True, repeat=world - 1, shift=-1),
            Step.of(r, (r + 1) % world, (r + 1) % world, reduce=False, repeat=world - 1, shift=-1),
        ),
    )


def halving_doubling(world: int) -> Schedule:
    """Rabenseifner's all_reduce for a power of two, the farthest partner first."""
    r, low, size, back = np.arange(world), np.zeros(world, int), world, []
    steps = []
    while size > 1:
        size //= 2
        peer, upper = r ^ size, (r & size) != 0
        send, low = np.where(upper, low, low + size), np.where(upper, low + size, low)
        steps.append(Step.of(r, peer, send, send + size, reduce=True))
        back.append(Step.of(r, peer, low, low + size, reduce=False))
    return Schedule("halving", Collective("all_reduce", world), world, (*steps, *reversed(back)))
