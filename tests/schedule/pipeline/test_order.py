"""Orders: their text, what follows from them, and the named ones against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS, ScheduleZBVZeroBubble, _Action, _add_send_recv

from hocket.schedule import ScheduleError
from hocket.schedule.pipeline import (
    NAMED_ORDERS,
    PipelineAction,
    PipelineOrder,
    bubble,
    describe,
    grid,
    order_for_batch,
    pipeline_order,
    read_order,
    stage_homes,
    verify,
)

GRID = [
    (name, p, v, m)
    for name, one in NAMED_ORDERS.items()
    for p in range(1, 6)
    for v in (1, 2, 3)
    for m in range(1, 13)
    if one.admits(p, v, m)
]


V_BY_HAND = """
order v ranks=2 stages=4 micro_batches=2
rank 0
  0F0 0F1 3F0 3B0 3F1 3I1 0B0 3W1 0B1
rank 1
  1F0 2F0 1F1 2F1 2B0 1I0 2B1 1W0 1B1
"""

# --- torch's own orders ---------------------------------------------------------------------------------------------


class StandIn:
    """What the constructors of torch's schedules ask of a stage: numbers, and no process group."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.stage_index = self.group_rank = 0
        self.group_size, self.num_stages = ranks, stages
        self.is_last, self.has_backward = stages == 1, True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}


def torchs(name: str, p: int, v: int, m: int) -> list[list[Any]]:
    """What torch's own schedule computes, rank by rank."""
    stages: list[Any] = [StandIn(p, p * v) for _ in range(v)]
    order: Any
    if name == "1f1b" and v == 1 and m >= p:
        order = Schedule1F1B(stages[0], m)._get_pipeline_order()
        for rank in range(p):  # in torch 2.13 the last rank's forwards are numbered from 1
            numbers = iter(range(m))
            order[rank] = [
                a._replace(microbatch_index=next(numbers)) if a is not None and a.computation_type.value == "F" else a
                for a in order[rank]
                if a is None or a.computation_type.value in ("F", "B")
            ]
    elif name == "gpipe" or (name == "1f1b" and v == 1):  # with fewer micro-batches than ranks torch's 1F1B refuses
        order = ScheduleLoopedBFS(stages, m).pipeline_order
    elif name == "zero_bubble":
        order = ScheduleInterleavedZeroBubble(stages, m).pipeline_order
    elif name == "zero_bubble_v":
        order = ScheduleZBVZeroBubble(stages, m).pipeline_order
    else:
        order = ScheduleInterleaved1F1B(stages, m).pipeline_order
    return [[action for action in order[rank] if action is not None] for rank in range(p)]


def plain(action: Any) -> PipelineAction:
    return PipelineAction(action.stage_index, action.computation_type.value, action.microbatch_index)


TORCHS = [shape for shape in GRID if shape[0] in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v")]


def test_named_orders_are_torchs_action_by_action() -> None:
    assert len(TORCHS) > 400
    for shape in TORCHS:
        theirs = tuple(tuple(plain(action) for action in rank) for rank in torchs(*shape))
        assert pipeline_order(*shape).ranks == theirs, shape


@pytest.mark.parametrize(("name", "p", "v", "m"), [shape for shape in TORCHS if shape[3] in (1, 4, 6)])
def test_messages_are_torchs_between_every_two_ranks(name: str, p: int, v: int, m: int) -> None:
    order = pipeline_order(name, p, v, m).with_messages()
    homes = stage_homes(name, p, v)
    theirs = _add_send_recv(dict(enumerate(torchs(name, p, v, m))), homes.__getitem__, p * v)
    for rank in range(p):
        mine, its = order.ranks[rank], [plain(action) for action in theirs[rank]]
        assert sorted(mine) == sorted(its)
        for peer in range(p):
            assert talk(mine, peer, homes) == talk(its, peer, homes)


def talk(actions: Any, peer: int, homes: tuple[int, ...]) -> dict[str, list[PipelineAction]]:
    """What a rank sends to and receives from another, in order."""
    found: dict[str, list[PipelineAction]] = {"SEND": [], "RECV": []}
    for action in actions:
        verb, _, way = action.kind.partition("_")
        if way:
            other = action.stage + (1 if (way == "F") == (verb == "SEND") else -1)
            if homes[other] == peer:
                found[verb].append(action)
    return found


def test_texts_of_actions_are_torchs() -> None:
    for rank in pipeline_order("zero_bubble", 3, 1, 6).with_messages().ranks:
        for action in rank:
            assert plain(_Action.from_str(str(action))) == action


# --- the value ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.sampled_from(GRID), st.booleans())
def test_the_text_is_read_back(shape: tuple[str, int, int, int], messages: bool) -> None:
    order = pipeline_order(*shape)
    order = order.with_messages() if messages else order
    assert PipelineOrder.parse(str(order)) == order
    assert order.with_messages().computes() == order.computes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: ''; expected 'order NAME"),
        ("order x ranks=1 stages=1 micro_batches=1\n0F0", "line 2: '0F0'; expected 'rank 0'"),
        ("order x ranks=1 stages=1 micro_batches=1\nrank 1", "line 2: 'rank 1'; expected 'rank 0'"),
        ("order x ranks=1 stages=1 micro_batches=1\nrank 0\n0G0", "line 3: '0G0'; expected"),
        ("order x ranks=2 stages=2 micro_batches=1\nrank 0\n0F0 0B0", "ranks=2, and the actions of 1 are given"),
        ("order x ranks=2 stages=3 micro_batches=1\nrank 0\nrank 1", "stages that are a multiple of the ranks"),
        ("order x ranks=1 stages=1 micro_batches=1\nrank 0\n0F1", "line 3: 0F1; stages are 0 to 0"),
    ],
)
def test_what_is_no_order_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        PipelineOrder.parse(text)
    assert message in str(caught.value)


