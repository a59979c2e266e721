"""Schedules: complete, in an order that can be kept, and as idle as the formula says."""

from __future__ import annotations

from collections import Counter

import pytest

from hocket.schedule.pipeline import NAMED_ORDERS, PipelineAction, order_for_batch, pipeline_order, stage_homes

SCHEDULES = tuple(NAMED_ORDERS)

SHAPES = [(1, 1, 3), (1, 2, 2), (2, 1, 4), (2, 1, 8), (2, 2, 4), (3, 1, 6), (4, 1, 4), (4, 1, 16), (4, 2, 8), (2, 3, 6)]


CASES = [(name, *shape) for name, rule in NAMED_ORDERS.items() for shape in SHAPES if rule.admits(*shape)]


def actions(schedule: str, ranks: int, per_rank: int, micro: int) -> tuple[tuple[PipelineAction, ...], ...]:
    """Every rank's actions, messages written."""
    return pipeline_order(schedule, ranks, per_rank, micro).with_messages().ranks


def played(
    order: tuple[tuple[PipelineAction, ...], ...], per_rank: int, forward_s: float = 1.0
) -> tuple[float, list[float]]:
    """Seconds until all is done and the seconds that each rank computes; messages take no time.

    A backward takes twice a forward, its two halves a forward each; a stage its share of its rank's.

    Raises:
        AssertionError: some action waits for something that never comes.
    """
    cost = {"F": forward_s, "B": 2 * forward_s, "I": forward_s, "W": forward_s}
    ready: dict[tuple[int, str, int], float] = {}
    clocks, places, busy = [0.0] * len(order), [0] * len(order), [0.0] * len(order)
    stages = len(order) * per_rank
    while any(place < len(rank) for place, rank in zip(places, order, strict=True)):
        moved = False
        for r, rank in enumerate(order):
            if places[r] == len(rank):
                continue
            stage, kind, micro = rank[places[r]]
            needs: list[tuple[int, str, int]] = []
            if kind == "F" and stage:
                needs = [(stage - 1, "F", micro)]
            elif kind in "BI":
                needs = [(stage, "F", micro)] + ([(stage + 1, "G", micro)] if stage + 1 < stages else [])
            elif kind == "W":
                needs = [(stage, "I", micro)]
            if kind in cost:
                if any(need not in ready for need in needs):
                    continue
                begin = max([clocks[r], *(ready[need] for need in needs)])
                clocks[r] = begin + cost[kind] / per_rank
                busy[r] += cost[kind] / per_rank
                ready[stage, kind, micro] = clocks[r]
                if kind in "BI":
                    ready[stage, "G", micro] = clocks[r]
            places[r] += 1
            moved = True
        assert moved, "the schedule waits for itself"
    return max(clocks), busy


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "micro"), CASES)
def test_every_micro_batch_passes_every_stage_once_each_way(
    schedule: str, ranks: int, per_rank: int, micro: int
) -> None:
    order, homes = actions(schedule, ranks, per_rank, micro), stage_homes(schedule, ranks, per_rank)
    played(order, per_rank)
    for r, rank in enumerate(order):
        counts = Counter(rank)
        assert set(counts.values()) == {1}
        for stage in range(ranks * per_rank):
            for m in range(micro):
                mine = homes[stage] == r
                assert counts[PipelineAction(stage, "F", m)] == mine
                whole, halves = counts[PipelineAction(stage, "B", m)], counts[PipelineAction(stage, "I", m)]
                assert whole + halves == mine
                assert counts[PipelineAction(stage, "W", m)] == halves


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "micro"), CASES)
def test_messages_between_two_ranks_stand_in_the_same_order_on_both(
    schedule: str, ranks: int, per_rank: int, micro: int
) -> None:
    order, homes = actions(schedule, ranks, per_rank, micro), stage_homes(schedule, ranks, per_rank)
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for r, rank in enumerate(order):
        for stage, kind, m in rank:
            if kind.startswith("SEND"):
                to = stage + (1 if kind == "SEND_F" else -1)
                sent.setdefault((r, homes[to]), []).append((kind[-1], to, m))
            elif kind.startswith("RECV"):
                origin = stage - (1 if kind == "RECV_F" else -1)
                received.setdefault((homes[origin], r), []).append((kind[-1], stage, m))
    assert sent == received


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 32)])
def test_idle_share_of_balanced_stages_is_the_formulas(schedule: str, ranks: int, micro: int) -> None:
    total_s, busy = played(actions(schedule, ranks, 1, micro), 1)
    for busy_s in busy:
        assert 1 - busy_s / total_s == pytest.approx((ranks - 1) / (ranks + micro - 1))


def test_interleaving_and_zero_bubble_are_less_idle() -> None:
    plain, _ = played(actions("1f1b", 4, 1, 8), 1)
    interleaved, _ = played(actions("interleaved", 4, 2, 8), 2)
    zero, _ = played(actions("zero_bubble", 4, 1, 8), 1)
    assert interleaved < plain
    assert zero < plain
    assert played(actions("zero_bubble_v", 4, 2, 8), 2)[0] < zero


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_behind() -> None:
    for r, rank in enumerate(actions("1f1b", 4, 1, 16)):
        alive = most = 0
        for action in rank:
            alive += {"F": 1, "B": -1}.get(action.kind, 0)
            most = max(most, alive)
        assert most == 4 - r


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_admitted_runs_and_what_is_not_runs_as_gpipe(schedule: str) -> None:
    for ranks, per_rank, micro in [(r, p, m) for r in (1, 2, 3, 4) for p in (1, 2) for m in range(1, 10)]:
        if NAMED_ORDERS[schedule].admits(ranks, per_rank, micro):
            played(actions(schedule, ranks, per_rank, micro), per_rank)
        else:
            with pytest.raises(ValueError):
                actions(schedule, ranks, per_rank, micro)
            short = order_for_batch(schedule, ranks, per_rank, micro)
            assert short == pipeline_order("gpipe", ranks, per_rank, micro)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpipe2' is not known; choose one of gpipe, 1f1b"):
        actions("gpipe2", 2, 1, 4)
