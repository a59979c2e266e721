"""The rules of bounded staleness hold whatever the order of events, and somebody can always go on."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.parallel.data.relaxed._board import RUNNING, WorkerState
from hocket.parallel.data.relaxed._pace import (
    Pace,
    Rule,
    most_missed,
)

Message = tuple[WorkerState, bool]


class Post:
    """Boards of several workers in one process, between which messages wait until they are delivered."""

    def __init__(self, size: int) -> None:
        self.ways: dict[tuple[int, int], deque[Message]] = {(a, b): deque() for a in range(size) for b in range(size)}
        self.boards = [PostBoard(self, rank, size) for rank in range(size)]

    def deliver(self, source: int, target: int) -> bool:
        """Delivers the oldest message of a way, if there is one."""
        way = self.ways[source, target]
        if not way:
            return False
        state, update = way.popleft()
        board = self.boards[target]
        if update:
            board.arrived[source].append(state.seen)
        board.states[source] = state
        return True


class PostBoard:
    """A board whose peers know only what `Post` has delivered."""

    def __init__(self, post: Post, rank: int, size: int) -> None:
        self.rank, self.size, self._post = rank, size, post
        self.states = [WorkerState(0, 0, 0, RUNNING, (0,) * size)] * size
        self.arrived: list[deque[tuple[int, ...]]] = [deque() for _ in range(size)]

    def slot(self) -> torch.Tensor:
        raise AssertionError("updates have no bytes here")

    def _send(self, state: WorkerState, update: bool) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._post.ways[self.rank, peer].append((state, update))

    def publish(self, state: WorkerState) -> None:
        self._send(state, True)

    def tell(self, state: WorkerState) -> None:
        self._send(state, False)

    def state(self, peer: int) -> WorkerState:
        return self.states[peer]

    def next(self, peer: int, taken: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
        return (self.arrived[peer].popleft(), torch.empty(0)) if self.arrived[peer] else None

    def dead(self) -> set[int]:
        return set()

    def wait(self, tries: int) -> None:
        raise AssertionError("nobody waits here")

    def close(self, status: int) -> None:
        raise AssertionError("nobody leaves here")


def nothing(data: torch.Tensor) -> None:
    """Applies no bytes."""


def run(rule: Rule, bound: int, size: int, updates: list[int], speeds: list[int], delay: int, seed: int) -> list[Pace]:
    """Lets workers make `updates` in an order drawn by their speeds, then rest; fails if none can go on."""
    draw = random.Random(seed)
    post = Post(size)
    paces = [Pace(board, rule, bound) for board in post.boards]
    computing, resting, settled = [False] * size, [False] * size, [False] * size
    ways = [(a, b) for a in range(size) for b in range(size) if a != b]
    for _ in range(100_000):
        if all(settled):
            return paces
        if draw.randrange(delay) == 0:
            for _ in range(size):
                post.deliver(*draw.choice(ways))
        worker = draw.choices(range(size), speeds)[0]
        pace = paces[worker]
        if computing[worker]:
            computing[worker] = False
            pace.publish()
        elif pace.published < updates[worker]:
            computing[worker] = pace.try_begin(nothing)
        elif not resting[worker]:
            resting[worker] = True
            pace.rest()
        else:
            settled[worker] = settled[worker] or pace.try_settle(nothing)
        if rule == "ssp":
            check_clocks(paces, resting, bound)
    raise AssertionError(f"nobody can go on: {[(p.published, p.held_by()) for p in paces]}")


def check_clocks(paces: list[Pace], resting: list[bool], bound: int) -> None:
    """Who computes has begun at most `bound` ahead, so has published one more at most."""
    clocks = [pace.published for pace, rests in zip(paces, resting, strict=True) if not rests]
    if clocks:
        assert max(clocks) - min(clocks) <= bound + 1


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    rule=st.sampled_from(["stale", "ssp"]),
    bound=st.integers(0, 6),
    updates=st.lists(st.integers(0, 30), min_size=2, max_size=4),
    speeds=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    delay=st.sampled_from([1, 2, 10, 40]),
    seed=st.integers(0, 2**32),
)
def test_the_bound_holds_and_all_come_to_an_end_in_any_order_of_events(
    rule: Rule, bound: int, updates: list[int], speeds: list[int], delay: int, seed: int
) -> None:
    bound = max(bound, 1) if rule == "stale" else bound
    size = len(updates)
    paces = run(rule, bound, size, updates, speeds[:size], delay, seed)
    for worker, pace in enumerate(paces):
        assert pace.published == updates[worker]
        assert pace.applied == sum(updates) - updates[worker]
        assert sum(pace.staleness.values()) == pace.applied
        assert max(pace.staleness, default=0) <= most_missed(rule, bound)


def steps_while(rule: Rule, bound: int, slow_steps: int, ratio: int) -> tuple[int, int]:
    """Updates of a fast worker, and its refusals, beside one that takes `ratio` times as long; messages are instant."""
    post = Post(2)
    fast, slow = (Pace(board, rule, bound) for board in post.boards)
    refusals = 0

    def deliver_all() -> None:
        while any([post.deliver(0, 1), post.deliver(1, 0)]):
            pass

    for _ in range(slow_steps):
        deliver_all()
        assert slow.try_begin(nothing)
        for _ in range(ratio):
            deliver_all()
            if fast.try_begin(nothing):
                fast.publish()
            else:
                refusals += 1
        slow.publish()
    return fast.published, refusals


def test_a_worker_that_comes_round_within_the_bound_is_not_waited_for() -> None:
    assert steps_while("stale", 10, 30, 10) == (300, 0)


def test_a_worker_that_is_slower_than_the_bound_allows_is_waited_for() -> None:
    assert steps_while("stale", 4, 30, 10) == (120, 180)


def test_clocks_wait_in_the_end_for_a_worker_that_is_slow_throughout() -> None:
    published, refusals = steps_while("ssp", 10, 30, 10)
    assert published <= 30 + 11
    assert refusals > 200


@pytest.mark.parametrize(("rule", "bound", "most"), [("stale", 1, 1), ("stale", 5, 5), ("ssp", 0, 2), ("ssp", 3, 8)])
def test_what_an_update_may_have_missed_follows_from_the_rule(rule: Rule, bound: int, most: int) -> None:
    assert most_missed(rule, bound) == most