def test_comments_empty_lines_and_more_spaces_or_tabs_are_left_out() -> None:
    text = "# mine\norder  mine\tranks=1 stages=1 micro_batches=1\n\nrank\t0:\n  0F0 # forward\n\t0B0\n"
    assert PipelineOrder.parse(text) == PipelineOrder(
        "mine", 1, 1, ((PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)),)
    )


# --- what follows from a rule ---------------------------------------------------------------------------------------


def test_memory_follows_from_the_rule() -> None:
    for name, p, v, m in GRID:
        order, rule = pipeline_order(name, p, v, m), NAMED_ORDERS[name]
        for rank in range(p):
            assert order.in_flight(rank) == rule.in_flight(p, v, m, rank)


@pytest.mark.parametrize(
    ("name", "p", "v", "m"),
    [
        *(("gpipe", p, v, m) for p in (2, 4) for v in (1, 2) for m in (4, 6, 8)),
        *(("1f1b", p, 1, m) for p in (2, 3, 4, 8) for m in (2, 6, 16)),
        *(("interleaved", p, v, p * k) for p in (2, 3, 4) for v in (2, 3) for k in (1, 2, 3)),
        *(("zero_bubble", p, 1, p * k) for p in (2, 3, 4, 8) for k in (2, 4)),
        *(("zero_bubble_v", p, 2, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p - 1, 4 * p)),
    ],
)
def test_idle_shares_are_those_published(name: str, p: int, v: int, m: int) -> None:
    assert pipeline_order(name, p, v, m).idle_share() == pytest.approx(NAMED_ORDERS[name].idle_share(p, v, m))


def test_a_v_leaves_ranks_idle_while_it_fills_and_drains_alone() -> None:
    """Each rank works without a break, the last one as much later as there are ranks before it."""
    for p in (2, 3, 8):
        assert pipeline_order("zero_bubble_v", p, 2, 3 * p).idle_share() == pytest.approx(bubble(p, 3 * p, 6))
        order = pipeline_order("zero_bubble_v", p, 2, 3 * p)
        assert [order.in_flight(rank) for rank in range(p)] == [p] * p  # the same on all, and 1F1B's on the first


def test_the_rank_of_a_stage_is_the_one_that_does_it() -> None:
    assert pipeline_order("zero_bubble_v", 3, 2, 4).homes == stage_homes("zero_bubble_v", 3, 2) == (0, 1, 2, 2, 1, 0)
    for name, p, v, m in GRID:
        assert pipeline_order(name, p, v, m).homes == stage_homes(name, p, v), name


def test_a_short_batch_and_an_evaluation_leave_the_stages_where_they_are() -> None:
    v = PipelineOrder.parse(V_BY_HAND)
    assert order_for_batch(V_BY_HAND, 2, 2, 2) == v
    short = order_for_batch(V_BY_HAND, 2, 2, 1)
    assert (short.name, short.homes) == ("gpipe", (0, 1, 1, 0)) == ("gpipe", v.homes)
    assert not verify(short.with_messages())


def test_the_bubble_of_gpipe_and_of_interleaving() -> None:
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert bubble(4, 8, 2) == pytest.approx(3 / 19)


def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_behind() -> None:
    order = pipeline_order("1f1b", 4, 1, 16)
    assert [order.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [order.warm_up(rank) for rank in range(4)] == [4, 3, 2, 1]


def test_zero_bubble_leaves_the_weights_of_as_many_as_there_are_ranks_before() -> None:
    order = pipeline_order("zero_bubble", 4, 1, 8)
    assert [order.weights_left(rank) for rank in range(4)] == [1, 2, 3, 4]
    assert order.halves
    assert not pipeline_order("1f1b", 4, 1, 8).halves


def test_the_nearest_number_of_micro_batches_is_one_that_is_admitted() -> None:
    for name, rule in NAMED_ORDERS.items():
        for p, v, m in [(p, v, m) for p in (1, 2, 3, 4) for v in (1, 2) for m in range(1, 12)]:
            v = rule.stages or v
            near = rule.nearest(p, v, m)
            assert rule.admits(p, v, near)
            assert near == m or not rule.admits(p, v, m)
            assert all(not rule.admits(p, v, k) for k in range(1, 40) if abs(k - m) < abs(near - m)), name


# --- what is meant --------------------------------------------------------------------------------------------------


def test_an_order_is_named_or_read_from_a_file_or_from_its_text(tmp_path: Any) -> None:
    named = pipeline_order("1f1b", 2, 1, 4)
    path = tmp_path / "mine.txt"
    path.write_text(str(named))
    assert pipeline_order(str(path), 2, 1, 4) == pipeline_order(str(named), 2, 1, 4) == read_order(str(path)) == named


def test_what_is_meant_and_is_not_there_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ScheduleError, match=r"'gpipe2' is not known; choose one of gpipe, 1f1b, .* or a file"):
        pipeline_order("gpipe2", 2, 1, 4)
    with pytest.raises(ScheduleError, match="is for 2 ranks x 1 stages x 4 micro-batches, not for 2 x 1 x 8"):
        pipeline_order(str(pipeline_order("1f1b", 2, 1, 4)), 2, 1, 8)
    with pytest.raises(
        ScheduleError, match="7 cannot be run by the schedule 'interleaved' on 2 ranks x 2 stages; take 8"
    ):
        pipeline_order("interleaved", 2, 2, 7)
    path = tmp_path / "broken.txt"
    path.write_text("order x ranks=1 stages=1 micro_batches=1\nrank 0\n0F0")
    with pytest.raises(
        ScheduleError, match=r"broken.txt: line 2: the order x cannot be carried out: rank 0: 0B0 .* is missing"
    ):
        read_order(str(path))


def test_a_short_batch_runs_in_the_order_of_gpipe() -> None:
    mine = str(pipeline_order("1f1b", 2, 1, 4))
    assert order_for_batch(mine, 2, 1, 4).name == "1f1b"
    assert order_for_batch(mine, 2, 1, 3) == pipeline_order("gpipe", 2, 1, 3)
    assert order_for_batch("interleaved", 2, 2, 7) == pipeline_order("gpipe", 2, 2, 7)
    assert order_for_batch("interleaved", 2, 2, 8) == pipeline_order("interleaved", 2, 2, 8)


def test_a_grid_shows_who_computes_when() -> None:
    assert grid(pipeline_order("gpipe", 2, 1, 2)) == (
        "time   0              5\nrank 0 F0 F1 .  .  .  B1 -  B0 -\nrank 1 .  F0 F1 B1 -  B0 -  .  .\n"
    )
    assert (
        describe(pipeline_order("interleaved", 2, 2, 4))
        == "interleaved: 2 ranks, 4 stages, 4 micro-batches; idle 11.1%"
    )


def test_a_large_grid_is_cut_and_says_so() -> None:
    text = grid(pipeline_order("1f1b", 4, 1, 40))
    assert "33 more columns are not shown." in text


BROKEN = "\ufeff# by hand\r\norder x ranks=2 stages=2 micro_batches=1\r\n\r\nrank 0\r\n  0F0\r\n  0B0\r\nrank 1:\r\n"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("  1B0  # first\n  1F0\n", r"line 8: the order x .*: rank 1, action 0: 1B0 needs 1F0"),
        ("  1F0\n", r"line 7: the order x .*: rank 1: 1B0 .* is missing"),
        ("  1F0\n  1B0 1B0\n", r"line 9: the order x .*: rank 1, action 2: 1B0 is done already"),
        ("  1F0\n  2B0\n", r"line 9: 2B0; stages are 0 to 1"),
        (f"  1F{'9' * 5000}\n", "line 8: '1F9"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(rest: str, message: str, tmp_path: Any) -> None:
    """Also in a file of Windows: its line ends, and the mark at its beginning."""
    file = tmp_path / "order.txt"
    file.write_bytes((BROKEN + rest).encode())
    with pytest.raises(ScheduleError, match=f"order.txt: {message}"):
        read_order(str(file))
    file.write_bytes((BROKEN + "  1F0 1B0\r\n").encode())
    assert read_order(str(file)).stages == 2


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Any) -> None:
    (tmp_path / "order.txt").write_bytes("order x".encode("utf-16"))
    with pytest.raises(ScheduleError, match="order.txt': the file is no text in UTF-8"):
        read_order(str(tmp_path / "order.txt"))


def test_a_wrong_number_of_stages_is_found_at_once() -> None:
    text = "order x ranks=1 stages=999999999 micro_batches=999999999\nrank 0\n  0F0\n"
    with pytest.raises(ScheduleError, match="0B0 .* is missing"):
        read_order(text)
